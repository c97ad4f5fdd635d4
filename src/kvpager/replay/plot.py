"""Pictures of a replay and of a sweep. Needs matplotlib, which is loaded only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .report import ReplayOutcome, ReplayReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot_path", "plot_replay", "plot_sweep"]

_FORMATS = (".png", ".svg")


def check_plot_path(path: str) -> None:
    """Refuse a picture that could not be written, before any work is done for it. Raises ``ConfigError``."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise ConfigError(f"a plot is written as .png or .svg, got {path!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path!r}: its directory does not exist")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plots need matplotlib; install kvpager[cli]") from error


def plot_replay(outcome: ReplayOutcome, path: str) -> None:
    """Usage, running and waiting requests, and hit rate over simulated time."""
    samples = outcome.timeline.samples
    seconds = [sample.seconds for sample in samples]
    figure = _figure(height=7.0)
    usage, requests, hits = figure.subplots(3, 1, sharex=True)
    usage.plot(seconds, [100 * sample.usage for sample in samples])
    usage.set_ylabel("pool in use (%)")
    requests.plot(seconds, [sample.num_running for sample in samples], label="running")
    requests.plot(seconds, [sample.num_waiting for sample in samples], label="waiting")
    requests.set_ylabel("requests")
    requests.legend()
    hits.plot(seconds, [100 * sample.hit_rate for sample in samples], label="so far")
    hits.axhline(100 * outcome.report.ideal_hit_rate, linestyle="--", color="gray", label="infinite cache")
    hits.set_ylabel("hit rate (%)")
    hits.set_ylim(0, 102)
    hits.set_xlabel("simulated time (s)")
    hits.legend()
    figure.savefig(path)


def plot_sweep(reports: Sequence[tuple[int, ReplayReport]], path: str) -> None:
    """Hit rate against cache size (num_blocks, report), with the line of an infinite cache."""
    figure = _figure(height=4.5)
    axes = figure.subplots()
    axes.plot([size for size, _ in reports], [100 * report.hit_rate for _, report in reports], marker="o")
    axes.axhline(100 * reports[0][1].ideal_hit_rate, linestyle="--", color="gray", label="infinite cache")
    axes.set_xscale("log")
    axes.set_xticks([size for size, _ in reports], [f"{size:,}" for size, _ in reports])
    axes.minorticks_off()
    axes.set_xlabel("cache size (blocks)")
    axes.set_ylabel("hit rate (%)")
    axes.set_ylim(0, 102)
    axes.legend()
    figure.savefig(path)


def _figure(*, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(8.0, height), layout="constrained")
