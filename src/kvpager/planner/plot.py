"""The memory of one request against its length, for each kind of layer."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from .plan import Plan
from .report import kinds
from .units import format_tokens

__all__ = ["plot_plan"]


def plot_plan(plan: Plan, path: Path) -> None:
    """Write the figure (PNG, SVG or whatever the suffix says). Raises ``ConfigError`` if it can't be drawn."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    lengths = _lengths(plan.max_model_len)
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for groups in kinds(plan):
        held = [sum(plan.blocks_of_group(g, n, max_step=1) for g in groups) * plan.block_bytes / 2**20 for n in lengths]
        axes.plot(lengths, held, label=f"{groups[0].memory.label} ({sum(len(g.layers) for g in groups)} layers)")
    total = [plan.blocks_while_decoding(n) * plan.block_bytes / 2**20 for n in lengths]
    axes.plot(lengths, total, color="black", linewidth=2, label="all layers")
    axes.axhline(
        (plan.num_blocks - 1) * plan.block_bytes / 2**20, color="grey", linestyle="--", label="memory for the cache"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda tick, _: format_tokens(round(tick)))
    axes.set_xlabel("tokens of the request")
    axes.set_ylabel("MiB on one rank, while decoding")
    axes.set_title(f"{plan.model_type}, {plan.kv_dtype.name}: one request's KV cache")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the plot can't be written: {error}") from None


def _lengths(longest: int) -> list[int]:
    """Some 200 lengths from 16 (or less) to ``longest``, evenly spaced on a log scale."""
    first = min(16, longest)
    ratio = longest / first
    return sorted({round(first * ratio ** (i / 200)) for i in range(201)})
