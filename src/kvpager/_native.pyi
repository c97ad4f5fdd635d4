"""The compiled part: what is touched per token or per block. Not public; use the modules above it."""

from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from .events import KVCacheEvent
from .pool import EvictionOrder
from .stats import ResidencySampler

def hash_chain(
    token_ids: Any, block_size: int, parent: bytes, suffixes: Sequence[bytes] | None, cbor: bool
) -> list[bytes]:
    """The hash of every full block; suffixes (one a block, or None) go behind its tokens in the message."""

def token_list(token_ids: Any) -> list[int]:
    """A new list of checked token ids."""

@final
class BlockList:
    """Block ids by position: a request's table in one group, or the blocks of a hit. Four bytes each.

    ``num_committed`` and ``num_released`` are the positions up to which the owner has offered
    blocks to the index and given dead ones back.
    """

    num_committed: int
    num_released: int

    def __init__(self, ids: Iterable[int] = ()) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, position: int, /) -> int: ...
    def ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """The ids of positions [start, stop). O(stop - start)."""

    def slice(self, start: int, stop: int) -> BlockList:
        """A copy of positions [start, stop) that holds no references. O(stop - start)."""

    def copy_into(self, row: npt.NDArray[np.int32], offset: int = 0) -> int:
        """Write the ids to columns ``offset`` and on of a row; returns the column behind them. O(blocks).

        Raises ``InvalidRequestError`` if they do not fit.
        """

@final
class BlockPool:
    """``num_blocks`` physical blocks, shared by ``num_groups`` groups.

    Hashes are 32 bytes; a group whose blocks span ``stride`` hash blocks finds the hash of its
    position i at index (i + 1) * stride - 1. Making a pool is O(1): memory is touched when blocks are.

    Whatever is refused is refused before anything has changed. The residency sampler is told at the
    end of a call and may call the pool; what it raises is printed, not passed on.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        *,
        eviction_order: EvictionOrder = "dead_first",
        enable_events: bool = False,
        residency: ResidencySampler | None = None,
    ) -> None: ...

    # -- counts and single blocks ------------------------------------------------------------

    @property
    def num_blocks(self) -> int: ...
    @property
    def eviction_order(self) -> EvictionOrder: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""

    @property
    def num_popped(self) -> int:
        """Blocks that outsiders alone refer to."""

    @property
    def num_reserved(self) -> int: ...
    @property
    def num_evictions(self) -> int:
        """Cached blocks that an allocation overwrote, ever."""

    @property
    def generation(self) -> int:
        """Grows whenever a hash leaves the index: a hit looked up before may be stale."""

    @property
    def usage(self) -> float:
        """The part of the allocatable blocks that is not free, 0 to 1."""

    def ref_count(self, block_id: int) -> int:
        """References to a block, those of outsiders included. O(1)."""

    def outside_count(self, block_id: int) -> int:
        """References to a block that outsiders hold (popped, allocated or touched by hand). O(1)."""

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash under which a block is in the index, if it is. O(1)."""

    def free_queue(self) -> list[int]:
        """Free blocks, next to be allocated first. O(free)."""

    def index(self) -> dict[tuple[bytes, int], list[int]]:
        """(hash, group) to its blocks, oldest copy first. O(pool)."""

    def reserved_blocks(self) -> frozenset[int]:
        """The blocks that ``reserve`` took. O(reserved)."""

    # -- look-ups: read only -------------------------------------------------------------------

    def prefix(self, groups: Sequence[int], hashes: Sequence[bytes], stride: int, stop: int) -> list[BlockList]:
        """Per group, the oldest copies of the leading positions (of ``stop``) that all groups have. O(answer)."""

    def run_start(self, groups: Sequence[int], hashes: Sequence[bytes], stride: int, start: int, stop: int) -> int:
        """The smallest p ≥ start such that positions [p, stop) are all cached in all groups. O(stop - p)."""

    def lookup(self, group: int, hashes: Sequence[bytes], stride: int, start: int, stop: int) -> BlockList:
        """Nulls for [0, start), then the oldest cached copy for each of [start, stop). O(stop)."""

    def serves(self, blocks: BlockList, group: int, hashes: Sequence[bytes], stride: int) -> bool:
        """Whether every non-null block still is in the index under its position's hash. O(blocks)."""

    def count_evictable(self, blocks: BlockList, start: int, stop: int) -> int:
        """Blocks of [start, stop) that are free now: adopting them takes from the supply. O(stop - start)."""

    def count_exclusive(self, blocks: BlockList, start: int, stop: int) -> int:
        """Blocks of [start, stop) that nobody else refers to: releasing them adds to the supply."""

    def num_shared_by(self, blocks: BlockList, num_holders: int) -> int:
        """Leading blocks that ``num_holders`` requests refer to (outsiders do not count). O(answer)."""

    # -- tables: references of requests -------------------------------------------------------

    def adopt(self, table: BlockList, hits: BlockList, start: int, stop: int) -> None:
        """Append the hits of positions [start, stop) and take a reference to each (nulls: none). O(stop - start)."""

    def extend(self, table: BlockList, num_blocks: int, note: bool = False) -> None:
        """Append ``num_blocks`` blocks from the front of the queue. O(num_blocks).

        With ``note`` they are told by the next ``take_new_block_ids``. Raises ``OutOfBlocksError``.
        """

    def extend_null(self, table: BlockList, num_positions: int) -> None:
        """Append positions that nobody will read. O(num_positions)."""

    def move(self, table: BlockList, source: int) -> None:
        """Append the block of position ``source`` and leave null there. O(1)."""

    def release(self, table: BlockList, start: int, stop: int, keep: range = ...) -> None:
        """Give back dead blocks of [start, stop), tail first, leaving nulls. O(stop - start).

        Positions in ``keep`` are useful all the same (a hit elsewhere will need them).
        """

    def free_tables(
        self, tables: Sequence[BlockList], block_sizes: Sequence[int], dead: Sequence[range], keep: Sequence[range]
    ) -> None:
        """Give back all blocks of one request's tables, which end up empty. O(blocks).

        Tail first; across groups by end position, so that what one prefix position needs dies together
        (with ``"recency"``: group after group). ``dead`` are each table's dead positions, ``keep`` those
        that are useful all the same.
        """

    def pop_tables(self, tables: Sequence[BlockList], block_sizes: Sequence[int]) -> list[int]:
        """Hand a request's blocks (no nulls) to the caller, who returns them with ``free_blocks``. O(blocks).

        The reverse of the order in which `free_tables` gives back.
        """

    def commit(
        self, table: BlockList, group: int, hashes: Sequence[bytes], stride: int, start: int, stop: int
    ) -> list[range]:
        """Enter the blocks of [start, stop) into the index; nulls and cached ones are passed over.

        Returns the unbroken runs of positions whose hash was new to the index. O(stop - start).
        """

    # -- blocks by id: references of outsiders -------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the queue; return them with ``free_blocks``. O(num_blocks)."""

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take a reference to each block; return it with ``free_blocks``. O(ids)."""

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Return blocks that were popped, allocated or touched, tail first. O(ids log ids).

        Raises ``UnknownBlockError`` or ``BlockStateError`` before anything has changed.
        """

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the index; references stay. An evictable one is next to be allocated. O(ids)."""

    def reset_prefix_cache(self) -> bool:
        """Empty the index if no block is in use; False, and nothing changed, otherwise. O(pool)."""

    def clear_index(self) -> None:
        """Take every block out of the index, in use or not. O(pool)."""

    def reserve(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the queue for good. O(num_blocks)."""

    def take_new_block_ids(self) -> list[int]:
        """The blocks noted since the last call, each once: at most the pool's, however long nobody asks."""

    # -- events --------------------------------------------------------------------------------

    @property
    def logs_events(self) -> bool:
        """Whether changes of the index are recorded."""

    def log(self, event: KVCacheEvent) -> None:
        """Record what the caller knows of a change that it has just made."""

    def take_events(self) -> list[KVCacheEvent]:
        """The changes since the last call, in order."""
