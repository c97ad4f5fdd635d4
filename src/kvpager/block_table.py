"""Block tables as arrays: what attention kernels read, one row a running request.

::

    rows(group)        row 0 │ 17  4  9  0  0 …     int32, block ids; right of a row's blocks: the null block 0
                       row 1 │  3  0  0  0  0 …
                                    └── position 37 with blocks of 16 tokens is in column 2:
    slot_mapping(group, [0], [37])  =  9 * 16 + 5   where that token's K/V is written, int64
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .attention import ceil_div
from .blocks import KVCacheBlocks
from .errors import ConfigError, InvalidRequestError, UnknownBlockError
from .pool import BlockList

__all__ = ["BlockIds", "BlockTable"]

BlockIds = KVCacheBlocks | Sequence[Sequence[int] | BlockList]
"""What a manager answered, or one sequence of ids a group. Block lists are copied without an object for each id."""

_MAX_BLOCK_ID = np.iinfo(np.int32).max


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
        self.max_num_requests = _at_least(1, "max_num_requests", max_num_requests)
        self.block_sizes = tuple(_at_least(1, f"block_sizes[{i}]", size) for i, size in enumerate(block_sizes))
        extra = (0,) * len(block_sizes) if num_extra_blocks is None else tuple(num_extra_blocks)
        if len(extra) != len(block_sizes):
            raise ConfigError(f"num_extra_blocks has {len(extra)} entries for {len(block_sizes)} groups; give one each")
        num_tokens = _at_least(1, "max_num_tokens_per_request", max_num_tokens_per_request)
        widths = [
            ceil_div(num_tokens, size) + _at_least(0, f"num_extra_blocks[{i}]", extra[i])
            for i, size in enumerate(block_sizes)
        ]
        self._rows = tuple(np.zeros((max_num_requests, width), np.int32) for width in widths)
        self._counts = np.zeros((len(widths), max_num_requests), np.int64)

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
        rows, positions = np.broadcast_arrays(
            np.atleast_1d(np.asarray(row_indices, np.int64)), np.atleast_1d(np.asarray(positions, np.int64))
        )
        size = self.block_sizes[group]
        columns = positions // size
        bad = (rows < 0) | (rows >= self.max_num_requests)
        bad = bad | (columns < 0) | (columns >= self._counts[group, np.where(bad, 0, rows)])
        if bad.any():
            self._refuse_slot(group, int(rows[bad][0]), int(positions[bad][0]))
        if out is not None and (out.dtype != np.int64 or len(out) < len(rows)):
            raise InvalidRequestError(
                f"out must be an int64 array of at least {len(rows)} slots, got {out.dtype} of length {len(out)}"
            )
        target = np.empty(len(rows), np.int64) if out is None else out[: len(rows)]
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
        if not 0 <= row < self.max_num_requests:
            raise InvalidRequestError(f"row {row} is not there; rows are 0 to {self.max_num_requests - 1}")
        return row

    def _group(self, group: int) -> int:
        if not 0 <= group < len(self._rows):
            raise InvalidRequestError(f"group {group} is not there; groups are 0 to {len(self._rows) - 1}")
        return group

    def _checked(self, row: int, counts: npt.NDArray[np.int64], block_ids: BlockIds) -> list[_Ids]:
        """The ids, when they fit behind ``counts`` blocks of the row."""
        groups = block_ids._lists if isinstance(block_ids, KVCacheBlocks) else block_ids
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
    ids = np.asarray(block_ids, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() > _MAX_BLOCK_ID):
        raise UnknownBlockError(f"block ids must be in 0 to {_MAX_BLOCK_ID}, got {ids.min()} to {ids.max()}")
    return ids


def _write(row: npt.NDArray[np.int32], start: int, ids: _Ids) -> int:
    """Write the ids to columns ``start`` and on; gives the column behind them."""
    if isinstance(ids, BlockList):
        return ids.copy_into(row, start)
    row[start : start + len(ids)] = ids
    return start + len(ids)


def _at_least(lowest: int, name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ConfigError(f"BlockTable: {name} must be an integer of at least {lowest}, got {value!r}")
    return value
