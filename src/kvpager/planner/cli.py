"""``kvpager plan``: options in, a report out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .plan import DEFAULT_LENGTHS, Plan, PlanOptions, plan
from .plot import plot_plan
from .report import as_json, as_table
from .units import parse_bytes, parse_tokens

__all__ = ["plan_command"]


def plan_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="A config.json, or its directory.")],
    memory: Annotated[str, typer.Option(help="Memory of one GPU, or what is measured free on it: 80GiB.")],
    weights_memory: Annotated[str, typer.Option(help="What weights and the rest take of it: 16GiB.")] = "0",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share each layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="Stages that share the layers.")] = 1,
    kv_dtype: Annotated[
        str | None, typer.Option(help="fp16, bf16, fp8 or int8 (with a 4-byte scale a vector). Default: the model's.")
    ] = None,
    state_dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16 for recurrent states. Default: the model's.")
    ] = None,
    state_mode: Annotated[str, typer.Option(help="States kept: align, all or none.")] = "align",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in the smallest block.")] = 16,
    max_model_len: Annotated[str | None, typer.Option(help="Longest sequence: 32k. Default: the model's.")] = None,
    max_step: Annotated[
        str, typer.Option("--max-num-batched-tokens", help="Most tokens in one step; windows need room for them.")
    ] = "2k",
    lengths: Annotated[str | None, typer.Option(help="Lengths to count requests at: 1k,8k,128k.")] = None,
    as_json_object: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw memory against length to FILE.png or .svg.")] = None,
) -> None:
    """How a model's KV cache is laid out, what it costs per token and request, and how much fits."""
    options = PlanOptions(
        memory_bytes=parse_bytes(memory),
        weights_bytes=parse_bytes(weights_memory),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        state_mode=state_mode,  # type: ignore[arg-type]  # PlanOptions checks it
        block_size=block_size,
        max_model_len=parse_tokens(max_model_len) if max_model_len is not None else None,
        max_step=parse_tokens(max_step),
    )
    planned = plan(config, options)
    at = _lengths(lengths, planned)
    if plot is not None:
        plot_plan(planned, plot)
    if as_json_object:
        typer.echo(json.dumps(as_json(planned, at)))
    else:
        Console().print(as_table(planned, at))


def _lengths(text: str | None, planned: Plan) -> list[int]:
    """What the user asked for; otherwise the usual lengths that the model takes, and its longest."""
    if text is not None:
        return [parse_tokens(length) for length in text.split(",")]
    return sorted({n for n in DEFAULT_LENGTHS if n < planned.max_model_len} | {planned.max_model_len})
