"""Block tables as arrays: what attention kernels read, one row a running request.

::

    rows(group)        row 0 │ 17  4  9  0  0 …     int32, block ids; right of a row's blocks: the null block 0
                       row 1 │  3  0  0  0  0 …
                                    └── position 37 with blocks of 16 tokens is in column 2:
    slot_mapping(group, [0], [37])  =  9 * 16 + 5   where that token's K/V is written, int64
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .attention import ceil_div
from .blocks import KVCacheBlocks
from .counts import MAX_COUNT, as_count, as_integer
from .errors import ConfigError, InvalidRequestError, UnknownBlockError
from .pool import BlockList

__all__ = ["BlockIds", "BlockTable"]

BlockIds = KVCacheBlocks | Sequence[Sequence[int] | BlockList]
"""What a manager answered, or one sequence of ids a group. Block lists are copied without an object for each id."""

_MAX_BLOCK_ID = np.iinfo(np.int32).max
_MAX_INT64 = np.iinfo(np.int64).max
_MAX_BLOCK_SIZE = 2**31  # a slot is an int64: block id times this


class BlockTable:
    """Rows of block ids for every group of a cache.

    ``max_num_requests`` rows, each with room for ``max_num_tokens_per_request`` tokens in blocks of
    ``block_sizes[group]`` tokens, and ``num_extra_blocks[group]`` more (default none: speculative
    states, encoder tokens or static sinks need them). The arrays are allocated once and never move,
    so kernels may keep them. Raises ``ConfigError`` for sizes that cannot be.
    """

    def __init__(
        self,
        max_num_requests: int,
        max_num_tokens_per_request: int,
        block_sizes: Sequence[int],
        *,
        num_extra_blocks: Sequence[int] | None = None,
    ) -> None:
        self.max_num_requests = as_count(max_num_requests, "BlockTable: max_num_requests", 1)
        num_tokens = as_count(max_num_tokens_per_request, "BlockTable: max_num_tokens_per_request", 1)
        self.block_sizes = _counts("block_sizes", block_sizes, 1, _MAX_BLOCK_SIZE)
        extra = (0,) * len(self.block_sizes)
        if num_extra_blocks is not None:
            extra = _counts("num_extra_blocks", num_extra_blocks, 0)
        if len(extra) != len(self.block_sizes):
            raise ConfigError(
                f"num_extra_blocks has {len(extra)} entries for {len(self.block_sizes)} groups; give one each"
            )
        widths = [ceil_div(num_tokens, size) + more for size, more in zip(self.block_sizes, extra, strict=True)]
        self._rows = tuple(_zeros((self.max_num_requests, width), np.int32) for width in widths)
        self._counts = _zeros((len(widths), self.max_num_requests), np.int64)

    def rows(self, group: int) -> npt.NDArray[np.int32]:
        """The group's rows, [max_num_requests, blocks a row holds]: a view, for kernels to read. O(1)."""
        return self._rows[self._group(group)]

    def num_blocks(self, row: int, group: int) -> int:
        """How many blocks the row has in that group. O(1)."""
        return int(self._counts[self._group(group), self._row(row)])

    def append_row(self, row: int, block_ids: BlockIds) -> None:
        """Add blocks to the end of a row: what ``allocate_slots`` answered, or one sequence of ids a group.

        Raises ``InvalidRequestError`` (no such row, too many blocks) or ``UnknownBlockError`` (an id
        that cannot be one); nothing is written then. O(blocks added).
        """
        row = self._row(row)
        new = self._checked(row, self._counts[:, row], block_ids)
        for rows, counts, ids in zip(self._rows, self._counts, new, strict=True):
            counts[row] = _write(rows[row], int(counts[row]), ids)

    def add_row(self, row: int, block_ids: BlockIds) -> None:
        """Replace a row by these blocks: what ``get_blocks`` answered, or one sequence of ids a group.

        As ``append_row`` otherwise.
        """
        row = self._row(row)
        new = self._checked(row, np.zeros(len(self._rows), np.int64), block_ids)
        for rows, counts, ids in zip(self._rows, self._counts, new, strict=True):
            end = _write(rows[row], 0, ids)
            rows[row, end : counts[row]] = 0
            counts[row] = end

    def move_row(self, source: int, target: int) -> None:
        """Overwrite row ``target`` with row ``source``, which is empty afterwards. O(blocks)."""
        source, target = self._row(source), self._row(target)
        if source == target:
            return
        for rows, counts in zip(self._rows, self._counts, strict=True):
            used = max(counts[source], counts[target])
            rows[target, :used] = rows[source, :used]
            counts[target] = counts[source]
        self.clear_row(source)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange two rows. O(blocks)."""
        pair, swapped = [self._row(first), self._row(second)], [second, first]
        for rows, counts in zip(self._rows, self._counts, strict=True):
            used = counts[pair].max()
            rows[pair, :used] = rows[swapped, :used]
            counts[pair] = counts[swapped]

    def clear_row(self, row: int) -> None:
        """Empty a row: nothing but null blocks. O(blocks)."""
        row = self._row(row)
        for rows, counts in zip(self._rows, self._counts, strict=True):
            rows[row, : counts[row]] = 0
            counts[row] = 0

    def slot_mapping(
        self,
        group: int,
        row_indices: npt.ArrayLike,
        positions: npt.ArrayLike,
        out: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Where in the group's memory the tokens at ``positions`` of ``row_indices`` are, in token slots.

        Positions are those of the row: with static sinks in front, a token's position plus ``sink_len``.
        Both are one-dimensional and of equal length, or either is a single number. Writes to the head of
        ``out`` and returns that part, or returns a new array. Raises ``InvalidRequestError`` for a row
        that is not there or a position beyond its row's blocks. O(tokens), vectorised.
        """
        group = self._group(group)
        rows, positions = _paired(row_indices, positions)
        size = self.block_sizes[group]
        columns = positions // size
        bad = (rows < 0) | (rows >= self.max_num_requests)
        bad = bad | (columns < 0) | (columns >= self._counts[group, np.where(bad, 0, rows)])
        if bad.any():
            self._refuse_slot(group, int(rows[bad][0]), int(positions[bad][0]))
        target = np.empty(len(rows), np.int64) if out is None else _head(out, len(rows))
        np.multiply(self._rows[group][rows, columns], size, out=target, dtype=np.int64)
        target += positions % size
        return target

    def _refuse_slot(self, group: int, row: int, position: int) -> None:
        row = self._row(row)
        num_blocks = self.num_blocks(row, group)
        raise InvalidRequestError(
            f"position {position} of row {row} is outside its {num_blocks} blocks of {self.block_sizes[group]} tokens "
            f"in group {group}; append the blocks first"
        )

    def _row(self, row: int) -> int:
        index = as_integer(row, "row", error=InvalidRequestError)
        if 0 <= index < self.max_num_requests:
            return index
        raise InvalidRequestError(f"row {row} is not there; rows are 0 to {self.max_num_requests - 1}")

    def _group(self, group: int) -> int:
        index = as_integer(group, "group", error=InvalidRequestError)
        if 0 <= index < len(self._rows):
            return index
        raise InvalidRequestError(f"group {group} is not there; groups are 0 to {len(self._rows) - 1}")

    def _checked(self, row: int, counts: npt.NDArray[np.int64], block_ids: BlockIds) -> list[_Ids]:
        """The ids, when they fit behind ``counts`` blocks of the row."""
        groups = block_ids._lists if isinstance(block_ids, KVCacheBlocks) else block_ids
        if not isinstance(groups, Sequence | np.ndarray):
            raise InvalidRequestError(
                f"block_ids must be what a manager answered or one sequence of ids a group, got {block_ids!r}"
            )
        if len(groups) != len(self._rows):
            raise InvalidRequestError(f"got block ids for {len(groups)} groups; this table has {len(self._rows)}")
        checked = [ids if isinstance(ids, BlockList) else _as_array(ids) for ids in groups]
        for group, (ids, count, rows) in enumerate(zip(checked, counts, self._rows, strict=True)):
            if count + len(ids) > rows.shape[1]:
                raise InvalidRequestError(
                    f"row {row} of group {group} holds at most {rows.shape[1]} blocks; it has {count}, "
                    f"{len(ids)} more were given; make the table for longer requests"
                )
        return checked


_Ids = BlockList | npt.NDArray[np.int64]


def _as_array(block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    ids = _integers("block ids", block_ids)
    if len(ids) and (ids.min() < 0 or ids.max() > _MAX_BLOCK_ID):
        raise UnknownBlockError(f"block ids must be in 0 to {_MAX_BLOCK_ID}, got {ids.min()} to {ids.max()}")
    return ids


def _write(row: npt.NDArray[np.int32], start: int, ids: _Ids) -> int:
    """Write the ids to columns ``start`` and on; gives the column behind them."""
    if isinstance(ids, BlockList):
        return ids.copy_into(row, start)
    row[start : start + len(ids)] = ids
    return start + len(ids)


def _counts(name: str, values: Sequence[int], at_least: int, at_most: int = MAX_COUNT) -> tuple[int, ...]:
    if not isinstance(values, Sequence | np.ndarray):
        raise ConfigError(f"BlockTable: {name} must be a sequence of integers, got {values!r}")
    return tuple(
        as_count(value, f"BlockTable: {name}[{i}]", at_least, at_most=at_most) for i, value in enumerate(values)
    )


_Dtype = TypeVar("_Dtype", np.int32, np.int64)


def _zeros(shape: tuple[int, int], dtype: type[_Dtype]) -> npt.NDArray[_Dtype]:
    try:
        return np.zeros(shape, dtype)
    except (MemoryError, ValueError) as error:  # ValueError: beyond what an array can be
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        raise ConfigError(f"BlockTable: {shape[0]} x {shape[1]} entries are {num_bytes} bytes; take less") from error


def _integers(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The values as one int64 for each, one behind the other."""
    try:
        array = np.atleast_1d(np.asarray(values))
    except ValueError:  # sequences of unequal length
        array = np.empty(0, object)
    if array.ndim == 1 and not array.size and array.dtype == np.float64:  # what NumPy makes of an empty list
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array > _MAX_INT64).any():
        raise InvalidRequestError(f"{name} must be integers in one dimension, got {values!r}")
    return array.astype(np.int64, copy=False)


def _paired(row_indices: npt.ArrayLike, positions: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], ...]:
    rows, at = _integers("row_indices", row_indices), _integers("positions", positions)
    if len(rows) != len(at) and 1 not in (len(rows), len(at)):
        raise InvalidRequestError(f"{len(rows)} row_indices and {len(at)} positions do not pair up; give one each")
    return tuple(np.broadcast_arrays(rows, at))


def _head(out: npt.NDArray[np.int64], num_slots: int) -> npt.NDArray[np.int64]:
    is_array = isinstance(out, np.ndarray) and out.dtype == np.int64 and out.ndim == 1 and out.flags.writeable
    if not is_array or len(out) < num_slots:
        got = f"{out.dtype} {out.shape}" if isinstance(out, np.ndarray) else repr(out)
        raise InvalidRequestError(
            f"out must be a writable int64 array [at least {num_slots}], one dimension, got {got}"
        )
    return out[:num_slots]
