"""A run of an engine over some prompts, as an object, as a table and as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

from .engine import Engine, Prompt
from .results import Completion, Delta, EngineStats
from .sampling import SamplingParams

__all__ = ["Run", "as_json", "requests_table", "run", "summary_table"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came out of ``prompts`` that were all there at the start. Times are in seconds."""

    title: str
    completions: tuple[Completion, ...]
    stats: EngineStats
    seconds: float

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(completion.prompt_token_ids) for completion in self.completions)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were in the cache when their request was first admitted."""
        return sum(completion.num_cached_tokens for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.stats.num_generated_tokens / self.seconds

    @property
    def mean_time_to_first_token(self) -> float:
        """Over the requests that got a token."""
        times = [c.time_to_first_token for c in self.completions if c.time_to_first_token is not None]
        return mean(times) if times else 0.0


def run(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    title: str,
    on_delta: Callable[[int, Delta], None] = lambda index, delta: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Answer all prompts with a fresh engine. ``on_delta`` gets the prompt's index and each piece of its answer."""
    started = clock()
    ids = [engine.add(prompt, its_params) for prompt, its_params in zip(prompts, params, strict=True)]
    index = {request_id: position for position, request_id in enumerate(ids)}
    completions: dict[int, Completion] = {}
    while engine.has_unfinished:
        for delta in engine.step():
            on_delta(index[delta.request_id], delta)
            if delta.completion is not None:
                completions[index[delta.request_id]] = delta.completion
    in_order = tuple(completions[position] for position in range(len(ids)))
    return Run(title=title, completions=in_order, stats=engine.stats, seconds=clock() - started)


def requests_table(run: Run, titles: Sequence[str]) -> Table:
    """One line a request: tokens of its prompt, cached ones, tokens of its answer; when the first and the last came."""
    table = Table(title="requests", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("prompt", max_width=15, no_wrap=True)
    for heading in ("tokens", "cached", "answer", "end", "preempted", "first", "last"):
        table.add_column(heading, justify="right", no_wrap=True)
    for title, c in zip(titles, run.completions, strict=True):
        first = "" if c.time_to_first_token is None else f"{c.time_to_first_token:.1f} s"
        counts = (len(c.prompt_token_ids), c.num_cached_tokens, len(c.token_ids))
        table.add_row(
            title.replace("\n", " "),
            *(f"{count:,}" for count in counts),
            c.finish_reason,
            f"{c.num_preemptions:,}",
            first,
            f"{c.time_to_last_token:.1f} s",
        )
    return table


def summary_table(runs: Sequence[Run]) -> Table:
    """What the cache did, one column a run."""
    table = Table(title="what the cache did", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for one in runs:
        table.add_column(one.title, justify="right")
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("prompt tokens", lambda r: f"{r.num_prompt_tokens:,}"),
        (
            "  found in the cache",
            lambda r: f"{r.num_cached_tokens:,} ({r.num_cached_tokens / r.num_prompt_tokens:.0%})",
        ),
        ("  computed", lambda r: f"{r.stats.num_prefill_tokens:,}"),
        ("generated tokens", lambda r: f"{r.stats.num_generated_tokens:,}"),
        ("generated tokens / s", lambda r: f"{r.tokens_per_second:.1f}"),
        ("time to first token, mean", lambda r: f"{r.mean_time_to_first_token:.2f} s"),
        ("time in all", lambda r: f"{r.seconds:.2f} s"),
        ("steps", lambda r: f"{r.stats.num_steps:,}"),
        ("preemptions", lambda r: f"{r.stats.num_preemptions:,}"),
        ("blocks in use at most", lambda r: f"{r.stats.peak_usage:.1%}"),
    ]
    for label, show in rows:
        table.add_row(label, *map(show, runs))
    return table


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The runs as plain objects."""
    return [
        {
            "title": one.title,
            "seconds": one.seconds,
            "tokens_per_second": one.tokens_per_second,
            "mean_time_to_first_token": one.mean_time_to_first_token,
            "stats": asdict(one.stats),
            "completions": [{k: v for k, v in vars(c).items() if k != "logits"} for c in one.completions],
        }
        for one in runs
    ]
