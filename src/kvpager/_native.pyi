"""The compiled part: what is touched per token or per block. Not public; use the modules above it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final, overload

import numpy as np
import numpy.typing as npt

from .blocks import KVCacheBlocks
from .events import KVCacheEvent
from .pool import EvictionOrder
from .request import RequestLike
from .stats import ResidencySampler

@final
class BlockHashes(Sequence[bytes]):
    """The hashes (32 bytes each) of a growing sequence's full blocks, in one piece of memory.

    ``parent`` stands before the first block; ``cbor`` picks the message format. Equal to a list or tuple of
    the same hashes; a slice is a list.
    """

    def __init__(self, block_size: int, parent: bytes, cbor: bool) -> None: ...
    def extend(self, token_ids: Any, suffixes: Sequence[bytes] | None = None) -> None:
        """Hash the blocks of ``token_ids``, the whole sequence, that are full and have no hash yet.

        ``suffixes`` (one for each of these blocks) go behind its tokens in the message. O(new tokens).
        """

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __iter__(self) -> Iterator[bytes]: ...
    def index(self, value: Any, *range: int) -> int: ...
    def count(self, value: Any) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __repr__(self) -> str: ...

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
    is_running: bool
    """Align groups only: whether a state runs in it."""
    step_ends: list[int]
    """Align groups only: positions at whose end a step ended, not committed yet. A copy."""

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

    # -- states --------------------------------------------------------------------------------

    def is_computing(self, block_id: int) -> bool:
        """Whether the block holds a state that this very step computes: no hit yet. O(1)."""

    def new_step_starts(self) -> None:
        """What the step before was computing is computed now. O(states)."""

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

@final
class GroupRule:
    """What one group's attention kind means for the tables of requests, as numbers.

    ``lag``, ``shareable`` and ``interval`` are -1 where the kind has none. ``grows``: with the tokens;
    ``keeps_prompt``: only what was decoded dies; ``is_state``: a block is a state; ``notes_new``: new blocks are to
    be zeroed.
    ``dead``, ``needed_for_hit`` and ``growth`` say what `AttentionSpec` and `SingleTypeKVCacheManager` say. O(1)
    each, but for ``worth_caching`` and ``commit``: O(parts) and O(newly full blocks).
    """

    def __init__(
        self,
        *,
        group: int,
        block_size: int,
        stride: int,
        lag: int,
        span: int,
        release_delay: int,
        alignment: int,
        commit_margin: int,
        hit_margin: int,
        shareable: int,
        interval: int,
        grows: bool,
        keeps_prompt: bool,
        is_state: bool,
        is_align: bool,
        notes_new: bool,
    ) -> None: ...
    def dead(self, num_computed_tokens: int, num_prompt_tokens: int) -> range:
        """Positions that no later token reads."""

    def needed_for_hit(self, num_tokens: int) -> range:
        """Positions that must be cached for a hit of ``num_tokens``, the EAGLE block included."""

    def growth(self, length: int, num_tokens: int, dead: range, running: bool) -> tuple[int, int, int, int]:
        """New blocks, nulls, moved blocks and new blocks that a table gets to serve ``num_tokens``."""

    def worth_caching(self, start: int, stop: int, num_prompt_tokens: int, junction: int) -> list[range]:
        """The parts of positions [start, stop) that a hit can use, in order."""

    def lowest_computed(self, table: BlockList, num_prompt_tokens: int) -> int:
        """The fewest computed tokens from which the request can go on with the blocks it still has."""

    def quiet_until(self, table: BlockList, num_prompt_tokens: int, commits: bool) -> int:
        """The highest token count (lookahead included) up to which an allocation changes nothing."""

    def step_ends(self, table: BlockList, num_tokens: int) -> None:
        """Note that a step (or a load) ends with the state after ``num_tokens``."""

    def commit(
        self,
        pool: BlockPool,
        table: BlockList,
        hashes: Sequence[bytes],
        num_tokens: int,
        num_prompt_tokens: int,
        junction: int,
    ) -> list[range]:
        """Offer the blocks up to ``num_tokens`` to the index; gives the runs whose hashes were new to it."""

@final
class Holding:
    """What the manager remembers of one request while it holds blocks for it."""

    junction: int
    is_stale: bool
    """Its K/V is of weights from before a lazy reset."""
    commit_limit: int | None
    """Tokens beyond it are still being loaded (None: nothing is) …"""
    load_end: int
    """… up to here."""
    lowest: int
    """The fewest computed tokens from which it can go on."""
    quiet_until: int
    """The highest token count up to which nothing changes."""

    def __init__(self, request: RequestLike, tables: Sequence[BlockList]) -> None: ...
    @property
    def request(self) -> RequestLike: ...

@final
class Holdings:
    """Holdings by request id, in order of admission; the stepper finds them by the request itself. O(1) each."""

    def __init__(self) -> None: ...
    def add(self, request_id: str, holding: Holding) -> None: ...
    def get(self, request_id: str) -> Holding | None: ...
    def remove(self, request_id: str) -> None:
        """Forget one; unknown: no-op."""

    def request_ids(self) -> list[str]: ...
    def values(self) -> list[Holding]: ...

@final
class DecodeSlots:
    """The answer for a decode batch: who got which new blocks, and who got none."""

    refused: int | None
    """The index of the first request that could not be served; those behind it have not been looked at."""

    def __init__(self) -> None: ...
    def add(self, index: int, lists: Sequence[BlockList]) -> None: ...
    def changed(self) -> list[int]:
        """Indices of the requests whose tables grew, in order. O(answer)."""

    def block_ids(self, index: int) -> tuple[list[int], ...]:
        """The positions appended for one request, per group, nulls included; () if its tables did not grow."""

@final
class Stepper:
    """The ordinary steps of a request's life: admission, then again and again release what is dead, take blocks,
    commit, find the bounds anew; the end.

    What is out of the ordinary (a load under way, counts that cannot be, an admission that might not fit) is left
    to Python. ``tables`` are each group's tables by request id; ``fits_alone(request, lookahead, encoder tokens)``
    says whether a newcomer could ever fit; ``log_stored(request, group, positions)`` is called for what entered the
    index if the pool logs events; ``wrap`` makes the answer of appended lists, ``empty`` is it when nothing was.
    """

    def __init__(
        self,
        pool: BlockPool,
        holdings: Holdings,
        rules: Sequence[GroupRule],
        tables: Sequence[dict[str, BlockList]],
        *,
        max_model_len: int,
        commits: bool,
        watermark_blocks: int,
        fits_alone: Callable[[RequestLike, int, int], bool],
        log_stored: Callable[[RequestLike, int, range], None],
        wrap: Callable[[list[BlockList]], KVCacheBlocks],
        empty: KVCacheBlocks,
    ) -> None: ...
    def admit(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_hit_tokens: int,
        hits: KVCacheBlocks | None,
        full_sequence_must_fit: bool,
        num_lookahead_tokens: int,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
    ) -> Any:
        """Register a newcomer and take its hits and blocks. Answers as `step`. O(groups + blocks)."""

    def step(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_lookahead_tokens: int,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
    ) -> Any:
        """The positions appended as `KVCacheBlocks`; None: refused; NotImplemented: out of the ordinary.

        O(1) while the request is quiet, else O(groups + blocks changed).
        """

    def step_all(
        self,
        requests: Sequence[RequestLike],
        num_new_tokens: Sequence[int] | None,
        num_lookahead_tokens: int,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
        start: int,
        slots: DecodeSlots,
    ) -> int:
        """Step requests from ``start`` on (None: one token each) until one is refused or out of the ordinary.

        Returns its index, or their number.
        """

    def free(self, request: RequestLike) -> None:
        """Give back all that a request holds, tail first; one that holds nothing: no-op. O(blocks)."""

    def find_bounds(self, holding: Holding, num_prompt_tokens: int) -> None:
        """Set ``lowest`` and ``quiet_until``. O(groups)."""
