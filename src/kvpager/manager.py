"""KVCacheManager: what a scheduler calls, in the order it calls it.

``get_computed_blocks`` and ``probe`` ask and change nothing; ``allocate_slots`` admits, grows and
commits; ``free`` ends it. A refused call changes nothing but dead blocks; an error changes nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple

from ._native import DecodeSlots
from .attention import CrossAttention, SinkAttention
from .blocks import Block, KVCacheBlocks
from .config import CacheConfig
from .coordinator import KVCacheCoordinator, make_groups
from .errors import ConfigError, InvalidRequestError
from .events import KVCacheEvent, StoredEvents
from .pool import BlockList, BlockPool, EvictionOrder
from .request import EventSource, RequestLike
from .stats import PrefixCacheStats, ResidencySampler

__all__ = ["DecodeSlots", "Fit", "KVCacheManager", "Probe"]

logger = logging.getLogger("kvpager")


class Fit(Enum):
    """Whether an allocation would be made."""

    NOW = 0
    NOT_NOW = 1
    """Not enough blocks are free."""
    NEXT_STEP = 2
    """The hit's state is only computed in this step."""
    NEVER = 3
    """The request could outgrow the whole cache."""


class Probe(NamedTuple):
    """What ``allocate_slots`` would do, and why.

    ``num_blocks_needed`` are free blocks (evictable hits included), ``num_blocks_short`` how many of them
    are missing, ``limiting_group`` the group that needs the most of them. ``num_tokens_that_fit`` is told
    with NEVER: the longest sequence that the cache can hold.
    """

    fit: Fit
    num_hit_tokens: int
    junction: int = 0
    num_blocks_needed: int = 0
    num_blocks_short: int = 0
    limiting_group: int | None = None
    num_tokens_that_fit: int | None = None


def _itself(request: Any) -> Any:
    return request


class KVCacheManager:
    """The KV-cache manager of one engine.

    ``max_num_batched_tokens`` (default: ``max_model_len``) is the most tokens that one step computes for a
    request. ``watermark`` (0 ≤ w < 1) is the fraction of blocks that newcomers must leave free while
    others run. ``residency`` follows sampled blocks. ``event_source`` gives what events tell of a request, for
    hosts whose requests do not say it themselves. ``trust_max_tokens``: whether a request is taken to grow to its
    ``max_tokens``; without, what it has by now is all that decides whether it could ever fit (for hosts that cannot
    refuse a request). Raises ``ConfigError``.
    """

    blocks_class: ClassVar[type[KVCacheBlocks]] = KVCacheBlocks
    """What answers are made of: a host may show blocks in its own way."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        watermark: float = 0.0,
        eviction_order: EvictionOrder = "dead_first",
        residency: ResidencySampler | None = None,
        event_source: Callable[[Any], EventSource] = _itself,
        trust_max_tokens: bool = True,
    ) -> None:
        max_step = max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
        if not 0 <= watermark < 1:
            raise ConfigError(f"watermark must be at least 0 and below 1, got {watermark!r}")
        groups = make_groups(config, use_eagle=use_eagle)
        self.kv_cache_config = config
        self.num_kv_cache_groups = len(config.groups)
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_step
        self.enable_caching = enable_caching
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * config.num_blocks)
        self.block_pool = BlockPool(
            config.num_blocks,
            len(config.groups),
            eviction_order=eviction_order,
            enable_events=enable_kv_cache_events,
            residency=residency,
        )
        # A cache that can never hit commits nothing either: entries that nobody can hit only mislead.
        self.coordinator = KVCacheCoordinator(
            self.block_pool,
            groups,
            hash_block_size=config.hash_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_step,
            watermark_blocks=self.watermark_blocks,
            can_hit=enable_caching and bool(groups) and all(spec.can_hit for spec in config.specs),
            trusts_max_tokens=trust_max_tokens,
            records_admissions=log_stats and enable_caching,
        )
        self.empty_kv_cache_blocks = self.blocks_class(self.block_pool, [BlockList() for _ in config.groups])
        self._sink_blocks = [
            self.block_pool.reserve(spec.num_sink_blocks) if isinstance(spec, SinkAttention) else []
            for spec in config.specs
        ]
        self._draft_lookahead = max((group.draft_lookahead for group in groups), default=0)
        self._has_step_states = any(spec.content == "step_states" for spec in config.specs)
        self._event_source = event_source
        self._logs_events = enable_kv_cache_events
        self._events: list[KVCacheEvent] = []
        if enable_caching:
            _warn_if_it_cannot_hit(config, max_model_len)

    # -- admission -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of a request and its length in tokens. Read only. O(prefix blocks).

        At most ``num_tokens - 1``, since the last token has to be computed for its logits. Nothing is
        held yet: pass both to ``allocate_slots``.
        """
        lists, num_tokens, junction = self.coordinator.match(request)
        if not num_tokens and not junction:
            return self.empty_kv_cache_blocks, 0
        return self.blocks_class(self.block_pool, lists, junction, self.block_pool.generation), num_tokens

    def probe(
        self,
        request: RequestLike,
        num_new_tokens: int | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> Probe:
        """What ``get_computed_blocks`` and ``allocate_slots`` would answer now, and why. Read only.

        ``num_new_tokens`` defaults to all that are left, at most ``max_num_batched_tokens``. It is the very
        plan that ``allocate_slots`` applies.
        """
        coordinator = self.coordinator
        lists, num_hits, junction = ((), 0, 0) if coordinator.is_live(request) else coordinator.match(request)
        if num_new_tokens is None:
            computed = request.num_computed_tokens + num_hits + num_external_computed_tokens
            num_new_tokens = max(1, min(request.num_tokens - computed, self.max_num_batched_tokens))
        code, needs, num_needed, num_short = coordinator.check_fit(
            request,
            lists,
            self.block_pool.generation,
            junction,
            num_new_tokens,
            num_hits,
            num_lookahead_tokens,
            num_external_computed_tokens,
            False,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
            has_scheduled_reqs,
        )
        fit = Fit(code)
        longest = self.longest_that_fits(num_lookahead_tokens, num_encoder_tokens) if fit is Fit.NEVER else None
        return Probe(
            fit=fit,
            num_hit_tokens=num_hits,
            junction=junction,
            num_blocks_needed=num_needed,
            num_blocks_short=num_short,
            limiting_group=max(range(len(needs)), key=needs.__getitem__) if num_short else None,
            num_tokens_that_fit=longest,
        )

    def fits_alone(self, request: RequestLike, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0) -> bool:
        """Whether the cache could ever hold the request, grown to its ``max_tokens``. Read only. O(groups).

        Without ``max_tokens``, or with ``trust_max_tokens=False``: what it has by now. ``allocate_slots`` refuses a
        newcomer of which this is false, and `probe` says NEVER.
        """
        return self.coordinator.fits_alone(request, num_lookahead_tokens, num_encoder_tokens)

    def longest_that_fits(self, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        """The longest prompt that the cache can hold. O(1), but the first call bisects: need grows with length."""
        return self.coordinator.longest_that_fits(num_lookahead_tokens, num_encoder_tokens)

    def allocate_slots(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Give a request slots for ``num_new_tokens`` more tokens; None if that cannot be done now.

        ::

            computed | new hits | external | new | lookahead
                                └ loaded by a connector
                                           └ to be computed this step
                                                 └ speculative slots

        At admission pass what ``get_computed_blocks`` gave. ``full_sequence_must_fit`` refuses what could not
        finish its prefill; ``reserved_blocks`` are promised to others; ``delay_cache_blocks`` keeps the
        external tokens out of the index until ``cache_blocks`` covers them. ``has_scheduled_reqs``: anything
        runs, so the watermark holds for a newcomer.

        Returns the positions appended for new and lookahead tokens, nulls included. A refused call has
        released dead blocks and changed nothing else; a request that could never fit is refused too
        (`probe` says so). Raises ``InvalidRequestError``. O(1) while the request is quiet, else O(groups +
        blocks changed).
        """
        # Most steps of running requests change nothing.
        if (
            new_computed_blocks is None
            and num_new_computed_tokens == num_external_computed_tokens == num_encoder_tokens == 0
            and not (delay_cache_blocks or full_sequence_must_fit)
            and self.coordinator.is_no_op(
                request, num_new_tokens, num_lookahead_tokens, reserved_blocks, has_scheduled_reqs
            )
        ):
            return self.empty_kv_cache_blocks
        hit, generation, junction = ((), 0, 0) if new_computed_blocks is None else self._own(new_computed_blocks)
        stored_events = None
        if self._logs_events and not delay_cache_blocks:
            added = (num_new_computed_tokens, num_external_computed_tokens, num_new_tokens)
            stored_events = self._read_for_events(request, self.coordinator.tokens_to_commit(request, *added))
        done = self.coordinator.allocate(
            request,
            hit,
            generation,
            junction,
            num_new_tokens,
            num_new_computed_tokens,
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
            has_scheduled_reqs,
        )
        if done is None:
            return None
        appended, stored, admission = done
        if stored_events is not None:
            self._log_stored(stored_events, stored)
        if admission is not None and self.prefix_cache_stats is not None:
            num_tokens, was_preempted = admission
            self.prefix_cache_stats.record(num_tokens, num_new_computed_tokens, was_preempted)
        return self.empty_kv_cache_blocks if appended is None else self.blocks_class(self.block_pool, appended)

    def allocate_decode_slots(
        self,
        requests: Sequence[RequestLike],
        num_new_tokens: Sequence[int] | None = None,
        num_lookahead_tokens: int = 0,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> DecodeSlots:
        """``allocate_slots`` for a whole batch of running requests, one after the other, in one call.

        ``num_new_tokens``: how many each of them computes (None: one). It stops at the first request that
        cannot be served: the answer's ``refused`` is its index, and those behind it have not been looked
        at. Free somebody and go on with ``requests[refused:]``. After an exception, the requests before the
        one that it names have their slots. O(requests), near to nothing for those that are quiet.
        """
        slots, index = DecodeSlots(), 0
        options = (num_lookahead_tokens, reserved_blocks, has_scheduled_reqs)
        while True:
            index = self.coordinator.allocate_all(requests, num_new_tokens, *options, index, slots)
            if index == len(requests) or slots.refused is not None:
                return slots
            # Events or statistics will tell of this one: what they tell is read first.
            blocks = self.allocate_slots(
                requests[index],
                1 if num_new_tokens is None else num_new_tokens[index],
                num_lookahead_tokens=num_lookahead_tokens,
                reserved_blocks=reserved_blocks,
                has_scheduled_reqs=has_scheduled_reqs,
            )
            if blocks is None:
                slots.refused = index
                return slots
            slots.add(index, blocks._lists)
            index += 1

    def limit_prefill_step(
        self, request: RequestLike, num_computed_tokens: int, num_new_tokens: int, junction: int = 0
    ) -> int:
        """How many of ``num_new_tokens`` a prefill step should compute so that states are left where they can be hit.

        For caches with a Mamba ``align`` group, a step ends at the junction, at the last aligned boundary
        that the same prompt could hit, else at an aligned boundary; never before its first token. O(1).
        """
        if not (self._has_step_states and self.enable_caching):
            return num_new_tokens
        if num_computed_tokens >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return num_new_tokens
        unit = self.kv_cache_config.alignment
        end = num_computed_tokens + num_new_tokens
        last = max(0, request.num_tokens - 1 - self._draft_lookahead) // unit * unit
        stops = [stop for stop in (junction, last) if num_computed_tokens < stop < end]
        if stops:
            return min(stops) - num_computed_tokens
        if end < last and end // unit * unit > num_computed_tokens:
            end = end // unit * unit
        return end - num_computed_tokens

    # -- while it runs -------------------------------------------------------------------------

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Enter the request's blocks up to ``num_computed_tokens`` into the index: a load has arrived.

        Raises ``UnknownRequestError``. O(1) while the request is quiet, else O(newly full blocks).
        """
        stored_events = None
        if self._logs_events:
            tokens = self.coordinator.tokens_to_cache(request, num_computed_tokens)
            stored_events = self._read_for_events(request, tokens)
        stored = self.coordinator.cache_blocks(request, num_computed_tokens)
        if stored_events is not None:
            self._log_stored(stored_events, stored)

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back what no token after ``total_computed_tokens`` reads; unknown request: no-op. O(newly dead)."""
        self.coordinator.release(request_id, total_computed_tokens, num_prompt_tokens)

    def new_step_starts(self) -> None:
        """A step begins: states that the last one computed can be hit from now on. O(states)."""
        self.block_pool.new_step_starts()

    def invalidate_blocks(self, block_ids: Iterable[int]) -> dict[str, int]:
        """A load into these blocks failed: nothing computed from them may be hit.

        They and every later block of each holder leave the index. Returns, for each holder, the first
        token to recompute: set its ``num_computed_tokens`` to that, or, if it is 0 because what it would
        go on from is gone, free it and start over. Blocks must still be held or popped: report a failed load before
        its request is freed; an engine that learns late admits with ``delay_cache_blocks``, and nothing at or behind
        such a load is committed until ``cache_blocks``. Raises ``BlockStateError``. O(blocks held).
        """
        return self.coordinator.invalidate(block_ids)

    # -- the end -------------------------------------------------------------------------------

    def free(self, request: RequestLike) -> None:
        """Give back all blocks of a request, tail first; one that holds nothing: no-op. O(blocks)."""
        self.coordinator.free(request)

    def pop_blocks_for_free(self, request: RequestLike) -> list[int]:
        """Forget a request and hand out its real blocks, in allocation order: something still reads them.

        They count as popped until ``block_pool.free_blocks(reversed(…))``. O(blocks).
        """
        return self.coordinator.pop(request)

    # -- the index -----------------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the index; who holds them keeps them. Raises ``UnknownBlockError``. O(ids)."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self, lazy: bool = False) -> bool:
        """Empty the index: the weights have changed. O(pool).

        Only while nothing but reserved blocks is in use; else False, and nothing has changed. ``lazy``
        cannot fail: all hashes leave at once, and who holds blocks now commits nothing until freed.
        """
        pool = self.block_pool
        if lazy:
            self.coordinator.clear_index()
        elif not pool.reset_prefix_cache():
            in_use = pool.num_held + pool.num_popped
            logger.warning("the prefix cache was not reset: %d blocks are still held; free them first", in_use)
            return False
        pool.new_step_starts()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # -- looking -------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The part of the allocatable blocks that is in use, 0 to 1. O(1)."""
        return self.block_pool.usage

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """A request's whole tables, static sink blocks first; empty if it holds none. O(blocks)."""
        tables = self.coordinator.tables(request_id)
        if not tables:
            return self.empty_kv_cache_blocks
        if any(self._sink_blocks):
            tables = [BlockList(sink + t.ids()) for sink, t in zip(self._sink_blocks, tables, strict=True)]
        return self.blocks_class(self.block_pool, tables)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of ``get_blocks``, per group: what the rows of its block tables hold. O(blocks)."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """``get_block_ids``, cut behind ``num_computed_tokens`` where blocks hold tokens (not states). O(blocks)."""
        specs = self.kv_cache_config.specs
        return tuple(
            ids[: len(sink) + spec.num_positions(num_computed_tokens, 0)] if spec.holds_tokens else ids
            for spec, sink, ids in zip(specs, self._sink_blocks, self.get_block_ids(request_id), strict=True)
        )

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Leading blocks that all requests hold, per group; 0 but for full attention. O(answer)."""
        specs = self.kv_cache_config.specs
        shared = self.coordinator.num_shared_blocks(running_request_id) or [0] * len(specs)
        return [count if spec.shared_prefix else 0 for spec, count in zip(specs, shared, strict=True)]

    def take_new_block_ids(self) -> list[int]:
        """Blocks allocated since the last call to groups whose kernels read whole blocks: zero them."""
        return self.block_pool.take_new_block_ids()

    def take_events(self) -> list[KVCacheEvent]:
        """What changed in the index since the last call, in order."""
        events = self._events + self.block_pool.take_events()
        self._events = []
        return events

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Hits since the last call; None unless ``log_stats``."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[Block]]) -> KVCacheBlocks:
        """Wrap blocks of this manager, per group. O(blocks)."""
        lists = [BlockList(block.block_id for block in group) for group in blocks]
        return self.blocks_class(self.block_pool, lists) if any(map(len, lists)) else self.empty_kv_cache_blocks

    def live_requests(self) -> list[RequestLike]:
        """The requests that hold blocks. O(requests)."""
        return self.coordinator.live_requests()

    # -- inside --------------------------------------------------------------------------------

    def _own(self, blocks: KVCacheBlocks) -> tuple[Sequence[BlockList], int, int]:
        """A hit's blocks, which must be this manager's, and what was true when it was found."""
        if blocks._pool is not self.block_pool:
            raise InvalidRequestError(
                "the hit blocks are another manager's; pass what get_computed_blocks of this one gave"
            )
        return blocks._lists, blocks._generation, blocks.junction

    def _read_for_events(self, request: RequestLike, tokens: range) -> StoredEvents | None:
        """What events will tell of a call that may commit these tokens."""
        if not tokens:
            return None
        config = self.kv_cache_config
        return StoredEvents(request, self._event_source(request), tokens, config.specs, config.hash_size)

    def _log_stored(self, events: StoredEvents, stored: Iterable[tuple[int, range]]) -> None:
        """What the call evicted left the index before what it stored entered."""
        self._events += self.block_pool.take_events()
        self._events += [events.event(group, run) for group, run in stored]


def _warn_if_it_cannot_hit(config: CacheConfig, max_model_len: int) -> None:
    reasons = [
        f"group {index} is {spec.kind}" + ("" if isinstance(spec, CrossAttention) else " in mode 'none'")
        for index, spec in enumerate(config.specs)
        if not spec.can_hit
    ]
    if max_model_len <= config.alignment and config.groups:
        reasons.append(
            f"hits are multiples of {config.alignment} tokens and no sequence is longer than {max_model_len}"
        )
    if reasons:
        warnings.warn(f"prefix caching is on but can never hit: {'; '.join(reasons)}", stacklevel=3)
