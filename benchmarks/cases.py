"""What is measured. Each case makes a sampler per peer; a sample is one timed repetition."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .peers import Kvpager, Peer, buffer_of, tokens_of
from .shapes import BLOCK, FULL, LONG, MAMBA, STEP, WINDOWS, Shape

Sample = Callable[[], dict[str, float]]
"""One repetition: nanoseconds per unit, by row name."""
INNER = 5
"""Calls in a sample, where one alone would be over before caches are warm."""
TURN = 4 * BLOCK
"""Decode steps in a row before it is the other manager's turn: each request takes, and commits, a block four times."""
_ids = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    unit: str
    at_least: float | None = None
    """The ratio that is wanted: the peer's time over ours."""
    at_most: float | None = None
    """Our own figure that is wanted, in ``unit``."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows that are measured together. ``prepare`` makes a sampler for a peer and a pool size."""

    rows: tuple[Row, ...]
    prepare: Callable[[Peer, int], Sample]
    num_blocks: int
    """Blocks of the pool in the plain run."""
    scales: bool = True
    """Whether it is run again with a big pool."""


def admit(peer: Peer, manager: Any, request: Any, shape: Shape) -> int:
    """Compute a whole prompt in steps as a scheduler would; the tokens hit."""
    blocks, hit = manager.get_computed_blocks(request)
    start, first = hit, True
    while start < request.num_tokens:
        new = peer.limit_step(manager, request, start, min(STEP, request.num_tokens - start), shape)
        if first:
            done = manager.allocate_slots(request, new, hit, blocks, full_sequence_must_fit=True)
        else:
            done = manager.allocate_slots(request, new)
        assert done is not None, f"{peer.name}: the pool of the benchmark is too small"
        start, first = start + new, False
        request.num_computed_tokens = start
        request.status = peer.running
        manager.new_step_starts()
    return int(hit)


def new_request(peer: Peer, tokens: list[int], hasher: Any) -> Any:
    """A request with an id of its own."""
    return peer.request(f"r{next(_ids)}", tokens, hasher)


def fill(peer: Peer, manager: Any, shape: Shape, num_blocks: int, hasher: Any) -> None:
    """Leave (nearly) every block of the pool cached and evictable."""
    rng = random.Random(3)
    tokens = min(LONG, num_blocks // (2 * shape.num_groups) * BLOCK)
    for _ in range(num_blocks * BLOCK // tokens + 1):
        request = new_request(peer, tokens_of(tokens, rng), hasher)
        admit(peer, manager, request, shape)
        manager.free(request)
        manager.take_events()
        manager.take_new_block_ids()


def prepare_hash(peer: Peer, num_blocks: int) -> Sample:
    """Hash a 32k-token prompt: from a buffer where the peer takes one, and from a list."""
    tokens = tokens_of(LONG, random.Random(1))
    ours = isinstance(peer, Kvpager)
    prompts = {"hash": buffer_of(tokens) if ours else new_request(peer, tokens, None)}
    prompts["hash, from a list"] = tokens if ours else prompts["hash"]

    def sample() -> dict[str, float]:
        times = {}
        for name, prompt in prompts.items():
            start = time.perf_counter_ns()
            count = peer.hash(prompt)
            times[name] = (time.perf_counter_ns() - start) / count
        return times

    return sample


def prepare_lookup(peer: Peer, num_blocks: int) -> Sample:
    """Look up a prompt whose 2,048 blocks are all cached."""
    manager, hasher = peer.manager(FULL, num_blocks), peer.hasher()
    prompt = tokens_of(LONG + 1, random.Random(2))
    request = new_request(peer, prompt, hasher)
    admit(peer, manager, request, FULL)
    manager.free(request)
    again = new_request(peer, prompt, hasher)

    def sample() -> dict[str, float]:
        start = time.perf_counter_ns()
        for _ in range(INNER):
            _, hit = manager.get_computed_blocks(again)
        took = time.perf_counter_ns() - start
        assert hit == LONG
        return {"look-up": took / INNER / (LONG // BLOCK)}

    return sample


def prepare_prefill(peer: Peer, num_blocks: int) -> Sample:
    """Allocate and commit 2,048 blocks in a pool full of cached blocks, and free them."""
    manager, hasher, rng = peer.manager(FULL, num_blocks), peer.hasher(), random.Random(4)
    fill(peer, manager, FULL, num_blocks, hasher)

    def cycle() -> tuple[int, int]:
        request = new_request(peer, tokens_of(LONG, rng), hasher)
        blocks, hit = manager.get_computed_blocks(request)
        start = time.perf_counter_ns()
        done = manager.allocate_slots(request, LONG, hit, blocks)
        allocated = time.perf_counter_ns()
        request.num_computed_tokens = LONG
        middle = time.perf_counter_ns()
        manager.free(request)
        freed = time.perf_counter_ns()
        assert done is not None and hit == 0
        manager.new_step_starts()
        manager.take_new_block_ids()
        return allocated - start, freed - middle

    def sample() -> dict[str, float]:
        allocating, freeing = map(sum, zip(*(cycle() for _ in range(INNER)), strict=True))
        num_blocks = INNER * LONG // BLOCK
        return {"allocate and commit": allocating / num_blocks, "free": freeing / num_blocks}

    return sample


def prepare_decode(shape: Shape, name: str, num_running: int = 256) -> Callable[[Peer, int], Sample]:
    """Decode steps of many requests; ours also with one call for the whole batch, if there is one."""

    def prepare(peer: Peer, num_blocks: int) -> Sample:
        one_by_one = _decoder(peer, shape, num_blocks, num_running, batched=False)
        has_batch = hasattr(peer.manager(shape, 2), "allocate_decode_slots")
        batched = _decoder(peer, shape, num_blocks, num_running, batched=True) if has_batch else None

        def sample() -> dict[str, float]:
            single = one_by_one()
            return {name: single, f"{name}, batch call": batched() if batched else single}

        return sample

    return prepare


def _decoder(peer: Peer, shape: Shape, num_blocks: int, num_running: int, batched: bool) -> Callable[[], float]:
    manager, hasher, rng = peer.manager(shape, num_blocks), peer.hasher(), random.Random(5)
    requests = []
    for _ in range(num_running):
        request = new_request(peer, tokens_of(rng.randint(512, 1536) + 1024 * (shape.window > 0), rng), hasher)
        admit(peer, manager, request, shape)
        request.append_output_token_ids(1)
        requests.append(request)
    allocate_batch = manager.allocate_decode_slots if batched else None

    def step() -> int:
        manager.new_step_starts()
        start = time.perf_counter_ns()
        if allocate_batch:
            allocate_batch(requests)
        else:
            allocate = manager.allocate_slots
            for request in requests:
                allocate(request, 1)
        took = time.perf_counter_ns() - start
        for request in requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)
        manager.take_new_block_ids()
        return took

    def turn() -> float:
        took = sum(step() for _ in range(TURN)) / TURN / num_running
        assert manager.usage < 0.99, f"{peer.name}: the pool of the benchmark is too small for so many repetitions"
        return took

    turn()
    return turn


def prepare_life(events: bool, name: str) -> Callable[[Peer, int], Sample]:
    """Whole lives: 64 requests of 2,048 prompt tokens, half of them shared, 64 tokens decoded each."""

    def prepare(peer: Peer, num_blocks: int) -> Sample:
        manager, hasher, rng = peer.manager(FULL, num_blocks, events=events), peer.hasher(), random.Random(6)
        fill(peer, manager, FULL, num_blocks, hasher)
        prefixes = [tokens_of(1024, rng) for _ in range(32)]

        def sample() -> dict[str, float]:
            prompts = [rng.choice(prefixes) + tokens_of(1024, rng) for _ in range(64)]
            start = time.perf_counter_ns()
            _live(peer, manager, hasher, prompts, events)
            took = time.perf_counter_ns() - start
            manager.take_new_block_ids()
            return {name: took / len(prompts)}

        return sample

    return prepare


def _live(peer: Peer, manager: Any, hasher: Any, prompts: list[list[int]], events: bool) -> None:
    requests = []
    for prompt in prompts:
        request = new_request(peer, prompt, hasher)
        admit(peer, manager, request, FULL)
        request.append_output_token_ids(0)
        requests.append(request)
    batch = getattr(manager, "allocate_decode_slots", None)
    for token in range(64):
        manager.new_step_starts()
        if batch:
            batch(requests)
        else:
            for request in requests:
                manager.allocate_slots(request, 1)
        for request in requests:
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)
        if events:
            manager.take_events()
    for request in requests:
        manager.free(request)


def prepare_start(peer: Peer, num_blocks: int) -> Sample:
    """Make a manager."""

    def sample() -> dict[str, float]:
        start = time.perf_counter_ns()
        manager = peer.manager(FULL, num_blocks)
        took = time.perf_counter_ns() - start
        del manager
        return {"start": took}

    return sample


def _decode_case(shape: Shape, name: str, at_least: float, num_blocks: int) -> Case:
    return Case(
        rows=(
            Row(name=name, unit="µs/request", at_least=at_least),
            Row(name=f"{name}, batch call", unit="µs/request", at_least=60),
        ),
        prepare=prepare_decode(shape, name),
        num_blocks=num_blocks,
    )


CASES = (
    Case(
        rows=(
            Row(name="hash", unit="µs/block", at_least=15),
            Row(name="hash, from a list", unit="µs/block"),
        ),
        prepare=prepare_hash,
        num_blocks=0,
        scales=False,
    ),
    Case(rows=(Row(name="look-up", unit="µs/block", at_least=30),), prepare=prepare_lookup, num_blocks=10_000),
    Case(
        rows=(
            Row(name="allocate and commit", unit="µs/block", at_least=20),
            Row(name="free", unit="µs/block", at_least=20),
        ),
        prepare=prepare_prefill,
        num_blocks=10_000,
    ),
    _decode_case(FULL, "decode, full", 10, 40_000),
    _decode_case(WINDOWS, "decode, full + 3 windows", 25, 160_000),
    _decode_case(MAMBA, "decode, full + Mamba align", 15, 60_000),
    Case(
        rows=(Row(name="whole life, events off", unit="µs/request", at_least=10),),
        prepare=prepare_life(False, "whole life, events off"),
        num_blocks=20_000,
    ),
    Case(
        rows=(Row(name="whole life, events on", unit="µs/request", at_least=10),),
        prepare=prepare_life(True, "whole life, events on"),
        num_blocks=20_000,
    ),
)
