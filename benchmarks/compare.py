"""Runs the cases, both managers interleaved, and works the ratios out."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .cases import CASES, Case, Row, Sample, prepare_decode, prepare_start
from .floor import bare_loop
from .memory import in_child
from .peers import Kvpager, Peer, Vllm
from .shapes import BLOCK, FULL, LONG
from .ways import ways

BIG = 1_000_000
"""Blocks of the big pool."""
MANY = ", 2,560 running"
"""In a row's name: ten times the running requests."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured line. Times in the row's unit; ``ratio`` is the peer's figure over ours."""

    name: str
    unit: str
    num_blocks: int
    ours: float
    theirs: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether what is wanted is reached; None where nothing is wanted or nobody to compare with."""
        if self.at_most is not None:
            return self.ours <= self.at_most
        return None if self.ratio is None or self.at_least is None else self.ratio >= self.at_least


def run(peer: Vllm | None, *, repetitions: int, big: bool, only: str, note: Callable[[str], None]) -> Iterator[Result]:
    """All cases whose rows contain ``only``; ``note`` hears what is being measured or left out."""
    peers: list[Peer] = [Kvpager(), *([peer] if peer else [])]
    for case in CASES:
        if not any(only in row.name for row in case.rows):
            continue
        sizes = (case.num_blocks, BIG) if big and case.scales else (case.num_blocks,)
        for size in sizes:
            note(f"{case.rows[0].name}, {size:,} blocks")
            yield from _results(case, size, _interleaved(case, size, peers, repetitions))
    for extra in (_ways, _floor, _more_requests, _start, _memory):
        yield from extra(peers, repetitions, big, only, note)


def _interleaved(case: Case, size: int, peers: list[Peer], repetitions: int) -> list[list[dict[str, float]]]:
    """Samples of each peer, taken in turns: what one meets on a busy machine, the others meet too."""
    samplers: list[Sample] = [case.prepare(peer, size) for peer in peers]
    for sampler in samplers:
        sampler()
    gc.collect()
    gc.freeze()
    samples: list[list[dict[str, float]]] = [[] for _ in peers]
    for repetition in range(repetitions):
        order = range(len(peers)) if repetition % 2 else reversed(range(len(peers)))
        for i in order:
            samples[i].append(samplers[i]())
    gc.unfreeze()
    return samples


def _results(case: Case, size: int, samples: list[list[dict[str, float]]]) -> Iterator[Result]:
    for row in case.rows:
        series = [[sample[row.name] / 1e3 for sample in taken] for taken in samples]
        yield _result(row, size, *series)


def _result(row: Row, size: int, ours: list[float], theirs: list[float] | None = None) -> Result:
    if theirs is None:
        median = statistics.median(ours)
        return Result(**asdict(row), num_blocks=size, ours=median)
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    return Result(
        **asdict(row),
        num_blocks=size,
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        ratio_low=ratios[quarter],
        ratio_high=ratios[-1 - quarter],
    )


Note = Callable[[str], None]


def _ways(peers: list[Peer], repetitions: int, big: bool, only: str, note: Note) -> Iterator[Result]:
    """Calls out of the ordinary beside the ordinary one, which stands in the peer's column: at most twice its time."""
    for row, pair in ways():
        if only not in row.name:
            continue
        note(row.name)
        pair()
        pairs = [pair() for _ in range(repetitions * 3)]
        yield _result(row, 0, [ours / 1e3 for ours, _ in pairs], [theirs / 1e3 for _, theirs in pairs])


def _floor(peers: list[Peer], repetitions: int, big: bool, only: str, note: Note) -> Iterator[Result]:
    """Hashing against a bare libcrypto loop: at most 1.5 times its time, so at least 1 / 1.5 of its ratio."""
    name = "hash, bare libcrypto loop"
    if only not in name:
        return
    bare = bare_loop(LONG // BLOCK)
    if isinstance(bare, str):
        note(bare)
        return
    sampler = CASES[0].prepare(peers[0], 0)
    pairs = [(sampler()["hash"] / 1e3, bare() / 1e3) for _ in range(repetitions * 3)]
    row = Row(name=name, unit="µs/block", at_least=1 / 1.5)
    yield _result(row, 0, [ours for ours, _ in pairs], [theirs for _, theirs in pairs])


def _more_requests(peers: list[Peer], repetitions: int, big: bool, only: str, note: Note) -> Iterator[Result]:
    """Ten times the running requests: the time a request should stay what it is."""
    name = f"decode, full{MANY}"
    if only not in name:
        return
    note(name)
    rows = (Row(name=name, unit="µs/request"), Row(name=f"{name}, batch call", unit="µs/request"))
    case = Case(rows=rows, prepare=prepare_decode(FULL, name, 2_560), num_blocks=400_000)
    yield from _results(case, case.num_blocks, _interleaved(case, case.num_blocks, peers, max(3, repetitions // 2)))


def _start(peers: list[Peer], repetitions: int, big: bool, only: str, note: Note) -> Iterator[Result]:
    """Making a manager with a big pool: under 50 ms."""
    if only not in "start" or not big:
        return
    note("start, 1,000,000 blocks")
    case = Case(rows=(Row(name="start", unit="ms", at_most=50),), prepare=prepare_start, num_blocks=BIG, scales=False)
    samples = _interleaved(case, BIG, peers, max(3, repetitions // 3))
    in_ms = [[{"start": sample["start"] / 1e3} for sample in taken] for taken in samples]
    yield from _results(case, BIG, in_ms)


def _memory(peers: list[Peer], repetitions: int, big: bool, only: str, note: Note) -> Iterator[Result]:
    """Bytes a block with every block cached: at most 96."""
    if only not in "memory" or not big:
        return
    note("memory, 1,000,000 blocks")
    measured = [in_child(peer.name, BIG) for peer in peers]
    for state in ("empty", "cached"):
        figures = [figure[state] for figure in measured if figure]
        if len(figures) < len(peers):
            note("memory could not be measured")
            return
        ratio = figures[1] / figures[0] if len(figures) > 1 and state == "cached" else None
        yield Result(
            name=f"memory, {state}",
            unit="B/block",
            num_blocks=BIG,
            ours=figures[0],
            theirs=figures[1] if len(figures) > 1 else None,
            ratio=ratio,
            at_most=96 if state == "cached" else None,
        )


def growth(results: list[Result]) -> list[dict[str, Any]]:
    """How much a row's time grows from its plain pool to the big one, and with ten times the requests."""
    grown = []
    for small in results:
        for large in results:
            if large.name == small.name and large.num_blocks == BIG > small.num_blocks > 0:
                grown.append(_grown(small, large, f"{BIG / small.num_blocks:.3g}x blocks"))
            if MANY in large.name and large.name.replace(MANY, "") == small.name and small.num_blocks < BIG:
                grown.append(_grown(small, large, "10x requests"))
    return grown


def _grown(small: Result, large: Result, times: str) -> dict[str, Any]:
    theirs = large.theirs / small.theirs if large.theirs and small.theirs else None
    return {"name": small.name, "times": times, "ours": large.ours / small.ours, "theirs": theirs}


def as_json(results: list[Result], header: dict[str, Any]) -> dict[str, Any]:
    """Everything, for a machine."""
    return {**header, "results": [{**asdict(r), "holds": r.holds} for r in results], "growth": growth(results)}
