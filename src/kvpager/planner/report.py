"""A plan for people (a table) and for programs (one JSON object)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .grouping import Group
from .memory import AttentionMemory, StateMemory
from .plan import Plan, TraceFit
from .units import format_bytes, format_tokens

__all__ = ["as_json", "as_table", "kinds", "side_by_side"]

FIXED = {
    "mamba": "states",
    "sliding_window": "windows",
    "chunked_local_attention": "chunks",
    "cross_attention": "encoder tokens",
}
SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def kinds(plan: Plan) -> list[tuple[Group, ...]]:
    """The groups, those that keep the same thing together, in order."""
    together: dict[AttentionMemory | StateMemory, tuple[Group, ...]] = {}
    for group in plan.grouping.groups:
        together[group.memory] = (*together.get(group.memory, ()), group)
    return list(together.values())


def as_json(plan: Plan, lengths: Sequence[int], trace: TraceFit | None = None) -> dict[str, Any]:
    """One object: bytes of one rank; ``concurrency`` maps a length in tokens to requests. Unknown is null."""
    return {
        "groups": [_group_json(plan, group) for group in plan.grouping.groups],
        "bytes_per_token": _whole(plan.bytes_per_token),
        "fixed_bytes_per_request": plan.fixed_bytes_per_request,
        "block_bytes": plan.block_bytes,
        "num_blocks": plan.num_blocks,
        "longest_sequence": plan.longest_sequence,
        "concurrency": {str(length): _all_replicas(plan, length) for length in lengths},
        "notes": list(plan.notes),
        "config": plan.source,
        "model_type": plan.model_type,
        "kv_dtype": plan.kv_dtype.name,
        "max_model_len": plan.max_model_len,
        "num_encoder_tokens": plan.num_encoder_tokens,
        "bytes_per_first_token": _whole(plan.bytes_per_first_token),
        "states_per_request": plan.states_per_request,
        "padding_bytes_per_request": plan.padding_bytes(plan.max_model_len),
        "hit_alignment": None if plan.no_hits_because else plan.cache_config.alignment,
        "num_ranks": plan.options.num_ranks,
        "replicas": plan.options.data_parallel,
        "cache_bytes": plan.cache_bytes,
        "weights_bytes": plan.weights.num_bytes,
        "weights_from": plan.weights.why,
        "trace": None if trace is None else asdict(trace),
    }


def _group_json(plan: Plan, group: Group) -> dict[str, Any]:
    described: dict[str, Any] = {
        "kind": group.spec.kind,
        "layers": [layer.name for layer in group.layers],
        "block_size": group.spec.block_size,
        "page_bytes": group.spec.page_bytes,
        "padding_layers": plan.grouping.padding_layers(group),
        "padding_bytes_per_block": plan.grouping.padding_bytes(group),
        "unused_bytes_per_page": group.spec.page_bytes - group.used_page_bytes,
        "drafts": any(layer.drafts for layer in group.layers),
    }
    memory = group.memory
    if isinstance(memory, AttentionMemory):
        described |= {
            "num_heads": memory.num_heads,
            "head_size": memory.head_size,
            "value_size": memory.head_size if memory.value_size is None else memory.value_size,
            "index_bytes": memory.index_bytes,
            "dtype": memory.dtype.name,
            "bytes_per_token_and_layer": memory.token_bytes,
            "extent": memory.extent,
        }
    else:
        described |= {
            "state": memory.label,
            "tensors": [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in memory.tensors],
            "bytes_per_state_and_layer": memory.state_bytes,
        }
    return described


def as_table(plan: Plan, lengths: Sequence[int], trace: TraceFit | None = None) -> RenderableType:
    """The layer kinds, what a request costs, and what fits."""
    notes = [Text(f"note: {note}", style="bold" if note.startswith("ASSUMED") else "dim") for note in plan.notes]
    return Lines(_layout(plan), _costs(plan), "", _fits(plan, lengths, trace), *notes)


def side_by_side(plans: Sequence[Plan], lengths: Sequence[int], traces: Sequence[TraceFit | None]) -> RenderableType:
    """A column for each plan; their notes below."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("")
    names = _names(plans)
    for name in names:
        table.add_column(name, justify="right")
    rows: dict[str, list[str]] = {}
    for plan, trace in zip(plans, traces, strict=True):
        for title, text in _summary(plan, lengths, trace):
            rows.setdefault(title, []).append(text)
    for title, texts in rows.items():
        table.add_row(title, *texts)
    notes = [f"note: {name}: {note}" for name, plan in zip(names, plans, strict=True) for note in plan.notes]
    return Lines(table, *notes)


def _names(plans: Sequence[Plan]) -> list[str]:
    """The files' names; those of their folders where a file is called config.json like all others."""
    paths = [Path(plan.source) for plan in plans]
    return [path.parent.name if path.name == "config.json" else path.stem for path in paths]


def _summary(plan: Plan, lengths: Sequence[int], trace: TraceFit | None) -> list[tuple[str, str]]:
    weights = plan.weights
    taken = "n/a" if weights.num_bytes is None else format_bytes(weights.num_bytes)
    return [
        ("model type", plan.model_type),
        ("K/V dtype", plan.kv_dtype.name),
        ("a token at short context", format_bytes(plan.bytes_per_first_token)),
        ("a token at long context", format_bytes(plan.bytes_per_token)),
        ("fixed", format_bytes(plan.fixed_bytes_per_request)),
        ("weights", f"~{taken}" if weights.is_estimate else taken),
        ("memory for the cache", format_bytes(plan.cache_bytes)),
        ("blocks", f"{plan.num_blocks:,} of {format_bytes(plan.block_bytes)}"),
        ("prefix hits", _hits(plan)),
        ("longest sequence", f"{plan.longest_sequence:,}"),
        *((f"requests of {format_tokens(length)} at once", _requests(plan, length)) for length in lengths),
        *([("requests of the trace at once", f"{trace.at_once:,}")] if trace else []),
    ]


def _layout(plan: Plan) -> Table:
    num_ranks = plan.options.num_ranks
    title = f"{plan.model_type}: one rank" + (f" of {num_ranks}, the fullest" if num_ranks > 1 else "")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    for column in ("layers", "heads", "size", "dtype", "keeps", "block", "groups", "empty", "unused"):
        table.add_column(column, justify="left" if column == "layers" else "right", no_wrap=True)
    for groups in kinds(plan):
        first, count = groups[0], sum(len(group.layers) for group in groups)
        empty = sum(plan.grouping.padding_layers(group) for group in groups)
        unused = 1 - first.used_page_bytes / first.spec.page_bytes
        table.add_row(
            f"{count} {first.memory.label}",
            *_kept(first),
            f"{len(groups)}x{plan.grouping.pages_per_block}",
            str(empty or "-"),
            f"{unused:.1%}" if unused else "-",
        )
    return table


def _kept(group: Group) -> tuple[str, str, str, str, str]:
    """Heads, size of each, dtype, bytes, and what a block holds."""
    memory = group.memory
    if isinstance(memory, AttentionMemory):
        kept = f"{format_bytes(memory.token_bytes)}/tok"
        return str(memory.num_heads), str(memory.head_size), memory.dtype.name, kept, f"{group.spec.block_size} tok"
    shapes = "\n".join("x".join(map(str, tensor.shape)) for tensor in memory.tensors)
    dtypes = "\n".join(SHORT_DTYPES[tensor.dtype] for tensor in memory.tensors)
    return "-", shapes, dtypes, format_bytes(memory.state_bytes), "1 state"


def _costs(plan: Plan) -> Table:
    longest = plan.max_model_len
    decoding = plan.blocks_while_decoding(longest)
    prefilling = plan.blocks_while_prefilling(longest) - decoding
    wasted = plan.padding_bytes(longest)
    return _pairs(
        "one request costs",
        ("a token at short context", format_bytes(plan.bytes_per_first_token)),
        ("a token at long context", format_bytes(plan.bytes_per_token)),
        ("fixed", _fixed(plan)),
        (
            "more while it prefills",
            f"{format_bytes(prefilling * plan.block_bytes)}, {plan.options.max_step:,} tokens a step",
        ),
        (f"in all at {format_tokens(longest)} tokens", format_bytes(decoding * plan.block_bytes)),
        ("of it padding", f"{format_bytes(wasted)}, {wasted / (decoding * plan.block_bytes):.1%}"),
    )


def _fixed(plan: Plan) -> str:
    """What a request holds at long context whatever its length, and for what."""
    held: dict[str, int] = {}
    for group in plan.grouping.groups:
        if group not in plan.growing:
            blocks = plan.fixed_blocks(group)
            what = FIXED[group.spec.kind]
            held[what] = held.get(what, 0) + blocks * plan.block_bytes
    parts = [f"{what} {format_bytes(size)}" for what, size in held.items()]
    if len(parts) > 1:
        return f"{format_bytes(plan.fixed_bytes_per_request)}: {', '.join(parts)}"
    return parts[0] if parts else "nothing"


def _fits(plan: Plan, lengths: Sequence[int], trace: TraceFit | None) -> Table:
    limit = "the limit is the model's" if plan.longest_sequence == plan.max_model_len else "the limit is memory"
    return _pairs(
        "what fits",
        *_weights(plan),
        ("memory for the cache", format_bytes(plan.cache_bytes)),
        ("blocks", f"{plan.num_blocks:,} of {format_bytes(plan.block_bytes)}, one is the null block"),
        ("prefix hits", _hits(plan)),
        ("longest sequence", f"{plan.longest_sequence:,} tokens, {limit}"),
        *((f"requests of {format_tokens(length)} at once", _requests(plan, length)) for length in lengths),
        *_of_trace(trace),
    )


def _weights(plan: Plan) -> list[tuple[str, str]]:
    """What is taken off for weights, unless the user said it."""
    weights = plan.weights
    if weights.num_bytes is None:
        return [("weights", weights.why)]
    return [("weights", f"{format_bytes(weights.num_bytes)}, {weights.why}")] if weights.is_estimate else []


def _hits(plan: Plan) -> str:
    if plan.no_hits_because is not None:
        return f"never: {plan.no_hits_because}"
    drafts = any(group.is_eagle for group in plan.cache_config.groups)
    shorter = ", a block early for the drafter" if drafts else ""
    return f"end on multiples of {plan.cache_config.alignment:,} tokens{shorter}"


def _of_trace(trace: TraceFit | None) -> list[tuple[str, str]]:
    if trace is None:
        return []
    lengths = f"{trace.requests:,} requests, mean {trace.mean_tokens:,.0f} tokens, longest {trace.longest_tokens:,}"
    refused = f"; {trace.refused:,} never fit" if trace.refused else ""
    return [("the trace", lengths + refused), ("requests of the trace at once", f"{trace.at_once:,} on average")]


def _all_replicas(plan: Plan, length: int) -> int:
    return plan.concurrency(length) * plan.options.data_parallel


def _requests(plan: Plan, length: int) -> str:
    if length > plan.max_model_len:
        return "longer than the model takes"
    replicas = plan.options.data_parallel
    each = f" ({replicas} replicas x {plan.concurrency(length):,})" if replicas > 1 else ""
    return f"{_all_replicas(plan, length):,}{each}"


def _pairs(title: str, *rows: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1))
    for row in rows:
        table.add_row(*row)
    return table


def _whole(number: float) -> float | int:
    """An integer where the number is one, so that JSON shows 131072 and not 131072.0."""
    return int(number) if number == int(number) else number
