"""vLLM 0.25.1: its scheduler's view of a kvpager manager.

``KVCacheManager`` here has the constructor and the attributes that vLLM's scheduler and connectors use, and
speaks vLLM's types (configuration, events, statistics); all decisions are kvpager's.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm import envs
from vllm.distributed import kv_events as vllm_events
from vllm.utils.hashing import sha256_cbor
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.engine import core as vllm_core
from vllm.v1.metrics.stats import PrefixCacheStats

from ... import check as kvpager_check
from ... import manager as kvpager_manager
from ...attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)
from ...blocks import Block, GroupBlocks, KVCacheBlocks
from ...config import CacheConfig, GroupSpec
from ...errors import ConfigError
from ...events import AllBlocksCleared, BlockStored, KVCacheEvent
from ...extra_keys import ExtraKey, ExtraKind
from ...hashing import hash_blocks
from ...pool import BlockList
from ...single_type import SingleTypeKVCacheManager, TokenRanges
from ...stats import ResidencySampler

__all__ = ["KVCacheManager", "install"]

logger = logging.getLogger("vllm.kvpager")


def install() -> None:
    """Make vLLM's scheduler build kvpager's manager from now on. Idempotent."""
    vllm_scheduler.KVCacheManager = KVCacheManager
    if os.environ.get("KVPAGER_VLLM_HASH") == "1":
        vllm_core.get_request_block_hasher = get_request_block_hasher


class KVCacheManager:
    """What vLLM's scheduler builds in place of its own manager; ``num_built`` counts how many it has."""

    num_built = 0

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
        refuse_pool_walkers(sys._getframe(1).f_locals.get("self"))
        KVCacheManager.num_built += 1
        config = cache_config(kv_cache_config, hash_block_size, dcp_world_size, pcp_world_size, enable_caching)
        if enable_caching and len(config.groups) > 1 and scheduler_block_size != config.alignment:
            raise ConfigError(
                f"vLLM aligns hits to {scheduler_block_size} tokens, its groups' block sizes to {config.alignment}; "
                f"kvpager needs them equal: leave vLLM's block size options at their defaults"
            )
        self.manager = kvpager_manager.KVCacheManager(
            config,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            log_stats=log_stats,
            enable_kv_cache_events=enable_kv_cache_events,
            watermark=watermark,
            eviction_order=os.environ.get("KVPAGER_VLLM_EVICTION", "dead_first"),  # type: ignore[arg-type]
            residency=Residency(metrics_collector) if metrics_collector is not None else None,
            event_source=EventSource,
        )
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.num_kv_cache_groups = self.manager.num_kv_cache_groups
        self.watermark_blocks = self.manager.watermark_blocks
        self.empty_kv_cache_blocks = self.manager.empty_kv_cache_blocks
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.block_pool = ConnectorBlockPool(self.manager)
        self.coordinator = Coordinator(self.manager)
        self._take_methods_over()

    def _take_methods_over(self) -> None:
        """kvpager's own methods where both mean the same: no call in between."""
        manager = self.manager
        self.allocate_slots = manager.allocate_slots
        self.cache_blocks: Callable[[Any, int], None] = self._cache_blocks if self.enable_caching else _do_nothing
        self.free = manager.free
        self.pop_blocks_for_free = manager.pop_blocks_for_free
        self.remove_skipped_blocks = manager.remove_skipped_blocks
        self.evict_blocks = manager.evict_blocks
        self.get_blocks = manager.get_blocks
        self.get_block_ids = manager.get_block_ids
        self.get_block_ids_for_computed_tokens = manager.get_block_ids_for_computed_tokens
        self.get_num_common_prefix_blocks = manager.get_num_common_prefix_blocks
        self.take_new_block_ids = manager.take_new_block_ids
        self.new_step_starts = manager.new_step_starts
        self.create_kv_cache_blocks = manager.create_kv_cache_blocks

    @property
    def usage(self) -> float:
        """The part of the blocks that is in use, 0 to 1."""
        return self.manager.usage

    def get_computed_blocks(self, request: Any) -> tuple[KVCacheBlocks, int]:
        """kvpager's answer; the scheduler reads the junction from the coordinator, as a distance behind the hit."""
        blocks, num_tokens = self.manager.get_computed_blocks(request)
        self.coordinator.num_uncached_common_prefix_tokens = max(0, blocks.junction - num_tokens)
        return blocks, num_tokens

    def _cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        # vLLM calls this for requests that were freed meanwhile, too.
        if request.request_id in self.coordinator.single_type_managers[0].req_to_blocks:
            self.manager.cache_blocks(request, num_computed_tokens)

    def reset_prefix_cache(self) -> bool:
        """Empty the index if nothing is held."""
        return self.manager.reset_prefix_cache()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """vLLM's own statistics class; an admission counts once."""
        stats = self.manager.make_prefix_cache_stats()
        if stats is None or self.prefix_cache_stats is None:
            return None
        mine, self.prefix_cache_stats = self.prefix_cache_stats, PrefixCacheStats()
        for name in vars(stats):
            setattr(mine, name, getattr(mine, name) + getattr(stats, name))
        mine.reset = bool(mine.reset)
        return mine

    def take_events(self) -> list[Any]:
        """vLLM's own event classes, for its publisher."""
        return [as_vllm_event(event) for event in self.manager.take_events()]

    def check(self) -> None:
        """All of kvpager's invariants. Raises ``InvariantError``."""
        kvpager_check.check_manager(self.manager)


def _do_nothing(request: Any, num_computed_tokens: int) -> None:
    """Without prefix caching there is nothing to commit."""


# -- what vLLM and its connectors touch below the manager ------------------------------------------------------------


class ConnectorBlockPool:
    """The block pool as connectors know it. Blocks are given as kvpager's `Block` views or as ids."""

    def __init__(self, manager: kvpager_manager.KVCacheManager) -> None:
        self._pool = manager.block_pool
        self.num_gpu_blocks = self._pool.num_blocks
        self.enable_caching = manager.enable_caching
        self.blocks: Sequence[Block] = GroupBlocks(self._pool, BlockList(range(self._pool.num_blocks)))
        self.null_block = self.blocks[0]

    @property
    def free_block_queue(self) -> FreeBlockQueue:
        """Its length only: the queue's links are not there to be walked."""
        return FreeBlockQueue(self._pool.num_free)

    def get_num_free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self._pool.num_free

    def get_usage(self) -> float:
        """The part of the blocks that is in use, 0 to 1."""
        return self._pool.usage

    def touch(self, blocks: Iterable[Block | int]) -> None:
        """Take a reference to each block; null blocks are passed over."""
        self._pool.touch(_ids(blocks))

    def free_blocks(self, ordered_blocks: Iterable[Block | int]) -> None:
        """Return blocks that were popped or touched; null blocks are passed over."""
        self._pool.free_blocks(_ids(ordered_blocks))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the index."""
        self._pool.evict_blocks(block_ids)


class FreeBlockQueue:
    """How many blocks are free; anything else of vLLM's queue is refused by name."""

    def __init__(self, num_free_blocks: int) -> None:
        self.num_free_blocks = num_free_blocks

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"block_pool.free_block_queue.{name}: kvpager's free queue is not a list of vLLM's block objects; a "
            f"connector that walks it needs KVPAGER_VLLM=0"
        )


def _ids(blocks: Iterable[Block | int]) -> list[int]:
    ids = (block if isinstance(block, int) else block.block_id for block in blocks)
    return [block_id for block_id in ids if block_id]


class Coordinator:
    """The coordinator as vLLM's scheduler knows it."""

    def __init__(self, manager: kvpager_manager.KVCacheManager) -> None:
        self._manager = manager
        self.block_pool = manager.block_pool
        self.num_uncached_common_prefix_tokens = 0
        self.single_type_managers = tuple(
            GroupView(manager, group) for group in manager.coordinator.single_type_managers
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[Block]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that reaching ``num_tokens`` takes: at once, or (with the cap) at most on the way."""
        tokens = TokenRanges(
            num_local=total_computed_tokens,
            num_computed=total_computed_tokens,
            num_start=min(total_computed_tokens, num_tokens - 1),
            num_main=num_tokens_main_model,
            num_slots=num_tokens,
            num_prompt_tokens=num_tokens,
            num_encoder_tokens=num_encoder_tokens,
        )
        hits = [BlockList(block.block_id for block in blocks) for blocks in new_computed_blocks]
        coordinator = self._manager.coordinator
        if apply_admission_cap:
            return sum(coordinator.plan_sequence(request_id, hits, tokens, 0))
        return sum(coordinator.plan(request_id, hits, tokens))

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[Sequence[Block], ...], tuple[int, ...]]:
        """Each group's longest hit on its own: for connectors that bring what the other groups lack."""
        matches = self._manager.coordinator.match_each(block_hashes, max_cache_hit_length)
        views = tuple(GroupBlocks(self._manager.block_pool, blocks) for blocks, _ in matches)
        return views, tuple(num_tokens for _, num_tokens in matches)


class GroupView:
    """One group's manager as vLLM's tests and connectors look at it."""

    def __init__(self, manager: kvpager_manager.KVCacheManager, group: SingleTypeKVCacheManager) -> None:
        self.block_size = group.block_size
        self.kv_cache_group_id = group.group_id
        self.req_to_blocks = TableViews(group, lambda table: GroupBlocks(manager.block_pool, table))
        self.num_cached_block = TableViews(group, lambda table: table.num_committed)


class TableViews(Mapping[str, Any]):
    """Request id to something read from its table now."""

    def __init__(self, group: SingleTypeKVCacheManager, read: Callable[[BlockList], Any]) -> None:
        self._group, self._read = group, read

    def __getitem__(self, request_id: str) -> Any:
        return self._read(self._group.tables[request_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._group.tables)

    def __len__(self) -> int:
        return len(self._group.tables)


def refuse_pool_walkers(scheduler: Any) -> None:
    """Say no at start to a connector that would walk the old pool's private lists later.

    vLLM hands the manager no connector; the scheduler that is being built has it.
    """
    connectors = [getattr(scheduler, "connector", None)]
    while connectors:
        connector = connectors.pop()
        connectors += getattr(connector, "_connectors", [])
        offload = getattr(connector, "scheduler_manager", None)
        if getattr(offload, "_lazy_mode", False) or getattr(offload, "lazy_offload", False):
            raise ConfigError(
                f"{type(connector).__name__} with lazy_offload walks the free queue of vLLM's own block pool, which "
                f"kvpager does not have; turn lazy_offload off, or unset KVPAGER_VLLM"
            )


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
    """The kvpager kind of one of vLLM's specs."""
    if isinstance(spec, vllm_specs.UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    size = {"block_size": spec.block_size}
    if isinstance(spec, vllm_specs.RSWASpec):
        return ReferenceWindow(**size, window=spec.rswa_window)
    if isinstance(spec, vllm_specs.SinkFullAttentionSpec):
        return SinkAttention(**size, sink_len=spec.sink_len)
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
    if isinstance(spec, vllm_specs.CrossAttentionSpec):
        return CrossAttention(**size)
    raise ConfigError(
        f"kvpager does not know vLLM's {type(spec).__name__}; unset KVPAGER_VLLM to go on with vLLM's own manager"
    )


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


def as_vllm_event(event: KVCacheEvent) -> Any:
    """The same event in vLLM's class, hashes converted as its configuration says."""
    if isinstance(event, AllBlocksCleared):
        return vllm_events.AllBlocksCleared()
    hashes = [kv_cache_utils.maybe_convert_block_hash(block_hash) for block_hash in event.block_hashes]
    if not isinstance(event, BlockStored):
        return vllm_events.BlockRemoved(block_hashes=hashes, medium=event.medium, group_idx=event.group_idx)
    parent = event.parent_block_hash
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
        kv_cache_spec_kind=event.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
    )


class Residency(ResidencySampler):
    """vLLM's own collector of block residency, told what kvpager's blocks do."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def allocated(self, block_id: int) -> None:
        """A block got new content."""
        self._collector.block_metrics.pop(block_id, None)
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
        if kv_cache_utils.need_extra_keys(request):
            extra_keys = [_extra_keys(request, block * hash_block_size, hash_block_size) for block in range(done, full)]
        return hash_blocks(
            request.all_token_ids[done * hash_block_size : full * hash_block_size],
            block_size=hash_block_size,
            parent=request.block_hashes[-1] if done else kv_cache_utils.NONE_HASH,
            extra_keys=extra_keys,
            algorithm="sha256_cbor",
        )

    return new_hashes


def _extra_keys(request: Any, start: int, size: int) -> tuple[ExtraKey, ...] | None:
    keys = EventSource(request).extra_keys(start, start + size)
    # Untagged, as vLLM has them: only the plain form goes into the hash.
    return tuple(ExtraKey(ExtraKind.CACHE_SALT, b"", key) for key in keys) if keys else None  # type: ignore[arg-type]
