"""KVCacheBlocks: the immutable answer a scheduler sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, overload

from .errors import InvalidRequestError
from .pool import NULL_BLOCK, BlockList, BlockPool

__all__ = ["Block", "KVCacheBlocks"]


@dataclass(frozen=True)
class Block:
    """One physical block, looked at through its pool: what it says is true now, not when it was made."""

    _pool: BlockPool
    block_id: int

    @property
    def is_null(self) -> bool:
        """Whether this is the placeholder for a position nobody reads."""
        return self.block_id == NULL_BLOCK

    @property
    def ref_cnt(self) -> int:
        """References to the block."""
        return self._pool.ref_count(self.block_id)

    @property
    def block_hash(self) -> bytes | None:
        """The hash under which it can be hit, if it can."""
        return self._pool.block_hash(self.block_id)


class GroupBlocks(Sequence[Block]):
    """The blocks of one group by position; a view is made when one is looked at."""

    __slots__ = ("_block_class", "_list", "_pool")

    def __init__(self, pool: BlockPool, blocks: BlockList, block_class: type[Block] = Block) -> None:
        self._pool = pool
        self._list = blocks
        self._block_class = block_class

    def __len__(self) -> int:
        return len(self._list)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self._block_class(self._pool, block_id) for block_id in self._list.ids()[index]]
        return self._block_class(self._pool, self._list[index])

    def __iter__(self) -> Iterator[Block]:
        return (self._block_class(self._pool, block_id) for block_id in self._list.ids())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupBlocks) and self._pool is other._pool and self._list.ids() == other._list.ids()

    def __hash__(self) -> int:
        return hash(tuple(self._list.ids()))


class KVCacheBlocks:
    """Blocks per group: ``blocks[i][j]`` is block j of group i.

    ``junction`` (tokens, 0: none) goes with the answer of ``get_computed_blocks``: the longest
    aligned length up to which some other request shares this prefix although only the
    full-attention groups still hold it.
    """

    __slots__ = ("_generation", "_lists", "_pool", "junction")

    block_class: ClassVar[type[Block]] = Block
    """What a block is shown as."""

    def __init__(self, pool: BlockPool, lists: Sequence[BlockList], junction: int = 0, generation: int = -1) -> None:
        self._pool = pool
        self._lists = tuple(lists)
        self._generation = generation  # the pool's when a hit was found; -1: unknown
        self.junction = junction

    @property
    def blocks(self) -> tuple[Sequence[Block], ...]:
        """Views of the blocks, per group."""
        return tuple(GroupBlocks(self._pool, blocks, self.block_class) for blocks in self._lists)

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Both allocations, one after the other. O(blocks)."""
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        if other._pool is not self._pool:
            raise InvalidRequestError("blocks of two managers cannot be joined")
        lists = [BlockList(a.ids() + b.ids()) for a, b in zip(self._lists, other._lists, strict=True)]
        return type(self)(self._pool, lists, self.junction)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash(tuple(tuple(blocks.ids()) for blocks in self._lists))

    def __repr__(self) -> str:
        return f"KVCacheBlocks({', '.join(str(blocks.ids()) for blocks in self._lists)})"

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: Literal[True]) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """The ids per group; with ``allow_none``, None when there are none at all. O(blocks)."""
        if allow_none and not any(len(blocks) for blocks in self._lists):
            return None
        return tuple(blocks.ids() for blocks in self._lists)

    def get_unhashed_block_ids(self) -> list[int]:
        """The ids of the blocks that cannot be hit, in a cache with one group. O(blocks)."""
        if len(self._lists) != 1:
            raise InvalidRequestError(
                f"get_unhashed_block_ids is for caches with one group, this one has {len(self._lists)}; "
                f"use get_unhashed_block_ids_all_groups"
            )
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """The ids of the blocks that cannot be hit, per group, nulls left out. O(blocks)."""
        return [
            [i for i in blocks.ids() if i != NULL_BLOCK and self._pool.block_hash(i) is None] for blocks in self._lists
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, for as many groups. O(groups)."""
        return type(self)(self._pool, [BlockList() for _ in self._lists])
