"""vLLM 0.25.1: its configuration, requests, events, statistics and hashes, as kvpager's and back."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, get_args

from vllm import envs
from vllm.distributed import kv_events as vllm_events
from vllm.utils.hashing import sha256_cbor
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core import single_type_kv_cache_manager as vllm_kinds
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.engine import core as vllm_core
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from ...attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SlidingWindow,
)
from ...config import CacheConfig, GroupSpec
from ...errors import ConfigError
from ...events import AllBlocksCleared, BlockStored, KVCacheEvent
from ...extra_keys import ExtraKey, ExtraKind
from ...hashing import hash_blocks
from ...pool import EvictionOrder
from ...stats import ResidencySampler
from .manager import SchedulerManager, refuse_pool_walkers

__all__ = ["KVCacheManager", "install"]

logger = logging.getLogger("vllm.kvpager")


def install() -> None:
    """Make vLLM's scheduler build kvpager's manager from now on. Idempotent."""
    vllm_scheduler.KVCacheManager = KVCacheManager
    # Tokens computed by steps whose result is not known yet, drafts that may be rejected among them. Decoding only:
    # vLLM does not tell which chunks of a prefill are in flight.
    Request.num_in_flight_tokens = property(lambda request: request.num_output_placeholders)
    if not hasattr(vllm_scheduler.Scheduler, "_kvpager_update_request_as_session"):
        vllm_scheduler.Scheduler._kvpager_update_request_as_session = (
            vllm_scheduler.Scheduler._update_request_as_session
        )
        vllm_scheduler.Scheduler._update_request_as_session = _update_request_as_session
    if os.environ.get("KVPAGER_VLLM_HASH") == "1":
        vllm_core.get_request_block_hasher = get_request_block_hasher


class KVCacheManager(SchedulerManager):
    """kvpager's manager with the constructor, the event classes and the statistics of vLLM 0.25.1."""

    waiting_for_load = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: Any = None,
        watermark: float = 0.0,
    ) -> None:
        scheduler = _scheduler_being_built()
        refuse_pool_walkers(scheduler)
        config = cache_config(kv_cache_config, hash_block_size, dcp_world_size, pcp_world_size, enable_caching)
        if enable_caching and len(config.groups) > 1 and scheduler_block_size != config.alignment:
            raise ConfigError(
                f"vLLM aligns hits to {scheduler_block_size} tokens, its groups' block sizes to {config.alignment}; "
                f"kvpager needs them equal: leave vLLM's block size options at their defaults"
            )
        specs = [_one_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        super().__init__(
            config,
            max_model_len=max_model_len,
            max_num_batched_tokens=_largest_step(scheduler, max_num_batched_tokens),
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            log_stats=log_stats,
            enable_kv_cache_events=enable_kv_cache_events,
            watermark=watermark,
            eviction_order=_eviction_order(),
            residency=Residency(metrics_collector, enable_caching) if metrics_collector is not None else None,
            event_source=EventSource,
            num_sink_blocks=sum(_num_sink_blocks(spec) for spec in specs),
            group_classes=[KVCacheSpecRegistry.get_manager_class(spec) for spec in specs],
        )
        self.kv_cache_config = kv_cache_config
        self.metrics_collector = metrics_collector
        self._event_kinds = [
            (
                vllm_specs.get_kv_cache_spec_kind(group.kv_cache_spec).value,
                vllm_specs.get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in kv_cache_config.kv_cache_groups
        ]

    def new_stats(self) -> PrefixCacheStats:
        """vLLM's own class."""
        return PrefixCacheStats()

    def as_host_event(self, event: KVCacheEvent) -> Any:
        """The same event in vLLM's class, with vLLM's name for the group's kind."""
        return as_vllm_event(event, self._event_kinds)


def _scheduler_being_built() -> Any:
    """Who builds this manager: vLLM hands it no connector, but the scheduler that is being built has one already."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, vllm_scheduler.Scheduler):
            return caller
        frame = frame.f_back
    return None


def _largest_step(scheduler: Any, max_num_batched_tokens: int | None) -> int | None:
    """The most tokens that a step of the scheduler computes for one request; a manager built alone is told it."""
    if scheduler is None:
        return max_num_batched_tokens
    long_prefill: int = scheduler.scheduler_config.long_prefill_token_threshold
    most: int = scheduler.max_num_scheduled_tokens
    return min(most, long_prefill) if long_prefill > 0 else most


def _eviction_order() -> EvictionOrder:
    order: Any = os.environ.get("KVPAGER_VLLM_EVICTION", "dead_first")
    if order not in get_args(EvictionOrder):
        raise ConfigError(
            f"KVPAGER_VLLM_EVICTION is {order!r}; set it to {' or '.join(get_args(EvictionOrder))}, or unset it"
        )
    return order  # type: ignore[no-any-return]


def _update_request_as_session(scheduler: Any, session: Any, update: Any) -> None:
    """vLLM's own, but hashes of blocks that are not computed yet are made again.

    A session's next input takes the place of its last sampled token; if that one had filled a block, vLLM would keep
    the block's hash and cache other content under it.
    """
    if isinstance(scheduler.kv_cache_manager, SchedulerManager):
        hash_size = scheduler.kv_cache_manager.manager.kv_cache_config.hash_size
        del session.block_hashes[session.num_computed_tokens // hash_size :]
    scheduler._kvpager_update_request_as_session(session, update)


# -- types ------------------------------------------------------------------------------------------------------------


def cache_config(config: Any, hash_block_size: int, dcp: int, pcp: int, enable_caching: bool) -> CacheConfig:
    """vLLM's cache configuration as kvpager's. Raises ``ConfigError`` for a kind of layer it does not know."""
    groups = [
        GroupSpec(
            layer_names=tuple(group.layer_names),
            spec=attention_spec(group.kv_cache_spec),
            is_eagle=group.is_eagle_group,
        )
        for group in config.kv_cache_groups
    ]
    sparse = any(group.spec.sparse_retention for group in groups)
    retention = envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL
    if retention is not None and not sparse:
        raise ConfigError(
            "VLLM_PREFIX_CACHE_RETENTION_INTERVAL is set, but no sliding-window or Mamba group heeds it; unset it"
        )
    return CacheConfig(
        num_blocks=config.num_blocks,
        groups=tuple(groups),
        hash_block_size=hash_block_size if enable_caching else None,
        dcp_world_size=dcp,
        pcp_world_size=pcp,
        retention_interval=retention,
    )


def attention_spec(spec: Any) -> AttentionSpec:
    """The kvpager kind of one of vLLM's specs. Raises ``ConfigError`` for one that has a manager of somebody's own."""
    spec = _one_spec(spec)
    if KVCacheSpecRegistry.get_manager_class(spec) not in _KNOWN_MANAGERS:
        raise ConfigError(
            f"kvpager does not know vLLM's {type(spec).__name__}; unset KVPAGER_VLLM to go on with vLLM's own manager"
        )
    size = {"block_size": spec.block_size}
    if isinstance(spec, vllm_specs.RSWASpec):
        return ReferenceWindow(**size, window=spec.rswa_window)
    if isinstance(spec, vllm_specs.MLAAttentionSpec):
        return MLAAttention(**size)
    if isinstance(spec, vllm_specs.FullAttentionSpec):
        return FullAttention(**size)
    if isinstance(spec, vllm_specs.SlidingWindowSpec):
        return SlidingWindow(**size, window=spec.sliding_window)
    if isinstance(spec, vllm_specs.ChunkedLocalAttentionSpec):
        return ChunkedLocalAttention(**size, chunk_size=spec.attention_chunk_size)
    if isinstance(spec, vllm_specs.MambaSpec):
        mode: Any = spec.mamba_cache_mode
        return Mamba(**size, mode=mode, num_speculative_states=spec.num_speculative_blocks)
    return CrossAttention(**size)


_KNOWN_MANAGERS = frozenset(
    {
        vllm_kinds.FullAttentionManager,
        vllm_kinds.SlidingWindowManager,
        vllm_kinds.ChunkedLocalAttentionManager,
        vllm_kinds.MambaManager,
        vllm_kinds.CrossAttentionManager,
        vllm_kinds.RSWAManager,
        vllm_kinds.SinkFullAttentionManager,
    }
)


def _one_spec(spec: Any) -> Any:
    """Layers of one group may differ in what is stored, never in which tokens they read."""
    if isinstance(spec, vllm_specs.UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _num_sink_blocks(spec: Any) -> int:
    return spec.sink_len // spec.block_size if isinstance(spec, vllm_specs.SinkFullAttentionSpec) else 0


class EventSource:
    """What events tell of a vLLM request beside tokens and hashes."""

    def __init__(self, request: Any) -> None:
        self._request = request
        lora = request.lora_request
        self.lora_id: int | None = lora.adapter_id if lora else None
        self.lora_name: str | None = lora.name if lora else None

    def extra_keys(self, block_start: int, block_end: int) -> tuple[object, ...] | None:
        """What else than tokens went into a block's hash, as vLLM lists it."""
        keys: tuple[object, ...] | None = kv_cache_utils.generate_block_hash_extra_keys(
            self._request, block_start, block_end, 0
        )[0]
        return keys


def as_vllm_event(event: KVCacheEvent, kinds: Sequence[tuple[str, int | None]]) -> Any:
    """The same event in vLLM's class, hashes converted as its configuration says.

    ``kinds`` are vLLM's names of the groups' kinds, each with its window.
    """
    if isinstance(event, AllBlocksCleared):
        return vllm_events.AllBlocksCleared()
    hashes = [kv_cache_utils.maybe_convert_block_hash(block_hash) for block_hash in event.block_hashes]
    if not isinstance(event, BlockStored):
        return vllm_events.BlockRemoved(block_hashes=hashes, medium=event.medium, group_idx=event.group_idx)
    parent = event.parent_block_hash
    kind, window = kinds[event.group_idx or 0]
    return vllm_events.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else kv_cache_utils.maybe_convert_block_hash(parent),
        token_ids=event.token_ids,
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        lora_name=event.lora_name,
        extra_keys=event.extra_keys,
        group_idx=event.group_idx,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
    )


class Residency(ResidencySampler):
    """vLLM's own collector of block residency, told what kvpager's blocks do."""

    def __init__(self, collector: Any, enable_caching: bool) -> None:
        self._collector = collector
        self._enable_caching = enable_caching

    def allocated(self, block_id: int) -> None:
        """A block got new content. For vLLM that ends its last stay, cached or not, if caching is on."""
        if self._enable_caching:
            self._collector.on_block_evicted(_Id(block_id))
        self._collector.on_block_allocated(_Id(block_id))

    def used(self, block_id: int) -> None:
        """A cached block served a hit."""
        self._collector.on_block_accessed(_Id(block_id))

    def evicted(self, block_id: int) -> None:
        """A cached block left the index."""
        self._collector.on_block_evicted(_Id(block_id))

    def reset(self) -> None:
        """Forget all blocks."""
        self._collector.reset()


class _Id:
    def __init__(self, block_id: int) -> None:
        self.block_id = block_id


# -- hashing ----------------------------------------------------------------------------------------------------------


def get_request_block_hasher(hash_block_size: int, caching_hash_fn: Any) -> Callable[[Any], list[bytes]]:
    """vLLM's factory of block hashers; with its ``sha256_cbor``, kvpager's compiled chain makes equal hashes."""
    if caching_hash_fn is not sha256_cbor:
        logger.warning(
            "KVPAGER_VLLM_HASH=1 works with --prefix-caching-hash-algo sha256_cbor only; vLLM's hashing stays"
        )
        return kv_cache_utils.get_request_block_hasher(hash_block_size, caching_hash_fn)  # type: ignore[no-any-return]

    def new_hashes(request: Any) -> list[bytes]:
        done = len(request.block_hashes)
        full = request.num_tokens // hash_block_size
        if full <= done:
            return []
        extra_keys = None
        if kv_cache_utils.need_extra_keys(request) or request.prompt_embeds is not None:
            extra_keys = [_extra_keys(request, block * hash_block_size, hash_block_size) for block in range(done, full)]
        hashes = hash_blocks(
            request.all_token_ids[done * hash_block_size : full * hash_block_size],
            block_size=hash_block_size,
            parent=request.block_hashes[-1] if done else kv_cache_utils.NONE_HASH,
            extra_keys=extra_keys,
            algorithm="sha256_cbor",
        )
        return list(hashes)

    return new_hashes


def _extra_keys(request: Any, start: int, size: int) -> tuple[ExtraKey, ...] | None:
    keys = EventSource(request).extra_keys(start, start + size)
    # Untagged, as vLLM has them: only the plain form goes into the hash.
    return tuple(ExtraKey(ExtraKind.CACHE_SALT, b"", key) for key in keys) if keys else None  # type: ignore[arg-type]
