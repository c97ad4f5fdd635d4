"""The compiled part: what is touched per token or per block. Not public; use the modules above it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final, overload

import numpy as np
import numpy.typing as npt

from .attention.base import Content
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
    """Block ids by position: a table, or the blocks of a hit. Four bytes each."""

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

    def block_group(self, block_id: int) -> int | None:
        """The group of that hash. O(1)."""

    def free_queue(self) -> list[int]:
        """Free blocks, next to be allocated first. O(free)."""

    def index(self) -> dict[tuple[bytes, int], list[int]]:
        """(hash, group) to its blocks, oldest copy first. O(pool)."""

    def reserved_blocks(self) -> frozenset[int]:
        """The blocks that ``reserve`` took. O(reserved)."""

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

    def reserve(self, num_blocks: int) -> list[int]:
        """Take blocks from the front of the queue for good. O(num_blocks)."""

    def take_new_block_ids(self) -> list[int]:
        """The blocks noted since the last call, each once: at most the pool's, however long nobody asks."""

    def take_events(self) -> list[KVCacheEvent]:
        """The changes since the last call, in order."""

@final
class AttentionKind:
    """An attention kind as numbers, and all that follows from them: see `AttentionSpec`, which explains them.

    ``lag`` None: all tokens are still read. Raises ``ConfigError``. O(1) each but for what says else.
    """

    def __init__(
        self,
        *,
        content: Content,
        block_size: int,
        lag: int | None,
        span: int,
        num_speculative_states: int,
        keeps_prompt: bool,
        needs_whole_prefix: bool,
    ) -> None: ...
    def dead(self, num_computed_tokens: int, num_prompt_tokens: int) -> range:
        """Positions that no later token reads."""

    def needed_for_hit(self, num_tokens: int) -> range:
        """Positions that a hit reads."""

    def num_positions(self, num_slots: int, num_encoder_tokens: int) -> int:
        """The length of a table that serves so many tokens."""

    def num_slots(self, num_positions: int) -> int:
        """Token slots of a table of so many positions."""

    def step_starts_to_check(self, first: int, last: int, num_prompt_tokens: int) -> list[int]:
        """The computed counts among which a prefill holds the most. O(log span)."""

    def most_held(self, num_slots: int, max_step: int, num_prompt_tokens: int, num_encoder_tokens: int) -> int:
        """Blocks that a sequence holds at most. O(log span)."""

@final
class SingleTypeKVCacheManager:
    """One group of layers: its kind and its place in the cache, as numbers. Raises ``ConfigError``.

    ``commit_lookahead`` and ``draft_lookahead`` are tokens beyond a hit's end that are cached, and that must be
    cached, too
    (EAGLE). ``shareable_decoded`` None: all decoded tokens can be hit. ``interval`` (tokens) lies between hit
    lengths that
    are worth caching; 0: none but the prompt's end and branch points, None: every block is. ``zeroes_new``: its
    kernels read
    whole blocks.
    """

    def __init__(
        self,
        kind: AttentionKind,
        *,
        group_id: int,
        hashes_per_block: int,
        alignment: int,
        commit_lookahead: int,
        draft_lookahead: int,
        shareable_decoded: int | None,
        interval: int | None,
        zeroes_new: bool,
    ) -> None: ...
    @property
    def group_id(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def draft_lookahead(self) -> int: ...

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
class KVCacheCoordinator:
    """The live requests, their tables in all groups, and the one way in which those change.

    Arguments and requests are read and checked before anything changes; nothing calls Python while it does. Raises
    ``InvalidRequestError``, ``DuplicateRequestError``, ``UnknownRequestError``. ``trusts_max_tokens``: a request
    is taken to
    grow to its ``max_tokens``. ``records_admissions``: `allocate` tells of a new request what statistics count.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[SingleTypeKVCacheManager],
        *,
        hash_block_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        watermark_blocks: int,
        can_hit: bool,
        trusts_max_tokens: bool,
        records_admissions: bool,
    ) -> None: ...

    # -- questions: read only ------------------------------------------------------------------

    def match(self, request: RequestLike) -> tuple[list[BlockList], int, int]:
        """The longest prefix that every group has: each group's blocks for exactly that, its tokens, its branch point.

        The branch point is the longest aligned length beyond it that the groups which need the whole prefix still have
        (0: none): some other request shares it, and only window or state blocks are missing. O(prefix).
        """

    def match_each(self, hashes: Sequence[bytes], max_tokens: int) -> list[tuple[BlockList, int]]:
        """Each group's longest hit if it were alone, aligned all the same. O(groups x prefix)."""

    def is_live(self, request: RequestLike) -> bool:
        """Whether it, not another request of its id, holds blocks. O(1)."""

    def fits_alone(self, request: RequestLike, num_lookahead_tokens: int, num_encoder_tokens: int) -> bool:
        """Whether the cache could ever hold it. O(groups)."""

    def length_fits(
        self, num_tokens: int, num_prompt_tokens: int, num_lookahead_tokens: int, num_encoder_tokens: int
    ) -> bool:
        """Whether the cache could hold a sequence that has it for itself. O(groups)."""

    def longest_that_fits(self, num_lookahead_tokens: int, num_encoder_tokens: int) -> int:
        """The longest prompt that it could hold. O(1), but the first call bisects."""

    def can_continue(self, request: RequestLike) -> bool:
        """Whether the blocks are still there that its next token reads. O(1).

        False after its ``num_computed_tokens`` were set back to before what has been released: it must start over.
        """

    def check_fit(
        self,
        request: RequestLike,
        hit: Sequence[BlockList],
        generation: int,
        junction: int,
        num_new_tokens: int,
        num_hit_tokens: int,
        num_lookahead_tokens: int,
        num_external_tokens: int,
        delay_cache_blocks: bool,
        num_encoder_tokens: int,
        full_sequence_must_fit: bool,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
    ) -> tuple[int, list[int], int, int]:
        """What `allocate` would do: its planning half.

        Gives the value of `Fit`, the free blocks needed in each group and in all, and how many of them are missing.
        """

    def tokens_to_commit(
        self, request: RequestLike, num_hit_tokens: int, num_external_tokens: int, num_new_tokens: int
    ) -> range:
        """The tokens that `allocate` may enter into the index; what events tell of them is read before. O(groups)."""

    def tokens_to_cache(self, request: RequestLike, num_computed_tokens: int) -> range:
        """The same for `cache_blocks`."""

    def plan(
        self,
        request_id: str,
        hits: Sequence[BlockList],
        *,
        num_computed_tokens: int,
        num_main_tokens: int,
        num_slots: int,
        num_encoder_tokens: int,
        on_the_way: bool,
    ) -> list[int]:
        """Free blocks that slots for ``num_slots`` tokens take, per group: at once, or at most on the way there."""

    def tables(self, request_id: str) -> list[BlockList]:
        """Copies of a request's tables; [] if it is not live. O(blocks)."""

    def num_committed_blocks(self, request_id: str) -> list[int]:
        """Leading positions that have been offered to the index, per group; [] if it is not live."""

    def num_shared_blocks(self, request_id: str) -> list[int]:
        """Leading positions of a request that all live requests hold, per group; [] if it is not live."""

    def request_ids(self) -> list[str]:
        """The ids of live requests, in order of admission. O(requests)."""

    def live_requests(self) -> list[RequestLike]:
        """The live requests, in order of admission. O(requests)."""

    def is_no_op(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_lookahead_tokens: int,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
    ) -> bool:
        """Whether `allocate` would change nothing for a running request that asks for nothing else. O(1)."""

    # -- deeds ---------------------------------------------------------------------------------

    def allocate(
        self,
        request: RequestLike,
        hit: Sequence[BlockList],
        generation: int,
        junction: int,
        num_new_tokens: int,
        num_hit_tokens: int,
        num_lookahead_tokens: int,
        num_external_tokens: int,
        delay_cache_blocks: bool,
        num_encoder_tokens: int,
        full_sequence_must_fit: bool,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
    ) -> tuple[list[BlockList] | None, Sequence[tuple[int, range]], tuple[int, bool] | None] | None:
        """The one way: release what is dead, plan, refuse or apply, commit, find the bounds.

        ``hit`` (empty: there is none) was found when the pool's generation was ``generation`` (-1: unknown).
        None: refused.
        Else each group's positions appended for new and lookahead tokens (None: there are none), the (group, positions)
        whose hashes were new to the index, if the pool logs events, and of a new request (tokens, whether it was
        preempted) for statistics. O(groups + blocks changed).
        """

    def allocate_all(
        self,
        requests: Sequence[RequestLike],
        num_new_tokens: Sequence[int] | None,
        num_lookahead_tokens: int,
        reserved_blocks: int,
        has_scheduled_reqs: bool,
        start: int,
        slots: DecodeSlots,
    ) -> int:
        """`allocate` for requests from ``start`` on (None: one token each), into ``slots``.

        It stops at the first that is refused, or that events or statistics will tell of; gives its index, or
        the number of
        requests.
        """

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> Sequence[tuple[int, range]]:
        """A load has arrived so far: commit it. Gives the (group, positions) that were new to the index."""

    def step_ends(self, request: RequestLike, num_tokens: int) -> None:
        """A step left the request's states after so many tokens, which nobody knew when it was planned. O(groups).

        `allocate` notes the ends of steps itself; this is for hosts that learn them late (tokens sampled
        asynchronously).
        """

    def release(self, request_id: str, num_processed_tokens: int, num_prompt_tokens: int | None) -> None:
        """Give back what no later token reads; unknown request: no-op. O(newly dead)."""

    def free(self, request: RequestLike) -> None:
        """Give back all that a request holds, tail first; one that holds nothing: no-op. O(blocks)."""

    def pop(self, request: RequestLike) -> list[int]:
        """Forget a request and hand its blocks out, heads first. O(blocks)."""

    def invalidate(self, block_ids: Iterable[int]) -> dict[str, int]:
        """The blocks hold garbage: they and what was computed from them leave the index. O(held blocks).

        Gives each holder's first token to compute again; 0: what it would go on from is gone.
        """

    def clear_index(self) -> None:
        """All hashes leave at once; who holds blocks now commits nothing any more. O(pool)."""
