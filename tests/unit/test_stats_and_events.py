"""Statistics count admissions once; residency follows sampled blocks; events rebuild the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvpager import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    BlockResidency,
    BlockStored,
    CacheConfig,
    ConfigError,
    FullAttention,
    KVCacheEvent,
    KVCacheManager,
    PrefixCacheStats,
    Request,
    ResidencySampler,
    SlidingWindow,
)
from kvpager.events import apply_events


def make_manager(num_blocks: int = 12, **options: Any) -> KVCacheManager:
    specs = [FullAttention(block_size=4), SlidingWindow(block_size=4, window=5)][: options.pop("groups", 1)]
    return KVCacheManager(CacheConfig.uniform(num_blocks, specs), max_model_len=64, **options)


def make_request(manager: KVCacheManager, name: str, tokens: list[int], **options: Any) -> Request:
    return Request(name, tokens, block_hasher=BlockHasher.for_config(manager.kv_cache_config), **options)


def run_whole(manager: KVCacheManager, request: Request) -> int:
    blocks, hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is not None
    request.num_computed_tokens = request.num_tokens
    manager.free(request)
    request.num_computed_tokens = 0
    return hit


def test_an_admission_counts_once_however_often_it_was_asked_or_refused() -> None:
    manager = make_manager(num_blocks=6, log_stats=True)
    run_whole(manager, make_request(manager, "a", list(range(9))))
    blocker = make_request(manager, "b", [99] * 12)
    assert manager.allocate_slots(blocker, 12) is not None
    request = make_request(manager, "c", list(range(16)))
    for _ in range(3):
        manager.probe(request)
        blocks, hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 16 - hit, hit, blocks) is None
    manager.free(blocker)
    blocks, hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 16 - hit, hit, blocks) is not None
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=3, queries=9 + 12 + 16, hits=hit)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()


def test_preempted_and_unread_requests_are_counted_apart() -> None:
    manager = make_manager(log_stats=True)
    request = make_request(manager, "a", list(range(9)))
    assert run_whole(manager, request) == 0
    request.num_preemptions = 1
    assert run_whole(manager, request) == 8
    assert run_whole(manager, make_request(manager, "b", list(range(9)), skip_reading_prefix_cache=True)) == 0
    stats = manager.make_prefix_cache_stats()
    assert stats == PrefixCacheStats(
        requests=1, queries=9, hits=0, preempted_requests=1, preempted_queries=9, preempted_hits=8
    )
    assert manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(reset=True)
    assert make_manager().make_prefix_cache_stats() is None


def test_residency_of_a_block_from_birth_over_its_uses_to_its_eviction() -> None:
    now = 0.0
    sampler = ResidencySampler(1.0, clock=lambda: now)
    manager = make_manager(num_blocks=4, residency=sampler)
    request = make_request(manager, "a", list(range(5)))
    run_whole(manager, request)
    for moment in (1.0, 3.0, 7.0):
        now = moment
        assert run_whole(manager, request) == 4
    now = 10.0
    run_whole(manager, make_request(manager, "b", [9] * 12))
    assert sampler.drain() == [BlockResidency(lifetime_seconds=10.0, idle_seconds=3.0, reuse_gaps_seconds=(2.0, 4.0))]
    assert sampler.drain() == []


def test_residency_samples_the_fraction_asked_for_and_only_tells_of_cached_blocks() -> None:
    sampler = ResidencySampler(0.25, clock=lambda: 0.0, seed=3)
    manager = make_manager(num_blocks=2001, residency=sampler)
    request = make_request(manager, "a", list(range(7)))
    run_whole(manager, request)
    taken = manager.block_pool.allocate(2000)
    assert len(sampler.drain()) <= 1
    manager.block_pool.free_blocks(taken)
    # None of them was cached when it was overwritten, so none is told.
    manager.block_pool.free_blocks(manager.block_pool.allocate(2000))
    assert sampler.drain() == []
    assert 400 < len(sampler._stays) < 600
    for rate in (0, -0.1, 1.1):
        with pytest.raises(ConfigError, match="sample_rate"):
            ResidencySampler(rate, clock=lambda: 0.0)


def test_an_event_pairs_hashes_tokens_and_keys_and_runs_break_where_blocks_are_skipped() -> None:
    manager = make_manager(groups=2, num_blocks=30, enable_kv_cache_events=True)
    first = make_request(manager, "a", list(range(8)))
    run_whole(manager, first)
    second = make_request(manager, "b", list(range(14)), cache_salt=None)
    manager.take_events()
    assert manager.allocate_slots(second, 14) is not None  # without its hit: a second copy of two blocks
    full, window = manager.take_events()
    assert isinstance(full, BlockStored)
    assert isinstance(window, BlockStored)
    assert (full.block_hashes, full.parent_block_hash) == (second.block_hashes[2:3], second.block_hashes[1])
    assert full.token_ids == [8, 9, 10, 11]
    assert (full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert (window.group_idx, window.kv_cache_spec_kind) == (1, "sliding_window")
    assert window.kv_cache_spec_sliding_window == 5
    assert window.extra_keys == [None]


def test_removed_is_told_with_the_last_copy_and_events_rebuild_the_index() -> None:
    manager = make_manager(num_blocks=9, enable_kv_cache_events=True)
    a, b = (make_request(manager, name, list(range(9))) for name in "ab")
    for request in (a, b):
        assert manager.allocate_slots(request, 9) is not None
    index: set[tuple[bytes, int | None]] = set()
    apply_events(index, manager.take_events())
    assert index == {(h, 0) for h in a.block_hashes}
    manager.evict_blocks(manager.get_block_ids("a")[0])
    assert manager.take_events() == []
    manager.evict_blocks(manager.get_block_ids("b")[0])
    removed = manager.take_events()
    assert [type(event) for event in removed] == [BlockRemoved]
    apply_events(index, removed)
    assert index == set()
    manager.free(a)
    manager.free(b)
    assert manager.reset_prefix_cache()
    assert manager.take_events() == [AllBlocksCleared()]
    assert make_manager().take_events() == []


def test_a_host_that_fails_to_say_what_events_tell_finds_the_manager_unchanged() -> None:
    says = True

    def source(request: Request) -> Request:
        if not says:
            raise RuntimeError("the host knows nothing of it")
        return request

    manager = make_manager(num_blocks=30, enable_kv_cache_events=True, event_source=source)
    new, running, loading = (make_request(manager, name, [n] * 8) for n, name in enumerate("abc"))
    assert manager.allocate_slots(running, 7) is not None
    running.num_computed_tokens = 7
    assert manager.allocate_slots(loading, 0, num_external_computed_tokens=8, delay_cache_blocks=True) is not None
    loading.num_computed_tokens = 8

    def seen() -> object:
        tables = [manager.get_block_ids(name) for name in "abc"]
        return tables, manager.block_pool.free_queue(), manager.block_pool.index()

    calls: list[Callable[[], object]] = [
        lambda: manager.allocate_slots(new, 8),
        lambda: manager.allocate_slots(running, 1),
        lambda: manager.allocate_decode_slots([running]),
        lambda: manager.cache_blocks(loading, 8),
    ]
    before = seen()
    for call in calls:
        says = False
        with pytest.raises(RuntimeError, match="knows nothing"):
            call()
        assert seen() == before
    says = True
    manager.take_events()
    for call in calls:
        call()
    stored = [event for event in manager.take_events() if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [[0] * 8, [1] * 4, [2] * 8]


def test_events_survive_the_wire_in_tagged_form() -> None:
    manager = make_manager(enable_kv_cache_events=True)
    run_whole(manager, make_request(manager, "a", list(range(9)), cache_salt="s"))
    events = manager.take_events()
    wire = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(wire, type=list[KVCacheEvent]) == events
    assert msgspec.msgpack.decode(wire)[0]["type"] == "BlockStored"
    assert events[0].extra_keys == [("s",), None]  # type: ignore[union-attr]
