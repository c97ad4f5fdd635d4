"""kvpager's manager behind the harness."""

from __future__ import annotations

import os
from typing import Any

from kvpager.attention import AttentionSpec, ChunkedLocalAttention, FullAttention, Mamba, ReferenceWindow, SlidingWindow
from kvpager.check import check_manager
from kvpager.config import CacheConfig, GroupSpec
from kvpager.extra_keys import LoRA
from kvpager.hashing import BlockHasher
from kvpager.manager import Fit, KVCacheManager
from kvpager.request import Request, RequestStatus

from .layouts import Layout
from .reference import Kind
from .side import Allocation, Extras, State, Verdict

STATUS = {
    "waiting": RequestStatus.WAITING,
    "running": RequestStatus.RUNNING,
    "preempted": RequestStatus.PREEMPTED,
    "loading": RequestStatus.WAITING_FOR_LOAD,
}


def make_spec(kind: Kind) -> AttentionSpec:
    """kvpager's spec of one group."""
    if kind.window:
        return SlidingWindow(block_size=kind.block, window=kind.window)
    if kind.chunk:
        return ChunkedLocalAttention(block_size=kind.block, chunk_size=kind.chunk)
    if kind.is_mamba:
        mode: Any = kind.name.removeprefix("mamba-")
        return Mamba(block_size=kind.block, mode=mode, num_speculative_states=kind.states)
    if kind.kept:
        return ReferenceWindow(block_size=kind.block, window=kind.kept)
    return FullAttention(block_size=kind.block)


def make_config(layout: Layout, num_blocks: int) -> CacheConfig:
    """kvpager's configuration for a layout."""
    groups = tuple(
        GroupSpec(layer_names=(f"layer.{i}",), spec=make_spec(kind), is_eagle=kind.eagle)
        for i, kind in enumerate(layout.kinds)
    )
    return CacheConfig(
        num_blocks=num_blocks,
        groups=groups,
        hash_block_size=layout.hash_size,
        retention_interval=layout.retention,
    )


class KvpagerSide:
    """kvpager's manager in lockstep with plain Python, eviction by recency, and its requests."""

    name = "kvpager"

    def __init__(self, layout: Layout, num_blocks: int, **options: Any) -> None:
        config = make_config(layout, num_blocks)
        self._hasher = BlockHasher(layout.hash_size, seed=os.environ["PYTHONHASHSEED"], algorithm="sha256_cbor")
        self.manager = KVCacheManager(
            config,
            max_model_len=layout.max_model_len,
            max_num_batched_tokens=layout.step,
            use_eagle=layout.use_eagle,
            enable_kv_cache_events=True,
            log_stats=True,
            enable_caching=layout.caching,
            eviction_order="recency",
            **options,
        )
        self.requests: dict[str, Request] = {}

    def new(self, rid: str, prompt: list[int], max_tokens: int, extras: Extras) -> None:
        self.requests[rid] = Request(
            rid,
            prompt,
            block_hasher=self._hasher,
            max_tokens=max_tokens,
            skip_reading_prefix_cache=extras.skip,
            cache_salt=extras.salt,
            lora=LoRA(name=extras.lora, id=7) if extras.lora else None,
        )

    def forget(self, rid: str) -> None:
        del self.requests[rid]

    def hashes(self, rid: str) -> list[bytes]:
        return list(self.requests[rid].block_hashes)

    def append(self, rid: str, tokens: list[int]) -> None:
        self.requests[rid].append_output_token_ids(tokens)

    def set_computed(self, rid: str, num_tokens: int) -> None:
        self.requests[rid].num_computed_tokens = num_tokens

    def set_status(self, rid: str, status: str) -> None:
        self.requests[rid].status = STATUS[status]
        self.requests[rid].num_preemptions += status == "preempted"

    def hit(self, rid: str) -> tuple[Any, int, list[list[int]]]:
        blocks, num_tokens = self.manager.get_computed_blocks(self.requests[rid])
        return blocks, num_tokens, [list(ids) for ids in blocks.get_block_ids()]

    def verdict(self, rid: str, allocation: Allocation) -> Verdict:
        ask: dict[str, Any] = {
            "num_lookahead_tokens": allocation.num_lookahead,
            "num_external_computed_tokens": allocation.num_external,
            "has_scheduled_reqs": allocation.scheduled,
            "reserved_blocks": allocation.reserved,
        }
        request = self.requests[rid]
        answer = self.manager.probe(request, allocation.num_new, full_sequence_must_fit=allocation.gate, **ask)
        step = self.manager.probe(request, allocation.num_new, **ask)
        return Verdict(
            accepts=answer.fit is Fit.NOW,
            gate_need=answer.num_blocks_needed,
            step_need=step.num_blocks_needed,
            never=answer.fit is Fit.NEVER,
            next_step=answer.fit is Fit.NEXT_STEP,
            at_gate=answer.fit is not Fit.NOW and step.fit is Fit.NOW,
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
        """The same in one call."""
        requests = [self.requests[rid] for rid in rids]
        slots = self.manager.allocate_decode_slots(requests, num_lookahead_tokens=lookahead)
        num_served = len(rids) if slots.refused is None else slots.refused
        none = [[] for _ in range(self.manager.num_kv_cache_groups)]
        ids = [[list(group) for group in slots.block_ids(index)] or none for index in range(num_served)]
        assert slots.changed() == [index for index in range(num_served) if ids[index] != none]
        return ids, slots.refused

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
        return list(self.manager.pop_blocks_for_free(self.requests[rid]))

    def give_back(self, ids: list[int]) -> None:
        self.manager.block_pool.free_blocks(ids)

    def evict(self, ids: set[int]) -> None:
        self.manager.evict_blocks(ids)

    def reset(self) -> bool:
        return self.manager.reset_prefix_cache()

    def new_step(self) -> None:
        self.manager.new_step_starts()

    def new_ids(self) -> list[int]:
        return list(self.manager.take_new_block_ids())

    def events(self) -> list[Any]:
        return list(self.manager.take_events())

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
        return State(
            free=list(pool.free_queue()),
            index={key: list(ids) for key, ids in pool.index().items()},
            refs=[0, *(pool.ref_count(block) for block in range(1, pool.num_blocks))],
            usage=self.manager.usage,
        )

    def check(self) -> None:
        check_manager(self.manager)
