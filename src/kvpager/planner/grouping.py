"""Layers to groups: one pool of equal pages serves layers of every kind.

A *page* is what one block takes of one layer; a block of the pool is a page for each layer of a
group. So all groups need the same number of layers and all layers the same page::

    kinds     full ████████   window ████████████████████   (layers that keep the same thing)
    groups    [████████]      [████████][████████][████░░░░]     ░ padding: pages nobody writes

Pages become equal by giving layers that keep less per token larger blocks; what then still is
missing (and all that a state is short of a page) is padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..attention import AttentionSpec, ceil_div
from ..attention.mamba import MambaMode
from ..config import GroupSpec
from ..errors import ConfigError
from .memory import AttentionMemory, Layer, StateMemory

Memory = AttentionMemory | StateMemory
Kinds = dict[Memory, tuple[Layer, ...]]

__all__ = ["Group", "Grouping", "group_layers", "pipeline_ranks"]

SHORT_LENGTH = 1024
MAY_COST_MORE = {"long": 1.05, "short": 1.15}
"""How much more than the cheapest grouping a request may cost, for the sake of fewer groups: at the model's
longest and at a short length. Each group costs time in every step, padding costs memory."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers (of all pipeline ranks) that share a block table.

    ``used_page_bytes`` of each page (``spec.page_bytes``) hold something when a block is full.
    """

    layers: tuple[Layer, ...]
    spec: AttentionSpec
    used_page_bytes: int

    @property
    def memory(self) -> Memory:
        """What each of the layers keeps."""
        return self.layers[0].memory

    def group_spec(self) -> GroupSpec:
        """The group as the manager's configuration has it."""
        names = tuple(layer.name for layer in self.layers)
        return GroupSpec(layer_names=names, spec=self.spec, is_eagle=any(layer.drafts for layer in self.layers))


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """Groups over one pool.

    ``rank`` is the run of layers of the fullest pipeline rank, which decides for all of them:
    ``pages_per_block`` is what a block of the pool has there.
    """

    groups: tuple[Group, ...]
    page_bytes: int
    pages_per_block: int
    rank: range

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the pool on the fullest rank."""
        return self.page_bytes * self.pages_per_block

    def padding_layers(self, group: Group) -> int:
        """Pages in each of the group's blocks that belong to no layer."""
        return self.pages_per_block - self._layers_here(group)

    def padding_bytes(self, group: Group) -> int:
        """Bytes in each of the group's blocks that nobody writes."""
        return self.block_bytes - self._layers_here(group) * group.used_page_bytes

    def _layers_here(self, group: Group) -> int:
        return sum(layer.index in self.rank for layer in group.layers)


def pipeline_ranks(num_layers: int, pipeline_parallel: int) -> list[range]:
    """Which layers each pipeline rank runs: even runs; what is left over goes to the ranks before the last.

    The last rank has the output layer to run as well. Raises ``ConfigError`` for more ranks than layers.
    """
    if pipeline_parallel > num_layers:
        raise ConfigError(f"pipeline parallel size {pipeline_parallel} is more than the model's {num_layers} layers")
    least, left_over = divmod(num_layers, pipeline_parallel)
    last = pipeline_parallel - 1
    counts = [least + (last - left_over <= rank < last) for rank in range(pipeline_parallel)]
    starts = [sum(counts[:rank]) for rank in range(pipeline_parallel)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def group_layers(
    layers: Sequence[Layer],
    *,
    ranks: Sequence[range],
    block_size: int,
    state_mode: MambaMode,
    max_model_len: int,
    max_step: int,
    num_encoder_tokens: int,
    num_drafted: int = 0,
) -> Grouping:
    """Few groups in which a request costs little, at short and at long context.

    Every number of layers a group could have is tried. Among those that cost hardly more than the
    cheapest (``MAY_COST_MORE``), the one with the fewest groups is taken. O(layers^2).
    """
    kinds = _kinds(layers)
    specs, page_bytes = _equal_pages(kinds, block_size, state_mode, num_drafted)
    blocks = [
        {memory: spec.most_held(length, max_step, length, num_encoder_tokens) for memory, spec in specs.items()}
        for length in (min(SHORT_LENGTH, max_model_len), max_model_len)
    ]
    choices = [_choice(kinds, size, ranks, blocks) for size in range(1, max(map(len, kinds.values())) + 1)]
    choice = _cheap_with_few_groups(choices)
    groups = tuple(
        Group(layers=part, spec=specs[part[0].memory], used_page_bytes=_used(part[0].memory, specs[part[0].memory]))
        for part in choice.parts
    )
    return Grouping(groups=groups, page_bytes=page_bytes, pages_per_block=choice.pages_per_block, rank=choice.rank)


class _Choice(NamedTuple):
    """A way to group; costs in pages of a request."""

    parts: list[tuple[Layer, ...]]
    pages_per_block: int
    rank: range
    short_cost: int
    long_cost: int


def _choice(kinds: Kinds, size: int, ranks: Sequence[range], blocks: Sequence[Mapping[Memory, int]]) -> _Choice:
    parts = [part for same in kinds.values() for part in _split(same, size)]
    pages, rank = _fullest(parts, ranks)
    short, long = (pages * sum(held[part[0].memory] for part in parts) for held in blocks)
    return _Choice(parts, pages, rank, short, long)


def _cheap_with_few_groups(choices: Sequence[_Choice]) -> _Choice:
    cheapest_short = min(choice.short_cost for choice in choices)
    cheapest_long = min(choice.long_cost for choice in choices)

    def excess(choice: _Choice) -> float:
        """Above 1: costs more than it may."""
        short, long = choice.short_cost / cheapest_short, choice.long_cost / cheapest_long
        return max(short / MAY_COST_MORE["short"], long / MAY_COST_MORE["long"])

    allowed = max(1, min(map(excess, choices)))
    return min((c for c in choices if excess(c) <= allowed), key=lambda c: (len(c.parts), excess(c)))


def _kinds(layers: Iterable[Layer]) -> Kinds:
    """Layers that keep the same thing, in the order of their first layer."""
    kinds: Kinds = {}
    for layer in layers:
        kinds[layer.memory] = (*kinds.get(layer.memory, ()), layer)
    return kinds


def _split(layers: tuple[Layer, ...], size: int) -> list[tuple[Layer, ...]]:
    """Groups of at most ``size`` layers, dealt out in turn so that each pipeline rank has a share of each."""
    count = ceil_div(len(layers), size)
    return [layers[start::count] for start in range(count)]


def _fullest(parts: Sequence[tuple[Layer, ...]], ranks: Sequence[range]) -> tuple[int, range]:
    """The rank on which a block takes the most pages, and how many: one for each layer of the largest group."""

    def pages(rank: range) -> int:
        return max(sum(layer.index in rank for layer in part) for part in parts)

    rank = max(ranks, key=pages)
    return pages(rank), rank


def _equal_pages(
    kinds: Iterable[Memory], block_size: int, state_mode: MambaMode, num_drafted: int
) -> tuple[dict[Memory, AttentionSpec], int]:
    """A spec for each kind, all with the same page.

    The page is that of the attention kind with the most bytes per token, in as many base blocks as
    the largest state needs. Kinds with fewer bytes take as many base blocks as go into it.
    """
    attention = [memory for memory in kinds if isinstance(memory, AttentionMemory)]
    state_bytes = max((memory.state_bytes for memory in kinds if isinstance(memory, StateMemory)), default=0)
    base = max((memory.token_bytes * block_size for memory in attention), default=0)
    page = base * max(1, ceil_div(state_bytes, base)) if base else state_bytes
    sizes = {memory: _block_size(memory, page, block_size) for memory in attention}
    states_every = math.lcm(block_size, *sizes.values())
    specs: dict[Memory, AttentionSpec] = {}
    for memory in kinds:
        if isinstance(memory, AttentionMemory):
            specs[memory] = memory.spec(sizes[memory], page)
        else:
            specs[memory] = memory.spec(states_every, page, state_mode, num_drafted)
    return specs, page


def _block_size(memory: AttentionMemory, page: int, block_size: int) -> int:
    """The most base blocks that go into a page; in a chunked layer they also divide the chunk."""
    multiple = page // (memory.token_bytes * block_size)
    if memory.kind == "chunked" and memory.extent is not None and memory.extent % block_size == 0:
        multiple = next(m for m in range(multiple, 0, -1) if memory.extent % (m * block_size) == 0)
    return multiple * block_size


def _used(memory: Memory, spec: AttentionSpec) -> int:
    return memory.token_bytes * spec.block_size if isinstance(memory, AttentionMemory) else memory.state_bytes
