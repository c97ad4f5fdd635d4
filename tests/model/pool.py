"""The pool in plain Python: the oracle of the compiled one. Lists and dicts, one block after the other.

The free queue is two linked lists, popped front to back::

    [ never cached … | cached, dead, not useful … ]   [ the other cached ones, least recently freed first … ]
      front: prepend              back: append            back: append
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from kvpager.errors import BlockStateError, ConfigError, InvalidRequestError, OutOfBlocksError, UnknownBlockError
from kvpager.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, KVCacheEvent
from kvpager.stats import ResidencySampler

NULL_BLOCK = 0
EvictionOrder = Literal["dead_first", "recency"]


class BlockList:
    """Block ids by position: a request's table in one group, or the blocks of a hit.

    ``num_committed`` and ``num_released`` are the positions up to which the owner has offered
    blocks to the index and given dead ones back. ``is_running`` and ``step_ends`` (positions at whose
    end a step ended) are for align groups.
    """

    __slots__ = ("_ids", "is_running", "num_committed", "num_released", "step_ends")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = list(ids)
        self.num_committed = 0
        self.num_released = 0
        self.is_running = False
        self.step_ends: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, position: int) -> int:
        return self._ids[position]

    def ids(self, start: int = 0, stop: int | None = None) -> list[int]:
        """The ids of positions [start, stop). O(stop - start)."""
        return self._ids[start:stop]

    def slice(self, start: int, stop: int) -> BlockList:
        """A copy of positions [start, stop) that holds no references. O(stop - start)."""
        return BlockList(self._ids[start:stop])


class BlockPool:
    """``num_blocks`` physical blocks, shared by ``num_groups`` groups.

    Hashes are bytes; a group whose blocks span ``stride`` hash blocks finds the hash of its
    position i at index (i + 1) * stride - 1.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        *,
        eviction_order: EvictionOrder = "dead_first",
        enable_events: bool = False,
        residency: ResidencySampler | None = None,
    ) -> None:
        if eviction_order not in get_args(EvictionOrder):
            raise ConfigError(f"eviction_order must be one of {get_args(EvictionOrder)}, got {eviction_order!r}")
        self.num_blocks = num_blocks
        self.eviction_order = eviction_order
        self.num_free = num_blocks - 1
        self.num_popped = 0
        self.num_reserved = 0
        self.num_evictions = 0
        """Cached blocks that an allocation overwrote, ever."""
        self.generation = 0
        """Grows whenever a hash leaves the index: a hit looked up before may be stale."""
        self._residency = residency
        self._events: list[KVCacheEvent] | None = [] if enable_events else None
        self._refs = [0] * num_blocks
        self._outside = [0] * num_blocks
        self._reserved: frozenset[int] = frozenset()
        self._hashes: list[tuple[int, bytes] | None] = [None] * num_blocks
        self._useful = bytearray(num_blocks)
        self._new: dict[int, None] = {}
        self._computing: set[int] = set()
        self._index: dict[tuple[int, bytes], list[int]] = {}
        # Two circular lists through sentinels num_blocks (first out) and num_blocks + 1 (by recency).
        first_out, recent = num_blocks, num_blocks + 1
        self._next = [*range(1, num_blocks + 1), 1 if num_blocks > 1 else first_out, recent]
        self._prev = [-1, *range(num_blocks), recent]
        self._prev[first_out] = num_blocks - 1 if num_blocks > 1 else first_out
        if num_blocks > 1:
            self._prev[1] = first_out
        self._first_out, self._recent = first_out, recent

    # -- counts and single blocks ------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that requests hold. O(1)."""
        return self.num_blocks - 1 - self.num_free - self.num_popped - self.num_reserved

    @property
    def usage(self) -> float:
        """The part of the allocatable blocks that is not free, 0 to 1. O(1)."""
        capacity = self.num_blocks - 1 - self.num_reserved
        return (capacity - self.num_free) / capacity if capacity else 0.0

    def ref_count(self, block_id: int) -> int:
        """References to a block, those of outsiders included. O(1)."""
        return self._refs[self._checked(block_id)]

    def outside_count(self, block_id: int) -> int:
        """References to a block that outsiders hold (popped, allocated or touched by hand). O(1)."""
        return self._outside[self._checked(block_id)]

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash under which a block is in the index, if it is. O(1)."""
        entry = self._hashes[self._checked(block_id)]
        return entry[1] if entry else None

    def free_queue(self) -> list[int]:
        """Free blocks, next to be allocated first. O(free)."""
        order: list[int] = []
        for head in (self._first_out, self._recent):
            block_id = self._next[head]
            while block_id != head:
                order.append(block_id)
                block_id = self._next[block_id]
        return order

    def index(self) -> dict[tuple[bytes, int], list[int]]:
        """(hash, group) to its blocks, oldest copy first. O(cached)."""
        return {(block_hash, group): list(ids) for (group, block_hash), ids in self._index.items()}

    def reserved_blocks(self) -> frozenset[int]:
        """The blocks that ``reserve`` took."""
        return self._reserved

    # -- look-ups: read only -------------------------------------------------------------------

    def prefix(self, groups: Sequence[int], hashes: Sequence[bytes], stride: int, stop: int) -> list[BlockList]:
        """Per group, the oldest copies of the leading positions (of ``stop``) that all groups have. O(answer)."""
        found: list[list[int]] = [[] for _ in groups]
        for position in range(stop):
            copies = [self._index.get((group, hashes[(position + 1) * stride - 1])) for group in groups]
            if not all(copies):
                break
            for blocks, ids in zip(found, copies, strict=True):
                blocks.append(ids[0] if ids else NULL_BLOCK)
        return [BlockList(blocks) for blocks in found]

    def run_start(self, groups: Sequence[int], hashes: Sequence[bytes], stride: int, start: int, stop: int) -> int:
        """The smallest p ≥ start such that positions [p, stop) are all cached in all groups. O(stop - p)."""
        for position in range(stop - 1, start - 1, -1):
            block_hash = hashes[(position + 1) * stride - 1]
            if any((group, block_hash) not in self._index for group in groups):
                return position + 1
        return start

    def lookup(self, group: int, hashes: Sequence[bytes], stride: int, start: int, stop: int) -> BlockList:
        """Nulls for [0, start), then the oldest cached copy for each of [start, stop). O(stop)."""
        blocks = BlockList([NULL_BLOCK] * start)
        if any((group, hashes[(p + 1) * stride - 1]) not in self._index for p in range(start, stop)):
            raise BlockStateError(f"not all of positions {start} to {stop} are cached in group {group}")
        blocks._ids += [self._index[group, hashes[(p + 1) * stride - 1]][0] for p in range(start, stop)]
        return blocks

    def serves(self, blocks: BlockList, group: int, hashes: Sequence[bytes], stride: int) -> bool:
        """Whether every non-null block still is in the index under its position's hash. O(blocks)."""
        return all(
            block_id == NULL_BLOCK or self._hashes[block_id] == (group, hashes[(position + 1) * stride - 1])
            for position, block_id in enumerate(blocks._ids)
        )

    def count_evictable(self, blocks: BlockList, start: int, stop: int) -> int:
        """Blocks of [start, stop) that are free now: adopting them takes from the supply. O(stop - start)."""
        return sum(block_id != NULL_BLOCK and not self._refs[block_id] for block_id in blocks._ids[start:stop])

    def count_exclusive(self, blocks: BlockList, start: int, stop: int) -> int:
        """Blocks of [start, stop) that nobody else refers to: releasing them adds to the supply."""
        return sum(self._refs[block_id] == 1 for block_id in blocks._ids[start:stop])

    def num_shared_by(self, blocks: BlockList, num_holders: int) -> int:
        """Leading blocks that ``num_holders`` requests refer to (outsiders do not count). O(answer)."""
        for position, block_id in enumerate(blocks._ids):
            if self._refs[block_id] - self._outside[block_id] != num_holders:
                return position
        return len(blocks)

    # -- tables: references of requests -------------------------------------------------------

    def adopt(self, table: BlockList, hits: BlockList, start: int, stop: int) -> None:
        """Append the hits of positions [start, stop) and take a reference to each (nulls: none). O(stop - start)."""
        _check_range(hits, start, stop)
        for position in range(start, stop):
            block_id = hits._ids[position]
            if block_id != NULL_BLOCK:
                self._refer(block_id)
                self._useful[block_id] = 1
                if self._residency:
                    self._residency.used(block_id)
            table._ids.append(block_id)

    def extend(self, table: BlockList, num_blocks: int, note: bool = False) -> None:
        """Append ``num_blocks`` blocks from the front of the queue. O(num_blocks).

        With ``note`` they are told by the next ``take_new_block_ids``.
        """
        taken = self._take(num_blocks)
        table._ids += taken
        if note:
            self._new.update(dict.fromkeys(taken))

    def extend_null(self, table: BlockList, num_positions: int) -> None:
        """Append positions that nobody will read. O(num_positions)."""
        table._ids += [NULL_BLOCK] * num_positions

    def move(self, table: BlockList, source: int) -> None:
        """Append the block of position ``source`` and leave null there. O(1)."""
        _check_range(table, source, source + 1)
        table._ids.append(table._ids[source])
        table._ids[source] = NULL_BLOCK

    def release(self, table: BlockList, start: int, stop: int, keep: range = range(0)) -> None:
        """Give back dead blocks of [start, stop), tail first, leaving nulls. O(stop - start).

        Positions in ``keep`` are useful all the same (a hit elsewhere will need them).
        """
        _check_range(table, start, stop)
        freed = [
            (block_id, position not in keep)
            for position in range(stop - 1, start - 1, -1)
            if (block_id := table._ids[position]) != NULL_BLOCK
        ]
        self._check_held([block_id for block_id, _ in freed])
        for position in range(start, stop):
            table._ids[position] = NULL_BLOCK
        self._give_back(freed)

    def free_tables(
        self, tables: Sequence[BlockList], block_sizes: Sequence[int], dead: Sequence[range], keep: Sequence[range]
    ) -> None:
        """Give back all blocks of one request's tables, which end up empty. O(blocks).

        Tail first; across groups by end position, so that what one prefix position needs dies together
        (with ``"recency"``: group after group). ``dead`` are each table's dead positions, ``keep`` those
        that are useful all the same.
        """
        freed = [
            [
                (-(position + 1) * block_size, group, block_id, position in gone and position not in kept)
                for position, block_id in reversed(list(enumerate(table._ids)))
                if block_id != NULL_BLOCK
            ]
            for group, (table, block_size, gone, kept) in enumerate(zip(tables, block_sizes, dead, keep, strict=True))
        ]
        self._check_held([block_id for blocks in freed for *_, block_id, _ in blocks])
        for table in tables:
            table._ids.clear()
        if self.eviction_order == "recency":
            for blocks in freed:
                self._give_back([(block_id, gone) for *_, block_id, gone in blocks])
        else:
            merged = sorted(entry for blocks in freed for entry in blocks)
            self._give_back([(block_id, gone) for *_, block_id, gone in merged])

    def pop_tables(self, tables: Sequence[BlockList], block_sizes: Sequence[int]) -> list[int]:
        """Hand a request's blocks (no nulls) to the caller, who returns them with ``free_blocks``. O(blocks).

        The reverse of the order in which `free_tables` gives back.
        """
        popped = [
            ((position + 1) * block_size, -group, block_id)
            for group, (table, block_size) in enumerate(zip(tables, block_sizes, strict=True))
            for position, block_id in enumerate(table._ids)
            if block_id != NULL_BLOCK
        ]
        if self.eviction_order != "recency":
            popped.sort()
        self._check_held([block_id for *_, block_id in popped])
        for table in tables:
            table._ids.clear()
        for *_, block_id in popped:
            self._count(block_id, 0, outside=1)
        return [block_id for *_, block_id in popped]

    def commit(
        self, table: BlockList, group: int, hashes: Sequence[bytes], stride: int, start: int, stop: int
    ) -> list[range]:
        """Enter the blocks of [start, stop) into the index; nulls and cached ones are passed over.

        Returns the unbroken runs of positions whose hash was new to the index. O(stop - start).
        """
        runs: list[range] = []
        stop = min(stop, len(hashes) // stride)
        _check_range(table, start, stop)
        for position in range(start, stop):
            block_id = table._ids[position]
            if block_id == NULL_BLOCK or self._hashes[block_id]:
                continue
            key = (group, hashes[(position + 1) * stride - 1])
            self._hashes[block_id] = key
            copies = self._index.setdefault(key, [])
            copies.append(block_id)
            if len(copies) == 1:
                begin = runs.pop().start if runs and runs[-1].stop == position else position
                runs.append(range(begin, position + 1))
        return runs

    # -- states --------------------------------------------------------------------------------

    def compute(self, block_ids: Iterable[int]) -> None:
        """These blocks hold states that this very step computes (nulls: none). O(ids)."""
        self._computing |= set(block_ids) - {NULL_BLOCK}

    def is_computing(self, block_id: int) -> bool:
        """Whether the block holds a state that this very step computes: no hit yet. O(1)."""
        return self._checked(block_id) in self._computing

    def new_step_starts(self) -> None:
        """What the step before was computing is computed now."""
        self._computing.clear()

    # -- blocks by id: references of outsiders -------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the queue; return them with ``free_blocks``. O(num_blocks)."""
        taken = self._take(num_blocks)
        for block_id in taken:
            self._count(block_id, 0, outside=1)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take a reference to each block; return it with ``free_blocks``. O(ids)."""
        ids = [self._checked_real(block_id) for block_id in block_ids]
        for block_id in ids:
            self._refer(block_id, outside=1)
            if self._residency:
                self._residency.used(block_id)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Return blocks that were popped, allocated or touched, tail first. O(ids).

        Raises ``UnknownBlockError`` or ``BlockStateError`` before anything has changed.
        """
        ids = [self._checked_real(block_id) for block_id in block_ids]
        for block_id, times in Counter(ids).items():
            if self._outside[block_id] < times:
                raise BlockStateError(
                    f"block {block_id} is freed {times}x, but only {self._outside[block_id]} of its "
                    f"{self._refs[block_id]} references were handed out; free what pop_blocks_for_free, allocate or "
                    f"touch gave you, once (a request's own blocks go back with manager.free)"
                )
        self._give_back([(block_id, False) for block_id in ids], outside=1)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the index; references stay. An evictable one is next to be allocated. O(ids)."""
        for block_id in [self._checked(block_id) for block_id in block_ids]:
            if self._hashes[block_id] is None:
                continue
            self._forget(block_id)
            if not self._refs[block_id] and self.eviction_order == "dead_first":
                self._unlink(block_id)
                self._link_after(block_id, self._first_out)

    def reset_prefix_cache(self) -> bool:
        """Empty the index if no block is in use; False, and nothing changed, otherwise. O(pool)."""
        if self.num_held or self.num_popped:
            return False
        self.clear_index()
        return True

    def clear_index(self) -> None:
        """Take every block out of the index, in use or not. O(pool)."""
        self.generation += 1
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        self._useful = bytearray(self.num_blocks)
        self._append_recent_to_first_out()
        if self._residency:
            self._residency.reset()
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def reserve(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the queue for good. O(num_blocks)."""
        taken = self._take(num_blocks)
        self.num_reserved += num_blocks
        self._reserved |= frozenset(taken)
        return taken

    def take_new_block_ids(self) -> list[int]:
        """The blocks noted since the last call, each once: at most the pool's, however long nobody asks."""
        taken, self._new = list(self._new), {}
        return taken

    # -- events --------------------------------------------------------------------------------

    @property
    def logs_events(self) -> bool:
        """Whether changes of the index are recorded."""
        return self._events is not None

    def take_events(self) -> list[KVCacheEvent]:
        """The changes since the last call, in order."""
        if self._events is None:
            return []
        events, self._events = self._events, []
        return events

    # -- inside --------------------------------------------------------------------------------

    def _checked(self, block_id: int) -> int:
        if not isinstance(block_id, int) or not 0 <= block_id < self.num_blocks:
            raise UnknownBlockError(f"block id {block_id!r} is not in the pool; ids are 0 to {self.num_blocks - 1}")
        return block_id

    def _checked_real(self, block_id: int) -> int:
        if self._checked(block_id) == NULL_BLOCK:
            raise BlockStateError("block 0 is the null block: it is never held, touched or freed; leave it out")
        return block_id

    def _check_held(self, block_ids: Iterable[int]) -> None:
        for block_id, times in Counter(block_ids).items():
            if self._refs[block_id] - self._outside[block_id] < times:
                raise BlockStateError(f"block {block_id} is in a table, but no request holds it")

    def _take(self, num_blocks: int) -> list[int]:
        if not 0 <= num_blocks <= self.num_free:
            raise OutOfBlocksError(f"{num_blocks} blocks were asked for, {self.num_free} are free")
        taken = []
        for _ in range(num_blocks):
            block_id = self._next[self._first_out]
            if block_id == self._first_out:
                block_id = self._next[self._recent]
            self._unlink(block_id)
            if self._hashes[block_id] is not None:
                self._forget(block_id)
                self.num_evictions += 1
            if self._residency:
                self._residency.allocated(block_id)
            self._refs[block_id] = 1
            taken.append(block_id)
        self.num_free -= num_blocks
        return taken

    def _count(self, block_id: int, refs: int, outside: int) -> None:
        """Change a block's references, ``outside`` of them held by outsiders, and the count of popped blocks."""
        self.num_popped -= 0 < self._outside[block_id] == self._refs[block_id]
        self._refs[block_id] += refs
        self._outside[block_id] += outside
        self.num_popped += 0 < self._outside[block_id] == self._refs[block_id]

    def _refer(self, block_id: int, outside: int = 0) -> None:
        if self._refs[block_id] == 0:
            self._unlink(block_id)
            self.num_free -= 1
        self._count(block_id, 1, outside)

    def _give_back(self, blocks: Sequence[tuple[int, bool]], outside: int = 0) -> None:
        """Drop one reference each of (block, dead), in eviction order."""
        never_cached: list[int] = []
        for block_id, dead in blocks:
            self._count(block_id, -1, -outside)
            if self._refs[block_id]:
                continue
            self.num_free += 1
            if self._hashes[block_id] is None:
                never_cached.append(block_id)
            elif dead and not self._useful[block_id] and self.eviction_order == "dead_first":
                self._link_after(block_id, self._prev[self._first_out])
            else:
                self._link_after(block_id, self._prev[self._recent])
        for block_id in reversed(never_cached):
            self._link_after(block_id, self._first_out)

    def _forget(self, block_id: int) -> None:
        """Take one block out of the index; tell it if it was the last copy."""
        key = self._hashes[block_id]
        assert key is not None
        copies = self._index[key]
        copies.remove(block_id)
        if not copies:
            del self._index[key]
            if self._events is not None:
                last = self._events[-1] if self._events else None
                if isinstance(last, BlockRemoved) and last.group_idx == key[0]:
                    last.block_hashes.append(key[1])
                else:
                    self._events.append(BlockRemoved([key[1]], MEDIUM_GPU, key[0]))
        self._hashes[block_id] = None
        self._useful[block_id] = 0
        self.generation += 1
        if self._residency:
            self._residency.evicted(block_id)

    def _append_recent_to_first_out(self) -> None:
        """Blocks of the recent list carry no hash any more: they go before whatever is cached from now on."""
        first, last = self._next[self._recent], self._prev[self._recent]
        if first == self._recent:
            return
        before = self._prev[self._first_out]
        self._next[before], self._prev[first] = first, before
        self._next[last], self._prev[self._first_out] = self._first_out, last
        self._next[self._recent] = self._prev[self._recent] = self._recent

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before

    def _link_after(self, block_id: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after


def _check_range(blocks: BlockList, start: int, stop: int) -> None:
    if start < stop and not 0 <= start <= stop <= len(blocks):
        raise InvalidRequestError(f"positions {start} to {stop} are not in a list of {len(blocks)} blocks")
