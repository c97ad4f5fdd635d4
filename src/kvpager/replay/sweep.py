"""The same trace at several cache sizes, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import msgspec
from rich.table import Table

from ..counts import as_count
from ..errors import ConfigError
from .options import ReplayOptions
from .report import ReplayReport
from .simulate import replay
from .sources import STDIN
from .traces import read_trace
from .workload import builtin_workload

__all__ = ["Input", "sweep", "sweep_table"]


@dataclass(frozen=True, kw_only=True)
class Input:
    """What to replay: the trace at ``path``, or without one the built-in workload of ``seed``."""

    path: str | None = None
    seed: int = 0


def sweep(
    source: Input,
    options: ReplayOptions,
    sizes: Sequence[int],
    *,
    num_processes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[tuple[int, ReplayReport]]:
    """A report for each number of blocks, in the order of ``sizes``.

    Every process reads the trace itself. ``progress`` is called with the number of sizes that are done.
    Raises ``ConfigError``, ``TraceError``.
    """
    if source.path == STDIN:
        raise ConfigError("a sweep reads its trace once for each size; give a file instead of -")
    if num_processes is not None:
        num_processes = as_count(num_processes, "num_processes", 1)
    sizes = [as_count(size, f"sizes[{index}]", 1) for index, size in enumerate(sizes)]
    if not sizes:
        return []
    all_options = [replace(options, config=replace(options.config, num_blocks=size)) for size in sizes]
    num_processes = min(num_processes or os.cpu_count() or 1, len(sizes))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context) as pool:
        futures = [pool.submit(_replay_one, source, each) for each in all_options]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if progress is not None:
                    progress(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [(size, msgspec.json.decode(f.result(), type=ReplayReport)) for size, f in zip(sizes, futures, strict=True)]


def _replay_one(source: Input, options: ReplayOptions) -> bytes:
    sessions = builtin_workload(source.seed) if source.path is None else read_trace(source.path)
    return msgspec.json.encode(replay(sessions, options).report)


def sweep_table(reports: Sequence[tuple[int, ReplayReport]]) -> Table:
    """A row for each size."""
    table = Table()
    for name in ("blocks", "hit rate", "infinite cache", "evicted blocks", "preemptions", "refused", "simulated s"):
        table.add_column(name, justify="right", no_wrap=True)
    for size, report in reports:
        table.add_row(
            f"{size:,}",
            f"{report.hit_rate:.2%}",
            f"{report.ideal_hit_rate:.2%}",
            f"{report.evicted_blocks:,}",
            f"{report.preemptions:,}",
            f"{report.refused:,}",
            f"{report.simulated_seconds:,.1f}",
        )
    return table
