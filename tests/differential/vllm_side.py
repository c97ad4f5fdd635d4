"""vLLM 0.25.1's manager behind the harness. Imports vLLM: only for the oracle's environment."""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from .layouts import Layout
from .reference import Kind
from .side import Allocation, Extras, State, Verdict

STATUS = {
    "waiting": RequestStatus.WAITING,
    "running": RequestStatus.RUNNING,
    "preempted": RequestStatus.PREEMPTED,
    "loading": RequestStatus.WAITING_FOR_REMOTE_KVS,
}


RETENTION = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


class _WouldAccept(Exception):
    """Thrown where vLLM starts to take blocks, all its checks passed."""


def make_spec(kind: Kind) -> KVCacheSpec:
    """vLLM's spec of one group."""
    heads: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.bfloat16}
    if kind.window:
        return SlidingWindowSpec(block_size=kind.block, sliding_window=kind.window, **heads)
    if kind.chunk:
        return ChunkedLocalAttentionSpec(block_size=kind.block, attention_chunk_size=kind.chunk, **heads)
    if kind.is_mamba:
        return MambaSpec(
            block_size=kind.block,
            shapes=((1, 1),),
            dtypes=(torch.bfloat16,),
            mamba_cache_mode=kind.name.removeprefix("mamba-"),
            num_speculative_blocks=kind.states,
        )
    if kind.kept:
        return RSWASpec(block_size=kind.block, rswa_window=kind.kept, **heads)
    return FullAttentionSpec(block_size=kind.block, **heads)


def make_manager(layout: Layout, num_blocks: int, **options: Any) -> KVCacheManager:
    """vLLM's manager for a layout."""
    groups = [
        KVCacheGroupSpec([f"layer.{i}"], make_spec(kind), is_eagle_group=kind.eagle)
        for i, kind in enumerate(layout.kinds)
    ]
    os.environ.pop(RETENTION, None)
    if layout.retention is not None:
        os.environ[RETENTION] = str(layout.retention)
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=layout.max_model_len,
        scheduler_block_size=layout.alignment,
        hash_block_size=layout.hash_size,
        max_num_batched_tokens=layout.step,
        use_eagle=layout.use_eagle,
        enable_kv_cache_events=True,
        log_stats=True,
        enable_caching=layout.caching,
        **options,
    )


class VllmSide:
    """vLLM's manager and its requests."""

    name = "vLLM"

    def __init__(self, layout: Layout, num_blocks: int, **options: Any) -> None:
        hash_function = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(layout.hash_size, hash_function)
        self.manager = make_manager(layout, num_blocks, **options)
        self.requests: dict[str, Request] = {}

    def new(self, rid: str, prompt: list[int], max_tokens: int, extras: Extras) -> None:
        self.requests[rid] = Request(
            request_id=rid,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, skip_reading_prefix_cache=extras.skip),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self._hasher,
            cache_salt=extras.salt,
            lora_request=LoRARequest(extras.lora, 7, "nowhere") if extras.lora else None,
        )

    def forget(self, rid: str) -> None:
        del self.requests[rid]

    def hashes(self, rid: str) -> list[bytes]:
        return [bytes(block_hash) for block_hash in self.requests[rid].block_hashes]

    def append(self, rid: str, tokens: list[int]) -> None:
        self.requests[rid].append_output_token_ids(list(tokens))

    def set_computed(self, rid: str, num_tokens: int) -> None:
        self.requests[rid].num_computed_tokens = num_tokens

    def set_status(self, rid: str, status: str) -> None:
        self.requests[rid].status = STATUS[status]
        self.requests[rid].num_preemptions += status == "preempted"

    def hit(self, rid: str) -> tuple[Any, int, list[list[int]]]:
        blocks, num_tokens = self.manager.get_computed_blocks(self.requests[rid])
        return blocks, num_tokens, [list(ids) for ids in blocks.get_block_ids()]

    def verdict(self, rid: str, allocation: Allocation) -> Verdict:
        """What `allocate_slots` would say: a call that is stopped where it starts to take blocks.

        Only dead blocks have been released by then.
        """
        coordinator, needs = self.manager.coordinator, {}
        count = coordinator.get_num_blocks_to_allocate

        def counted(*args: Any, **kwargs: Any) -> int:
            need = count(*args, **kwargs)
            needs["gate" if kwargs.get("apply_admission_cap") else "step"] = need
            return need

        def stop(*args: Any, **kwargs: Any) -> None:
            raise _WouldAccept

        stopped = {
            "get_num_blocks_to_allocate": counted,
            "allocate_new_computed_blocks": stop,
            "allocate_new_blocks": stop,
        }
        for attribute, replacement in stopped.items():
            setattr(coordinator, attribute, replacement)
        try:
            self.allocate(rid, allocation)
            accepts = False
        except _WouldAccept:
            accepts = True
        finally:
            for attribute in stopped:
                delattr(coordinator, attribute)
        return Verdict(
            accepts=accepts,
            gate_need=needs.get("gate"),
            step_need=needs.get("step"),
            next_step=max(needs.values()) > self.manager.block_pool.num_gpu_blocks,
            at_gate="step" not in needs,
        )

    def allocate(self, rid: str, allocation: Allocation) -> list[list[int]] | None:
        blocks = self.manager.allocate_slots(
            self.requests[rid],
            allocation.num_new,
            allocation.num_hit,
            allocation.hit_blocks,
            num_lookahead_tokens=allocation.num_lookahead,
            num_external_computed_tokens=allocation.num_external,
            delay_cache_blocks=allocation.delay,
            full_sequence_must_fit=allocation.gate,
            reserved_blocks=allocation.reserved,
            has_scheduled_reqs=allocation.scheduled,
        )
        return None if blocks is None else [list(ids) for ids in blocks.get_block_ids()]

    def decode(self, rids: list[str], lookahead: int) -> tuple[list[list[list[int]]], int | None]:
        """One token each, one by one, up to the first refusal: new blocks by request, and its index."""
        served = []
        for index, rid in enumerate(rids):
            ids = self.allocate(rid, Allocation(num_new=1, num_lookahead=lookahead))
            if ids is None:
                return served, index
            served.append(ids)
        return served, None

    def table(self, rid: str) -> list[list[int]]:
        return [list(ids) for ids in self.manager.get_block_ids(rid)]

    def clipped(self, rid: str, num_tokens: int) -> list[list[int]]:
        return [list(ids) for ids in self.manager.get_block_ids_for_computed_tokens(rid, num_tokens)]

    def common(self, rid: str) -> list[int]:
        return list(self.manager.get_num_common_prefix_blocks(rid))

    def release_dead(self, rid: str, num_tokens: int, num_prompt: int) -> None:
        self.manager.remove_skipped_blocks(rid, num_tokens, num_prompt)

    def commit(self, rid: str, num_tokens: int) -> None:
        self.manager.cache_blocks(self.requests[rid], num_tokens)

    def free(self, rid: str) -> None:
        self.manager.free(self.requests[rid])

    def pop(self, rid: str) -> list[int]:
        return [block.block_id for block in self.manager.pop_blocks_for_free(self.requests[rid])]

    def give_back(self, ids: list[int]) -> None:
        pool = self.manager.block_pool
        pool.free_blocks(pool.blocks[block] for block in ids)

    def evict(self, ids: set[int]) -> None:
        self.manager.evict_blocks(ids)

    def reset(self) -> bool:
        return self.manager.reset_prefix_cache()

    def new_step(self) -> None:
        self.manager.new_step_starts()

    def new_ids(self) -> list[int]:
        return self.manager.take_new_block_ids()

    def events(self) -> list[Any]:
        return self.manager.take_events()

    def stats(self) -> tuple[int, int, int]:
        stats = self.manager.make_prefix_cache_stats()
        assert stats is not None
        return (
            stats.requests + stats.preempted_requests,
            stats.queries + stats.preempted_queries,
            stats.hits + stats.preempted_hits,
        )

    def state(self) -> State:
        pool = self.manager.block_pool
        index: dict[tuple[bytes, int], list[int]] = {}
        for key, blocks in pool.cached_block_hash_to_block._cache.items():
            ids = list(blocks) if isinstance(blocks, dict) else [blocks.block_id]
            index[bytes(get_block_hash(key)), get_group_id(key)] = ids
        return State(
            free=[block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            index=index,
            refs=[0 if block.is_null else block.ref_cnt for block in pool.blocks],
            usage=self.manager.usage,
        )

    def check(self) -> None:
        """vLLM has no check of its own."""

    # -- steering: only for named differences ---------------------------------------------------

    def running_state(self, rid: str) -> list[bool]:
        """Per group: whether Mamba `align` has given the request a running state."""
        return [
            rid in getattr(manager, "_allocated_block_reqs", ())
            for manager in self.manager.coordinator.single_type_managers
        ]

    def blocks_of(self, ids: list[list[int]]) -> KVCacheBlocks:
        """A hit with these blocks."""
        pool = self.manager.block_pool
        return self.manager.create_kv_cache_blocks(tuple([pool.blocks[block] for block in group] for group in ids))

    def uncommit(self, ids: set[int], in_this_step: set[tuple[bytes, int]]) -> None:
        """Take back hashes that should not have been committed, those of others ``in_this_step`` apart."""
        pool = self.manager.block_pool
        for block in ids:
            key = pool.blocks[block].block_hash
            if key is None or (bytes(get_block_hash(key)), get_group_id(key)) in in_this_step:
                continue
            for manager in self.manager.coordinator.single_type_managers:
                getattr(manager, "cached_blocks_this_step", set()).discard(key)
        self.manager.evict_blocks(ids)
