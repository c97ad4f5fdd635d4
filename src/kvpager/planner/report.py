"""A plan for people (a table) and for programs (one JSON object)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..attention import Mamba
from .grouping import Group
from .memory import AttentionMemory, StateMemory
from .plan import Plan
from .units import format_bytes, format_tokens

__all__ = ["as_json", "as_table", "kinds"]

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
    return Lines(_layout(plan), _costs(plan), _fits(plan, lengths), *notes)


def _layout(plan: Plan) -> Table:
    options = plan.options
    title = f"{plan.model_type}: one rank of tensor parallel {options.tensor_parallel}, "
    table = Table(
        title=f"{title}pipeline parallel {options.pipeline_parallel}",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
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
    table = Table(title="one request costs (one rank)", title_justify="left", show_header=False)
    longest = plan.max_model_len
    decoding = plan.blocks_while_decoding(longest)
    extra = plan.blocks_while_prefilling(longest) - decoding
    fixed = [group for group in plan.grouping.groups if group not in plan.growing]
    states = sum(_decoding_bytes(plan, group) for group in fixed if isinstance(group.spec, Mamba))
    wasted = sum(
        plan.grouping.padding_bytes(group) * plan.blocks_of_group(group, longest, max_step=1)
        for group in plan.grouping.groups
    )
    rows = {
        "a token at short context": format_bytes(plan.bytes_per_first_token),
        "a token at long context": format_bytes(plan.bytes_per_token),
        "fixed": f"{format_bytes(plan.fixed_bytes_per_request)} (states {format_bytes(states)}, windows and "
        f"encoder {format_bytes(plan.fixed_bytes_per_request - states)})",
        f"more while it prefills {plan.options.max_step:,} tokens a step": format_bytes(extra * plan.block_bytes),
        f"in all at {format_tokens(longest)} tokens": format_bytes(decoding * plan.block_bytes),
        "of it padding": f"{format_bytes(wasted)} ({wasted / (decoding * plan.block_bytes):.1%})",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _decoding_bytes(plan: Plan, group: Group) -> int:
    return plan.block_bytes * plan.blocks_of_group(group, plan.max_model_len, max_step=1)


def _fits(plan: Plan, lengths: Sequence[int]) -> Table:
    table = Table(title="what fits", title_justify="left", show_header=False)
    options = plan.options
    free = options.memory_bytes - options.weights_bytes
    table.add_row("memory for the cache", format_bytes(free))
    table.add_row("blocks", f"{plan.num_blocks:,} of {format_bytes(plan.block_bytes)} (one is the null block)")
    limit = "the limit is the model's" if plan.longest_sequence == plan.max_model_len else "the limit is memory"
    table.add_row("longest sequence", f"{plan.longest_sequence:,} tokens ({limit})")
    for length in lengths:
        beyond = " (longer than the model takes)" if length > plan.max_model_len else ""
        table.add_row(f"requests of {format_tokens(length)} tokens at once", f"{plan.concurrency(length):,}{beyond}")
    return table


def _whole(number: float) -> float | int:
    """An integer where the number is one, so that JSON shows 131072 and not 131072.0."""
    return int(number) if number == int(number) else number
