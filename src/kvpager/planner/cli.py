"""``kvpager plan``: options in, a report out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ConfigError
from .arguments import PlanArguments, with_options
from .plan import DEFAULT_LENGTHS, Plan, TraceFit, plan
from .plot import plot_plan
from .report import as_json, as_table, side_by_side
from .units import parse_tokens

__all__ = ["plan_command"]


@with_options(arguments=PlanArguments)
def plan_command(
    *,
    context: typer.Context,
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG.json...", help="A config.json or its folder; several: side by side."),
    ],
    memory: Annotated[str, typer.Option(help="Memory of one GPU, or what is measured free on it: 80GiB.")],
    arguments: PlanArguments,
    lengths: Annotated[str | None, typer.Option(help="Lengths to count requests at: 1k,8k,128k.")] = None,
    trace: Annotated[str | None, typer.Option(help="A trace: how many requests of its lengths at once.")] = None,
    as_json_object: Annotated[bool, typer.Option("--json", help="Print an object; of several plans a list.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory against length to FILE.png or .svg.")] = None,
) -> None:
    """How a model's KV cache is laid out, what it costs per token and request, and how much fits."""
    options = arguments.options(memory)
    plans = [plan(config, options) for config in configs]
    traces = _traces(plans, context, trace)
    if plot is not None:
        if len(plans) > 1:
            raise ConfigError(f"--plot draws one model, {len(plans)} are given; leave one")
        plot_plan(plans[0], plot)
    if as_json_object:
        objects = [as_json(each, _lengths(lengths, [each]), fit) for each, fit in zip(plans, traces, strict=True)]
        typer.echo(json.dumps(objects[0] if len(objects) == 1 else objects))
    elif len(plans) == 1:
        Console().print(as_table(plans[0], _lengths(lengths, plans), traces[0]))
    else:
        Console().print(side_by_side(plans, _lengths(lengths, plans), traces))


def _lengths(text: str | None, plans: Sequence[Plan]) -> list[int]:
    """What the user asked for; otherwise the usual lengths that the models take, and the longest."""
    if text is not None:
        return [parse_tokens(length) for length in text.split(",")]
    longest = max(each.max_model_len for each in plans)
    return sorted({n for n in DEFAULT_LENGTHS if n < longest} | {longest})


def _traces(plans: Sequence[Plan], context: typer.Context, trace: str | None) -> list[TraceFit | None]:
    """The trace against each plan; who builds the command line hands over the reader of traces (``context.obj``)."""
    if trace is None:
        return [None] * len(plans)
    lengths = list(context.obj(trace))
    return [each.of_lengths(lengths) for each in plans]
