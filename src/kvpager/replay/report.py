"""What a replay found out, as a report to keep and as a table to read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from rich.table import Table

from .timeline import Timeline

__all__ = ["QueueTime", "ReplayOutcome", "ReplayReport", "report_table"]


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a replay; its fields are the keys of ``--json``.

    ``requests`` and ``prompt_tokens`` are all that arrived, refused ones included. ``hit_tokens`` are counted
    when a request is admitted for the first time: what it hits when it returns after a preemption does
    not count. ``ideal_hit_rate`` is that of a cache that never forgets and refuses nobody.
    ``usage`` is 0 to 1; its mean is weighted by simulated time. ``manager_cpu_seconds`` is the
    processor time spent inside the manager's methods.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    ideal_hit_rate: float
    generated_tokens: int
    evicted_blocks: int
    preemptions: int
    refused: int
    peak_usage: float
    mean_usage: float
    steps: int
    simulated_seconds: float
    manager_cpu_seconds: float
    wall_seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class QueueTime:
    """Simulated seconds from a request's arrival to the step that first admits it."""

    mean: float
    longest: float


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """A replay's report, and what is told beside it."""

    report: ReplayReport
    queue_time: QueueTime
    num_checks: int
    timeline: Timeline


def report_table(outcome: ReplayOutcome) -> Table:
    """The figures as a two-column table."""
    report = outcome.report
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in _rows(report, outcome.queue_time):
        table.add_row(name, value)
    if outcome.num_checks:
        table.add_row("invariants", f"checked {outcome.num_checks:,} times, no violation")
    return table


def _rows(report: ReplayReport, queue_time: QueueTime) -> list[tuple[str, str]]:
    return [
        ("requests", f"{report.requests:,}"),
        ("prompt tokens", f"{report.prompt_tokens:,}"),
        ("tokens hit", f"{report.hit_tokens:,}"),
        ("hit rate", f"{report.hit_rate:.2%}"),
        ("hit rate of an infinite cache", f"{report.ideal_hit_rate:.2%}"),
        ("generated tokens", f"{report.generated_tokens:,}"),
        ("evicted blocks", f"{report.evicted_blocks:,}"),
        ("preemptions", f"{report.preemptions:,}"),
        ("refused", f"{report.refused:,}"),
        ("usage, peak / mean", f"{report.peak_usage:.1%} / {report.mean_usage:.1%}"),
        ("queue time, mean / longest", f"{queue_time.mean:,.2f} s / {queue_time.longest:,.2f} s simulated"),
        ("steps", f"{report.steps:,} in {report.simulated_seconds:,.1f} s simulated"),
        ("manager CPU time", f"{report.manager_cpu_seconds:,.2f} s"),
        ("manager CPU time per request", _microseconds(report.manager_cpu_seconds, report.requests)),
        ("manager CPU time per step", _microseconds(report.manager_cpu_seconds, report.steps)),
        ("wall time, peak memory", f"{report.wall_seconds:,.1f} s, {report.peak_rss_bytes / 2**20:,.0f} MiB"),
    ]


def _microseconds(seconds: float, count: int) -> str:
    return f"{seconds / count * 1e6:,.1f} µs" if count else "none"
