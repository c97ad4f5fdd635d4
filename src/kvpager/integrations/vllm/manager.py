"""kvpager's manager behind the names that vLLM's scheduler uses: what holds for every version of vLLM.

All decisions are kvpager's. A version's own module says how its configuration, events and statistics translate.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ... import check as kvpager_check
from ...attention import Mamba
from ...blocks import KVCacheBlocks
from ...config import CacheConfig
from ...errors import ConfigError, InvalidRequestError
from ...events import KVCacheEvent
from ...manager import KVCacheManager
from ...pool import NULL_BLOCK, EvictionOrder
from ...request import EventSource, RequestLike
from ...stats import PrefixCacheStats, ResidencySampler
from .views import ConnectorBlockPool, Coordinator, HostBlocks

__all__ = ["SchedulerManager", "refuse_pool_walkers"]

logger = logging.getLogger("vllm.kvpager")


class _Manager(KVCacheManager):
    """kvpager's own, with blocks as vLLM knows them."""

    blocks_class = HostBlocks


class SchedulerManager:
    """What vLLM's scheduler builds in place of its own manager.

    ``max_num_batched_tokens`` is the most that one step of the scheduler computes for one request.
    ``num_sink_blocks`` are set aside: vLLM's kernels find static sinks at the pool's first blocks, not in tables.
    ``group_classes`` are the classes of vLLM that each group passes for.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        max_model_len: int,
        max_num_batched_tokens: int | None,
        enable_caching: bool,
        use_eagle: bool,
        log_stats: bool,
        enable_kv_cache_events: bool,
        watermark: float,
        eviction_order: EvictionOrder,
        residency: ResidencySampler | None,
        event_source: Callable[[Any], EventSource],
        num_sink_blocks: int,
        group_classes: Sequence[type],
    ) -> None:
        self.manager = _Manager(
            config,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            log_stats=log_stats,
            enable_kv_cache_events=enable_kv_cache_events,
            watermark=watermark,
            eviction_order=eviction_order,
            residency=residency,
            event_source=event_source,
            # vLLM has no way to refuse a request: one that says max_tokens=10**6 would block its queue for ever, though
            # it may well end after ten. So what counts is what a request has by now.
            trust_max_tokens=False,
        )
        aligned = [spec for spec in config.specs if isinstance(spec, Mamba) and spec.mode == "align"]
        # There are states to cache and no drafts, so each sampled token was the only one of its step.
        self._samples_end_steps = bool(aligned) and not any(spec.num_speculative_states for spec in aligned)
        self.manager.block_pool.reserve(num_sink_blocks)
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.num_kv_cache_groups = self.manager.num_kv_cache_groups
        self.watermark_blocks = self.manager.watermark_blocks
        self.empty_kv_cache_blocks = self.manager.empty_kv_cache_blocks
        self.block_pool = ConnectorBlockPool(self.manager)
        self.coordinator = Coordinator(self.manager, group_classes)
        self._logs_events = enable_kv_cache_events
        self._may_have_failed_loads = False
        self._must_restart: set[str] = set()
        self._told: set[str] = set()
        self._take_methods_over()
        logger.info(
            "kvpager manages %d blocks in %d groups, eviction order %s",
            config.num_blocks,
            len(config.groups),
            eviction_order,
        )
        if config.groups and not self.manager.coordinator.length_fits(max_model_len, max_model_len, 0, 0):
            logger.warning(
                "kvpager: %d blocks cannot hold a sequence of max_model_len %d tokens; one longer than fits will wait "
                "for ever, as with vLLM's own manager. Lower max_model_len or raise num_gpu_blocks_override",
                config.num_blocks,
                max_model_len,
            )

    def _take_methods_over(self) -> None:
        """kvpager's own methods where both mean the same: no call in between."""
        manager = self.manager
        self._allocate = manager.allocate_slots
        self.free = manager.free
        self.pop_blocks_for_free = manager.pop_blocks_for_free
        self.remove_skipped_blocks = manager.remove_skipped_blocks
        self.get_blocks = manager.get_blocks
        self.get_block_ids_for_computed_tokens = manager.get_block_ids_for_computed_tokens
        self.get_num_common_prefix_blocks = manager.get_num_common_prefix_blocks
        self.take_new_block_ids = manager.take_new_block_ids
        self.create_kv_cache_blocks = manager.create_kv_cache_blocks

    # -- what a version of vLLM brings ---------------------------------------------------------

    waiting_for_load: Any = None
    """The status of a request whose load is under way."""

    @abstractmethod
    def new_stats(self) -> Any:
        """An empty object of vLLM's statistics class."""

    @abstractmethod
    def as_host_event(self, event: KVCacheEvent) -> Any:
        """The same event in vLLM's class."""

    # -- admission -----------------------------------------------------------------------------

    def get_computed_blocks(self, request: Any) -> tuple[KVCacheBlocks, int]:
        """kvpager's answer; the scheduler reads the junction from the coordinator, as a distance behind the hit."""
        blocks, num_tokens = self.manager.get_computed_blocks(request)
        self.coordinator.num_uncached_common_prefix_tokens = max(0, blocks.junction - num_tokens)
        return blocks, num_tokens

    def allocate_slots(
        self,
        request: Any,
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
        """kvpager's answer; None where it raises, which would end the engine: that request starts over."""
        if self._must_restart and self._lacks_its_start(request):
            return None
        try:
            blocks = self._allocate(  # by position: by name it would cost twice as much
                request,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                num_lookahead_tokens,
                num_external_computed_tokens,
                delay_cache_blocks,
                num_encoder_tokens,
                full_sequence_must_fit,
                reserved_blocks,
                has_scheduled_reqs,
            )
        except InvalidRequestError as error:
            self._start_over(request, error)
            return None
        if blocks is None and not self.manager.coordinator.is_live(request):
            self._tell_if_it_never_fits(request, num_lookahead_tokens, num_encoder_tokens)
        return blocks

    def _lacks_its_start(self, request: Any) -> bool:
        """Whether it must start over: what it would go on from was lost with a load."""
        return request.request_id in self._must_restart and not self.manager.coordinator.can_continue(request)

    def _start_over(self, request: Any, error: InvalidRequestError) -> None:
        """A state that no correct step leaves. vLLM preempts those that run; those that wait are set back here."""
        self._tell_once(request, f"cannot go on, so it starts over ({error})")
        if request.status.name != "RUNNING":
            self.manager.free(request)
            request.num_computed_tokens = 0

    def _tell_if_it_never_fits(self, request: Any, num_lookahead_tokens: int, num_encoder_tokens: int) -> None:
        if not self.manager.fits_alone(request, num_lookahead_tokens, num_encoder_tokens):
            self._tell_once(
                request,
                f"has {request.num_tokens} tokens; computed from the first one in steps of up to "
                f"{self.manager.max_num_batched_tokens}, it needs more blocks than the whole cache has: it waits for "
                f"ever; abort it",
            )

    def _tell_once(self, request: Any, message: str) -> None:
        if request.request_id not in self._told:
            self._told.add(request.request_id)
            logger.error("kvpager: request %s %s", request.request_id, message)

    # -- while it runs -------------------------------------------------------------------------

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """A load has arrived, or as much of it as ``num_computed_tokens`` says; or sampled tokens have."""
        manager = self.manager
        if not manager.coordinator.is_live(request):
            return  # freed meanwhile
        is_load = request.status is self.waiting_for_load
        if is_load and not manager.coordinator.can_continue(request):
            # The load failed, and what the rest would read is gone: it starts over. vLLM looks for hits next.
            manager.free(request)
            request.num_computed_tokens = 0
            return
        if self._samples_end_steps and not is_load:
            # Sampled asynchronously: the step that gave the last token ended here, which nobody knew to be a token's
            # end when it was planned.
            manager.coordinator.step_ends(request, num_computed_tokens)
        try:
            manager.cache_blocks(request, num_computed_tokens)
        except InvalidRequestError as error:
            self._tell_once(request, f"is not cached up to token {num_computed_tokens} ({error})")

    def new_step_starts(self) -> None:
        """A step begins. If loads failed in the last one, what was computed from them leaves the index."""
        if self._may_have_failed_loads or self._must_restart:
            self._forget_failed_loads()
        self.manager.new_step_starts()

    # -- loads that failed ---------------------------------------------------------------------

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """A load into these blocks failed: they and all that any holder computed from them leave the index."""
        pool = self.manager.block_pool
        # What nobody holds any more is nobody's to invalidate: it was never committed, or its request is gone.
        self.manager.invalidate_blocks(block_id for block_id in block_ids if pool.ref_count(block_id) > 0)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """A request's block table. vLLM's scheduler asks for it only when loads have failed."""
        self._may_have_failed_loads = True
        return self.manager.get_block_ids(request_id)

    def _forget_failed_loads(self) -> None:
        """vLLM lowers the computed tokens of who held a failed block first, and tells the manager nothing.

        All that was computed from the block leaves the index; whoever shares it computes it again, too.
        """
        self._may_have_failed_loads = False
        live: dict[str, Any] = {request.request_id: request for request in self.manager.live_requests()}
        bad = {block_id for request in live.values() for block_id in self._first_uncomputed(request)}
        lowered = self.manager.invalidate_blocks(bad) if bad else {}
        for request_id, token in lowered.items():
            if not getattr(live[request_id], "num_output_placeholders", 0):
                live[request_id].num_computed_tokens = min(live[request_id].num_computed_tokens, token)
        self._must_restart = {
            request_id for request_id, request in live.items() if not self.manager.coordinator.can_continue(request)
        }

    def _first_uncomputed(self, request: RequestLike) -> list[int]:
        """The block where a request's computed tokens were cut, if committed ones lie behind the cut.

        One token may be missing without a failure: the last one of a full load is computed for its logits.
        """
        if request.status.name != "RUNNING":
            return []
        block_size = self.manager.kv_cache_config.specs[0].block_size
        if (
            self.manager.coordinator.num_committed_blocks(request.request_id)[0] * block_size
            <= request.num_computed_tokens + 1
        ):
            return []
        block_id = self.manager.get_block_ids(request.request_id)[0][request.num_computed_tokens // block_size]
        return [block_id] if block_id != NULL_BLOCK else []

    # -- what it tells -------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """The part of the blocks that is in use, 0 to 1."""
        return self.manager.block_pool.usage

    def reset_prefix_cache(self) -> bool:
        """Empty the index if nothing is held."""
        return self.manager.reset_prefix_cache()

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats | None:
        """What is counted and not told yet."""
        return self.manager.prefix_cache_stats

    def make_prefix_cache_stats(self) -> Any:
        """vLLM's own statistics class; an admission counts once."""
        stats = self.manager.prefix_cache_stats
        if stats is None:
            return None
        told = self.new_stats()
        if stats.requests or stats.preempted_requests or stats.reset:
            for name, value in vars(self.manager.make_prefix_cache_stats()).items():
                setattr(told, name, value)
        return told

    def take_events(self) -> list[Any]:
        """vLLM's own event classes, for its publisher."""
        if not self._logs_events:
            return []
        return [self.as_host_event(event) for event in self.manager.take_events()]

    def check(self) -> None:
        """All of kvpager's invariants. Raises ``InvariantError``. O(pool)."""
        kvpager_check.check_manager(self.manager)


def refuse_pool_walkers(scheduler: Any) -> None:
    """Say no at start to a connector that would walk the old pool's private lists later. Raises ``ConfigError``."""
    connectors = [getattr(scheduler, "connector", None)]
    while connectors:
        connector = connectors.pop()
        connectors += getattr(connector, "_connectors", [])
        if getattr(getattr(connector, "scheduler_manager", None), "_lazy_mode", False):
            raise ConfigError(
                f"{type(connector).__name__} with lazy_offload walks the free queue of vLLM's own block pool, which "
                f"kvpager does not have; turn lazy_offload off, or unset KVPAGER_VLLM"
            )
