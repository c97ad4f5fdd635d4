"""KVCacheManager: what a scheduler calls, in the order it calls it.

``get_computed_blocks`` and ``probe`` ask and change nothing; ``allocate_slots`` admits, grows and
commits; ``free`` ends it. A refused call changes nothing but dead blocks; an error changes nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

from ._native import DecodeSlots, Holding, Holdings, Stepper
from .attention import CrossAttention
from .blocks import Block, KVCacheBlocks
from .config import CacheConfig
from .coordinator import KVCacheCoordinator, Match
from .errors import ConfigError, DuplicateRequestError, InvalidRequestError, UnknownRequestError
from .events import BlockStored, KVCacheEvent
from .pool import BlockList, BlockPool, EvictionOrder
from .request import EventSource, RequestLike
from .single_type import TokenRanges
from .stats import PrefixCacheStats, ResidencySampler

__all__ = ["DecodeSlots", "Fit", "KVCacheManager", "Probe"]

logger = logging.getLogger("kvpager")


class Fit(Enum):
    """Whether an allocation would be made."""

    NOW = auto()
    NOT_NOW = auto()
    """Not enough blocks are free."""
    NEXT_STEP = auto()
    """The hit's state is only computed in this step."""
    NEVER = auto()
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


class _Conditions(NamedTuple):
    """What an allocation must leave free."""

    full_sequence_must_fit: bool
    num_lookahead_tokens: int
    num_blocks_to_keep: int
    num_blocks_to_free: int = 0


def _itself(request: Any) -> Any:
    return request


class KVCacheManager:
    """The KV-cache manager of one engine.

    ``max_num_batched_tokens`` (default: ``max_model_len``) is the most tokens that one step computes for a
    request. ``watermark`` (0 ≤ w < 1) is the fraction of blocks that newcomers must leave free while
    others run. ``residency`` follows sampled blocks. ``event_source`` gives what events tell of a request, for
    hosts whose requests do not say it themselves. Raises ``ConfigError``.
    """

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
    ) -> None:
        max_step = max_model_len if max_num_batched_tokens is None else max_num_batched_tokens
        _check_options(max_model_len, max_step, watermark)
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
        self.coordinator = KVCacheCoordinator(
            config,
            self.block_pool,
            max_num_batched_tokens=max_step,
            use_eagle=use_eagle,
            caching=enable_caching,
            event_source=event_source,
        )
        self.empty_kv_cache_blocks = KVCacheBlocks(self.block_pool, [BlockList() for _ in config.groups])
        self._longest: dict[tuple[int, int], int] = {}
        self._holdings = Holdings()
        self._stepper = Stepper(
            self.block_pool,
            self._holdings,
            [group.rule for group in self.coordinator.single_type_managers],
            [group.tables for group in self.coordinator.single_type_managers],
            max_model_len=max_model_len,
            commits=self.coordinator.can_hit,
            watermark_blocks=self.watermark_blocks,
            fits_alone=self.fits_alone,
            log_stored=self.coordinator.log_stored,
            wrap=partial(KVCacheBlocks, self.block_pool),
            empty=self.empty_kv_cache_blocks,
        )
        if enable_caching:
            _warn_if_it_cannot_hit(config, max_model_len)

    # -- admission -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of a request and its length in tokens. Read only. O(prefix blocks).

        At most ``num_tokens - 1``, since the last token has to be computed for its logits. Nothing is
        held yet: pass both to ``allocate_slots``.
        """
        match = self._match(request)
        if not match.num_tokens and not match.junction:
            return self.empty_kv_cache_blocks, 0
        return KVCacheBlocks(self.block_pool, match.hits, match.junction), match.num_tokens

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
        holding = self._holding(request)
        match = self._match(request) if holding is None else self.coordinator.no_match()
        computed = request.num_computed_tokens + match.num_tokens + num_external_computed_tokens
        if num_new_tokens is None:
            num_new_tokens = max(1, min(request.num_tokens - computed, self.max_num_batched_tokens))
        _check_counts(num_new_tokens, num_lookahead_tokens, num_external_computed_tokens, num_encoder_tokens)
        self._check_progress(request, holding)
        tokens = self._ranges(
            request,
            match.num_tokens,
            num_external_computed_tokens,
            num_new_tokens,
            num_lookahead_tokens,
            num_encoder_tokens,
        )
        releasable = 0
        if holding is not None:
            releasable = self.coordinator.releasable(request.request_id, _processed(request), request.num_prompt_tokens)
        conditions = _Conditions(
            full_sequence_must_fit=full_sequence_must_fit,
            num_lookahead_tokens=num_lookahead_tokens,
            num_blocks_to_keep=reserved_blocks + self._watermark(request, has_scheduled_reqs),
            num_blocks_to_free=releasable,
        )
        return self._judge(request, holding is None, match.hits, match.junction, tokens, conditions)

    def fits_alone(self, request: RequestLike, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0) -> bool:
        """Whether the cache could ever hold the request, grown to its ``max_tokens``. Read only. O(groups).

        Without ``max_tokens``: what it has by now. ``allocate_slots`` refuses a newcomer of which this is false, and
        `probe` says NEVER; a host that cannot refuse requests may override it.
        """
        max_tokens = getattr(request, "max_tokens", None)
        longest = request.num_tokens if max_tokens is None else request.num_prompt_tokens + max_tokens
        longest = max(longest, request.num_tokens)
        # A sequence that is all prompt needs the most: what fits then always fits.
        return longest <= self.longest_that_fits(num_lookahead_tokens, num_encoder_tokens) or self._length_fits(
            longest, request.num_prompt_tokens, num_lookahead_tokens, num_encoder_tokens
        )

    def longest_that_fits(self, num_lookahead_tokens: int = 0, num_encoder_tokens: int = 0) -> int:
        """The longest prompt that the cache can hold. O(1), but the first call bisects: need grows with length."""
        key = (num_lookahead_tokens, num_encoder_tokens)
        if key not in self._longest:
            fits, too_many = 0, self.max_model_len + 1
            while too_many - fits > 1:
                middle = (fits + too_many) // 2
                if self._length_fits(middle, middle, *key):
                    fits = middle
                else:
                    too_many = middle
            self._longest[key] = fits
        return self._longest[key]

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
        if not (num_external_computed_tokens or delay_cache_blocks or num_encoder_tokens):
            answer: KVCacheBlocks | None = NotImplemented
            if new_computed_blocks is None and not (num_new_computed_tokens or full_sequence_must_fit):
                answer = self._stepper.step(
                    request, num_new_tokens, num_lookahead_tokens, reserved_blocks, has_scheduled_reqs
                )
            if answer is NotImplemented:
                answer = self._stepper.admit(
                    request,
                    num_new_tokens,
                    num_new_computed_tokens,
                    new_computed_blocks,
                    full_sequence_must_fit,
                    num_lookahead_tokens,
                    reserved_blocks,
                    has_scheduled_reqs,
                )
                if answer is not NotImplemented and answer is not None:
                    self._record_admission(request, num_new_computed_tokens)
            if answer is not NotImplemented:
                return answer
        holding = self._holding(request)
        _check_counts(num_new_tokens, num_lookahead_tokens, num_external_computed_tokens, num_encoder_tokens)
        self._check_progress(request, holding)
        hits = self._checked_hits(request, holding, new_computed_blocks, num_new_computed_tokens)
        tokens = self._ranges(
            request,
            num_new_computed_tokens,
            num_external_computed_tokens,
            num_new_tokens,
            num_lookahead_tokens,
            num_encoder_tokens,
        )
        if holding is not None:
            self._release(holding, _processed(request), request.num_prompt_tokens)
        conditions = _Conditions(
            full_sequence_must_fit=full_sequence_must_fit,
            num_lookahead_tokens=num_lookahead_tokens,
            num_blocks_to_keep=reserved_blocks + self._watermark(request, has_scheduled_reqs),
        )
        if self._judge(request, holding is None, hits, 0, tokens, conditions).fit is not Fit.NOW:
            return None
        appended = self.coordinator.apply(request.request_id, hits if holding is None else None, tokens)
        if holding is None:
            holding = self._admitted(request, num_new_computed_tokens, new_computed_blocks)
        self._commit_step(holding, tokens, num_new_tokens, delay_cache_blocks)
        return KVCacheBlocks(self.block_pool, appended) if any(map(len, appended)) else self.empty_kv_cache_blocks

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
        if num_new_tokens is not None and len(num_new_tokens) != len(requests):
            raise InvalidRequestError(
                f"{len(num_new_tokens)} numbers of new tokens were given for {len(requests)} requests; give one each"
            )
        slots, index = DecodeSlots(), 0
        while True:
            options = (num_lookahead_tokens, reserved_blocks, has_scheduled_reqs)
            index = self._stepper.step_all(requests, num_new_tokens, *options, index, slots)
            if index == len(requests) or slots.refused is not None:
                return slots
            # Something about this one is out of the ordinary.
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
        if not (self.coordinator.has_align_group and self.enable_caching):
            return num_new_tokens
        if num_computed_tokens >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return num_new_tokens
        unit = self.coordinator.alignment
        end = num_computed_tokens + num_new_tokens
        last = max(0, request.num_tokens - 1 - self.coordinator.hit_margin) // unit * unit
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
        holding = self._known(request.request_id)
        if num_computed_tokens <= holding.quiet_until:
            return
        if holding.commit_limit is not None:
            done = num_computed_tokens >= holding.load_end
            holding.commit_limit = None if done else max(holding.commit_limit, num_computed_tokens)
        self._commit(holding, min(num_computed_tokens, request.num_tokens))
        self._find_bounds(holding)

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back what no token after ``total_computed_tokens`` reads; unknown request: no-op. O(newly dead)."""
        holding = self._holdings.get(request_id)
        if holding is not None:
            prompt = holding.request.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
            self._release(holding, total_computed_tokens, prompt)

    def new_step_starts(self) -> None:
        """A step begins: states that the last one computed can be hit from now on. O(groups)."""
        self.coordinator.new_step_starts()

    def invalidate_blocks(self, block_ids: Iterable[int]) -> dict[str, int]:
        """A load into these blocks failed: nothing computed from them may be hit.

        They and every later block of each holder leave the index. Returns, for each holder, the first
        token to recompute: set its ``num_computed_tokens`` to that, or, if it is 0 because what it would
        go on from is gone, free it and start over. O(blocks held).
        """
        bad = set()
        for block_id in block_ids:
            self.block_pool.ref_count(block_id)  # refuses ids that are not in the pool
            bad.add(block_id)
        firsts: dict[str, int] = {}
        while (found := self.coordinator.holders_of(bad)) != firsts:
            # Later blocks of a holder are garbage too, and so is what others built on those.
            firsts = found
            for request_id, token in firsts.items():
                bad |= self.coordinator.blocks_from(request_id, token)
        self.block_pool.evict_blocks(sorted(bad))
        return {request_id: self._recompute_from(request_id, token) for request_id, token in firsts.items()}

    # -- the end -------------------------------------------------------------------------------

    def free(self, request: RequestLike) -> None:
        """Give back all blocks of a request, tail first; one that holds nothing: no-op. O(blocks)."""
        self._stepper.free(request)

    def pop_blocks_for_free(self, request: RequestLike) -> list[int]:
        """Forget a request and hand out its real blocks, in allocation order: something still reads them.

        They count as popped until ``block_pool.free_blocks(reversed(…))``. O(blocks).
        """
        return self.coordinator.pop(request.request_id) if self._forget(request) is not None else []

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
            pool.clear_index()
            for holding in self._holdings.values():
                holding.is_stale = True
                self._find_bounds(holding)
        elif not pool.reset_prefix_cache():
            in_use = pool.num_held + pool.num_popped
            logger.warning("the prefix cache was not reset: %d blocks are still held; free them first", in_use)
            return False
        self.coordinator.new_step_starts()
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
        return KVCacheBlocks(self.block_pool, self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of ``get_blocks``, per group: what the rows of its block tables hold. O(blocks)."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """``get_block_ids``, cut behind ``num_computed_tokens`` where blocks hold tokens (not states). O(blocks)."""
        groups = self.coordinator.single_type_managers
        return tuple(
            ids[: len(group.sink_blocks) + group.spec.num_positions(num_computed_tokens, 0)]
            if group.spec.holds_tokens
            else ids
            for group, ids in zip(groups, self.get_block_ids(request_id), strict=True)
        )

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Leading blocks that all requests hold, per group; 0 but for full attention. O(answer)."""
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def take_new_block_ids(self) -> list[int]:
        """Blocks allocated since the last call to groups whose kernels read whole blocks: zero them."""
        return self.block_pool.take_new_block_ids()

    def take_events(self) -> list[KVCacheEvent]:
        """What changed in the index since the last call, in order."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = self.kv_cache_config.specs[event.group_idx]
                event.kv_cache_spec_kind = spec.kind
                event.kv_cache_spec_sliding_window = spec.sliding_window
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
        return KVCacheBlocks(self.block_pool, lists) if any(map(len, lists)) else self.empty_kv_cache_blocks

    def live_requests(self) -> list[RequestLike]:
        """The requests that hold blocks. O(requests)."""
        return [holding.request for holding in self._holdings.values()]

    # -- inside --------------------------------------------------------------------------------

    def _match(self, request: RequestLike) -> Match:
        if request.skip_reading_prefix_cache:
            return self.coordinator.no_match()
        max_tokens = self.coordinator.num_shareable(request.num_tokens - 1, request.num_prompt_tokens)
        return self.coordinator.match(request.block_hashes, max_tokens)

    def _holding(self, request: RequestLike) -> Holding | None:
        holding = self._holdings.get(request.request_id)
        if holding is not None and holding.request is not request:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in use by another live request; free that one first or choose "
                f"another id"
            )
        return holding

    def _known(self, request_id: str) -> Holding:
        holding = self._holdings.get(request_id)
        if holding is None:
            raise UnknownRequestError(
                f"request {request_id!r} holds no blocks; allocate_slots must have admitted it first"
            )
        return holding

    def _check_progress(self, request: RequestLike, holding: Holding | None) -> None:
        computed = request.num_computed_tokens
        most = 0 if holding is None else self.coordinator.num_slots(request.request_id)
        lowest = 0 if holding is None else holding.lowest
        if not lowest <= computed <= most:
            raise InvalidRequestError(
                f"request {request.request_id!r} has num_computed_tokens {computed}, but its blocks allow {lowest} to "
                f"{most}; a request that was freed starts over at 0"
            )

    def _checked_hits(
        self, request: RequestLike, holding: Holding | None, blocks: KVCacheBlocks | None, num_tokens: int
    ) -> tuple[BlockList, ...]:
        """The blocks of a hit, which must be this manager's, still cached, and cover exactly the hit."""
        if blocks is None or blocks is self.empty_kv_cache_blocks or not any(map(len, blocks._lists)):
            if num_tokens:
                raise InvalidRequestError(
                    f"request {request.request_id!r}: {num_tokens} hit tokens came without blocks; pass both answers "
                    f"of get_computed_blocks"
                )
            return self.empty_kv_cache_blocks._lists
        if blocks._pool is not self.block_pool:
            raise InvalidRequestError(f"request {request.request_id!r}: the hit blocks are another manager's")
        if holding is not None:
            raise InvalidRequestError(
                f"request {request.request_id!r} holds blocks already; a hit can only be taken at admission"
            )
        self.coordinator.check_covers(blocks._lists, num_tokens)
        if blocks._generation != self.block_pool.generation and not self.coordinator.serves(
            blocks._lists, request.block_hashes
        ):
            raise InvalidRequestError(
                f"request {request.request_id!r}: its hit was evicted since get_computed_blocks; ask again"
            )
        return blocks._lists

    def _ranges(
        self, request: RequestLike, num_hits: int, num_external: int, num_new: int, num_lookahead: int, num_encoder: int
    ) -> TokenRanges:
        local = request.num_computed_tokens + num_hits
        computed = min(local + num_external, self.max_model_len)
        main = min(computed + num_new, self.max_model_len)
        return TokenRanges(
            num_local=local,
            num_computed=computed,
            num_start=min(computed, request.num_tokens - 1),
            num_main=main,
            num_slots=min(main + num_lookahead, self.max_model_len),
            num_prompt_tokens=request.num_prompt_tokens,
            num_encoder_tokens=num_encoder,
            num_processed=_processed(request),
        )

    def _watermark(self, request: RequestLike, has_scheduled_reqs: bool) -> int:
        newcomer = request.status.name in ("WAITING", "PREEMPTED")
        return self.watermark_blocks if has_scheduled_reqs and newcomer else 0

    def _judge(
        self,
        request: RequestLike,
        is_new: bool,
        hits: Sequence[BlockList],
        junction: int,
        tokens: TokenRanges,
        conditions: _Conditions,
    ) -> Probe:
        """Whether the allocation fits. Read only: `probe` and ``allocate_slots`` both ask here."""
        coordinator, request_id = self.coordinator, request.request_id
        hit = tokens.num_local - request.num_computed_tokens
        if is_new and not self.fits_alone(request, conditions.num_lookahead_tokens, tokens.num_encoder_tokens):
            fitting = self.longest_that_fits(conditions.num_lookahead_tokens, tokens.num_encoder_tokens)
            return Probe(fit=Fit.NEVER, num_hit_tokens=hit, junction=junction, num_tokens_that_fit=fitting)
        if not coordinator.are_computed(hits):
            return Probe(fit=Fit.NEXT_STEP, num_hit_tokens=hit, junction=junction)
        available = self.block_pool.num_free + conditions.num_blocks_to_free - conditions.num_blocks_to_keep
        needs = coordinator.plan(request_id, hits, tokens)
        if conditions.full_sequence_must_fit:
            lookahead = conditions.num_lookahead_tokens
            main = min(max(request.num_tokens, tokens.num_main), self.max_model_len)
            whole = tokens._replace(num_main=main, num_slots=min(main + lookahead, self.max_model_len))
            if whole != tokens or coordinator.has_align_group:
                needs = max(needs, coordinator.plan_sequence(request_id, hits, whole, lookahead), key=sum)
        short = max(0, sum(needs) - available)
        return Probe(
            fit=Fit.NOT_NOW if short else Fit.NOW,
            num_hit_tokens=hit,
            junction=junction,
            num_blocks_needed=sum(needs),
            num_blocks_short=short,
            limiting_group=max(range(len(needs)), key=needs.__getitem__) if short else None,
        )

    def _length_fits(self, num_tokens: int, num_prompt_tokens: int, num_lookahead: int, num_encoder: int) -> bool:
        main = min(num_tokens, self.max_model_len)
        tokens = TokenRanges(
            num_local=0,
            num_computed=0,
            num_start=0,
            num_main=main,
            num_slots=min(main + num_lookahead, self.max_model_len),
            num_prompt_tokens=num_prompt_tokens,
            num_encoder_tokens=num_encoder,
        )
        capacity = self.block_pool.num_blocks - 1 - self.block_pool.num_reserved
        return self.coordinator.plan_alone(tokens, num_lookahead) <= capacity

    def _admitted(self, request: RequestLike, num_hits: int, blocks: KVCacheBlocks | None) -> Holding:
        holding = Holding(request, self.coordinator.tables(request.request_id))
        self._holdings.add(request.request_id, holding)
        holding.junction = blocks.junction if blocks is not None else 0
        self._record_admission(request, num_hits)
        return holding

    def _record_admission(self, request: RequestLike, num_hits: int) -> None:
        if self.prefix_cache_stats is not None and self.enable_caching and not request.skip_reading_prefix_cache:
            self.prefix_cache_stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)

    def _commit_step(self, holding: Holding, tokens: TokenRanges, num_new_tokens: int, delay: bool) -> None:
        request = holding.request
        limit = holding.commit_limit
        if not delay and limit is not None and request.num_computed_tokens <= limit:
            # What a load did not bring is computed here after all, states included.
            self.coordinator.uncommit(request.request_id, request.num_computed_tokens)
            holding.commit_limit = None
        if self._commits(holding):
            if tokens.num_computed > tokens.num_local:
                self.coordinator.step_ends(request.request_id, tokens.num_computed)
            if num_new_tokens and tokens.num_main <= request.num_tokens:
                self.coordinator.step_ends(request.request_id, tokens.num_main)
        if delay:
            holding.commit_limit = tokens.num_local if limit is None else min(limit, tokens.num_local)
            holding.load_end = tokens.num_computed
        else:
            self._commit(holding, min(tokens.num_main, request.num_tokens))
        self._find_bounds(holding)

    def _commit(self, holding: Holding, num_tokens: int) -> None:
        if not self._commits(holding):
            return
        if holding.commit_limit is not None:
            num_tokens = min(num_tokens, holding.commit_limit)
        self.coordinator.commit(holding.request, num_tokens, holding.junction)

    def _commits(self, holding: Holding) -> bool:
        return self.coordinator.can_hit and not holding.is_stale

    def _release(self, holding: Holding, num_processed: int, num_prompt_tokens: int) -> None:
        self.coordinator.release(holding.request.request_id, num_processed, num_prompt_tokens, holding.junction)
        self._find_bounds(holding)

    def _find_bounds(self, holding: Holding) -> None:
        """Up to which token count nothing changes for this request, and from which it may go on."""
        self._stepper.find_bounds(holding, holding.request.num_prompt_tokens)

    def _recompute_from(self, request_id: str, token: int) -> int:
        holding = self._known(request_id)
        can_resume = self.coordinator.can_resume(request_id, token, holding.request.num_prompt_tokens)
        self.coordinator.uncommit(request_id, token)
        holding.commit_limit = None
        self._find_bounds(holding)
        return token if can_resume else 0

    def _forget(self, request: RequestLike) -> Holding | None:
        holding = self._holdings.get(request.request_id)
        if holding is None or holding.request is not request:
            return None
        self._holdings.remove(request.request_id)
        return holding


def _processed(request: RequestLike) -> int:
    """Computed tokens whose step's result is known: a step in flight still reads what they read."""
    return max(0, request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0))


def _check_counts(num_new: int, num_lookahead: int, num_external: int, num_encoder: int) -> None:
    names = ("num_new_tokens", "num_lookahead_tokens", "num_external_computed_tokens", "num_encoder_tokens")
    for name, value in zip(names, (num_new, num_lookahead, num_external, num_encoder), strict=True):
        if not isinstance(value, int) or value < 0:
            raise InvalidRequestError(f"{name} must be an integer of at least 0, got {value!r}")
    if not num_new and not num_external:
        raise InvalidRequestError(
            "num_new_tokens is 0 and there are no external tokens: nothing to allocate; call it with at least one"
        )


def _check_options(max_model_len: int, max_num_batched_tokens: int, watermark: float) -> None:
    for name, value in (("max_model_len", max_model_len), ("max_num_batched_tokens", max_num_batched_tokens)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
    if not 0 <= watermark < 1:
        raise ConfigError(f"watermark must be at least 0 and below 1, got {watermark!r}")


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
