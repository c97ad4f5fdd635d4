"""A plan for people (a table) and for programs (one JSON object)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .grouping import Group
from .memory import AttentionMemory, StateMemory
from .plan import Plan
from .units import format_bytes, format_tokens

__all__ = ["as_json", "as_table", "kinds"]

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


def as_json(plan: Plan, lengths: Sequence[int]) -> dict[str, Any]:
    """One object: bytes of one rank; ``concurrency`` maps a length in tokens to requests."""
    return {
        "groups": [_group_json(plan, group) for group in plan.grouping.groups],
        "bytes_per_token": _whole(plan.bytes_per_token),
        "fixed_bytes_per_request": plan.fixed_bytes_per_request,
        "block_bytes": plan.block_bytes,
        "num_blocks": plan.num_blocks,
        "longest_sequence": plan.longest_sequence,
        "concurrency": {str(length): plan.concurrency(length) for length in lengths},
    }


def _group_json(plan: Plan, group: Group) -> dict[str, Any]:
    described: dict[str, Any] = {
        "kind": group.spec.kind,
        "layers": [layer.name for layer in group.layers],
        "block_size": group.spec.block_size,
        "page_bytes": group.spec.page_bytes,
        "padding_layers": plan.grouping.padding_layers(group),
        "padding_bytes_per_block": plan.grouping.padding_bytes(group),
    }
    memory = group.memory
    if isinstance(memory, AttentionMemory):
        described |= {
            "num_heads": memory.num_heads,
            "head_size": memory.head_size,
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


def as_table(plan: Plan, lengths: Sequence[int]) -> RenderableType:
    """The layer kinds, what a request costs, and what fits."""
    notes = [Text(f"note: {note}", style="dim") for note in plan.notes]
    return Lines(_layout(plan), _costs(plan), "", _fits(plan, lengths), *notes)


def _layout(plan: Plan) -> Table:
    num_ranks = plan.options.tensor_parallel * plan.options.pipeline_parallel
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
    wasted = sum(
        plan.grouping.padding_bytes(group) * plan.blocks_of_group(group, longest, max_step=1)
        for group in plan.grouping.groups
    )
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
            blocks = plan.blocks_of_group(group, plan.max_model_len, max_step=1)
            what = FIXED[group.spec.kind]
            held[what] = held.get(what, 0) + blocks * plan.block_bytes
    parts = [f"{what} {format_bytes(size)}" for what, size in held.items()]
    if len(parts) > 1:
        return f"{format_bytes(plan.fixed_bytes_per_request)}: {', '.join(parts)}"
    return parts[0] if parts else "nothing"


def _fits(plan: Plan, lengths: Sequence[int]) -> Table:
    free = plan.options.memory_bytes - plan.options.weights_bytes
    can_hit = all(spec.can_hit for spec in plan.cache_config.specs)
    limit = "the limit is the model's" if plan.longest_sequence == plan.max_model_len else "the limit is memory"
    return _pairs(
        "what fits",
        ("memory for the cache", format_bytes(free)),
        ("blocks", f"{plan.num_blocks:,} of {format_bytes(plan.block_bytes)}, one is the null block"),
        ("prefix hits", f"end on multiples of {plan.cache_config.alignment:,} tokens" if can_hit else "none"),
        ("longest sequence", f"{plan.longest_sequence:,} tokens, {limit}"),
        *((f"requests of {format_tokens(length)} at once", _requests(plan, length)) for length in lengths),
    )


def _requests(plan: Plan, length: int) -> str:
    return "longer than the model takes" if length > plan.max_model_len else f"{plan.concurrency(length):,}"


def _pairs(title: str, *rows: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1))
    for row in rows:
        table.add_row(*row)
    return table


def _whole(number: float) -> float | int:
    """An integer where the number is one, so that JSON shows 131072 and not 131072.0."""
    return int(number) if number == int(number) else number
