"""Things that went wrong in public engines: every row of that list is a test here, named after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvpager.attention import AttentionSpec, FullAttention, Mamba, ReferenceWindow, SlidingWindow
from kvpager.check import check_manager
from kvpager.config import CacheConfig, GroupSpec
from kvpager.errors import (
    BlockStateError,
    DuplicateRequestError,
    InvalidRequestError,
    KVPagerError,
    RequestTooLargeError,
)
from kvpager.events import BlockRemoved, BlockStored
from kvpager.hashing import BlockHasher
from kvpager.manager import Fit, KVCacheManager
from kvpager.request import LoRA, Request
from kvpager.scheduler import Scheduler

FULL = FullAttention(block_size=4)
WINDOW = SlidingWindow(block_size=4, window=8)


def manager_of(
    *specs: AttentionSpec, num_blocks: int = 64, eagle: tuple[int, ...] = (), **options: Any
) -> KVCacheManager:
    groups = tuple(
        GroupSpec(layer_names=(f"layer.{i}",), spec=spec, is_eagle=i in eagle) for i, spec in enumerate(specs)
    )
    interval = options.pop("retention_interval", None)
    config = CacheConfig(num_blocks=num_blocks, groups=groups, retention_interval=interval)
    return KVCacheManager(config, **{"max_model_len": 256, "enable_kv_cache_events": True, **options})


def request_of(manager: KVCacheManager, name: str, tokens: int | list[int], **options: Any) -> Request:
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    options.setdefault("max_tokens", 16)
    return Request(name, ids, block_hasher=BlockHasher.for_config(manager.kv_cache_config), **options)


def admit(manager: KVCacheManager, request: Request, num_new: int | None = None, **options: Any) -> int | None:
    """Look up, allocate, count as computed; tokens hit, None if refused. A step of its own."""
    manager.new_step_starts()
    blocks, hit = manager.get_computed_blocks(request)
    loaded = options.get("num_external_computed_tokens", 0)
    new = request.num_tokens - hit - loaded if num_new is None else num_new
    if manager.allocate_slots(request, new, hit, blocks, **options) is None:
        return None
    request.num_computed_tokens = hit + loaded + new
    return hit


def prefill(manager: KVCacheManager, request: Request, num_new: int, **options: Any) -> bool:
    manager.new_step_starts()
    if manager.allocate_slots(request, num_new, **options) is None:
        return False
    request.num_computed_tokens += num_new
    return True


def leave_behind(manager: KVCacheManager, name: str, tokens: int | list[int], step: int = 256) -> Request:
    """A request computes its whole prompt in steps, and goes."""
    request = request_of(manager, name, tokens, max_tokens=1)
    hit = admit(manager, request, min(step, request.num_tokens - manager.get_computed_blocks(request)[1]))
    assert hit is not None
    while request.num_computed_tokens < request.num_tokens:
        assert prefill(manager, request, min(step, request.num_tokens - request.num_computed_tokens))
    manager.free(request)
    return request


def state_of(manager: KVCacheManager) -> tuple[Any, ...]:
    """Everything that a query or a refused call must leave alone."""
    pool = manager.block_pool
    counts = [pool.ref_count(b) for b in range(1, pool.num_blocks)]
    tables = {r.request_id: manager.get_block_ids(r.request_id) for r in manager.live_requests()}
    return pool.free_queue(), pool.index(), counts, tables


def test_hit_144_tokens_while_one_group_held_128() -> None:
    """full + Mamba + MTP: every group covers exactly the hit, and anything else is refused before it is used."""
    manager = manager_of(FullAttention(block_size=16), Mamba(block_size=32), use_eagle=True)
    leave_behind(manager, "a", 160, step=32)
    again = request_of(manager, "b", 160)
    blocks, hit = manager.get_computed_blocks(again)
    assert hit == 128  # 144 would do for full attention alone
    sizes = [spec.block_size for spec in manager.kv_cache_config.specs]
    assert [len(row) * size for row, size in zip(blocks.blocks, sizes, strict=True)] == [hit, hit]
    before = state_of(manager)
    with pytest.raises(InvalidRequestError, match=r"144 tokens"):
        manager.allocate_slots(again, 16, 144, blocks)
    assert state_of(manager) == before


def test_allocation_of_one_group_evicted_another_groups_untouched_hit() -> None:
    """The window's hit is second in the queue when full attention takes two blocks from its front."""
    manager = manager_of(
        FullAttention(block_size=2), SlidingWindow(block_size=4, window=5), num_blocks=30, eviction_order="recency"
    )
    leave_behind(manager, "a", 12, step=4)
    leave_behind(manager, "z", [99] * 4)
    manager.block_pool.allocate(manager.block_pool.num_free - len(manager.block_pool.index()))
    request = request_of(manager, "b", 16, max_tokens=1)
    blocks, hit = manager.get_computed_blocks(request)
    hits = blocks.get_block_ids()
    assert hit == 12
    others = [b for b in manager.block_pool.free_queue() if b not in hits[0]]
    assert others.index(hits[1][2]) < 2
    assert manager.allocate_slots(request, 4, hit, blocks) is not None
    full, window = manager.get_block_ids("b")
    assert (full[:6], window[:3]) == hits
    used = [b for b in full + window if b]
    assert len(used) == len(set(used))  # nobody's hit was handed out as new


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lora": LoRA(name="tenant", version="1")}, {"cache_salt": "tenant"}),
        ({"lora": LoRA(name="adapter", version="1")}, {"lora": LoRA(name="adapter", version="2")}),
    ],
    ids=["a LoRA named like a salt", "the same name, another adapter"],
)
def test_lora_named_like_another_tenants_salt_hit_its_cache(first: dict[str, Any], second: dict[str, Any]) -> None:
    manager = manager_of(FULL)
    one = request_of(manager, "a", 16, **first)
    assert admit(manager, one) == 0
    assert manager.get_computed_blocks(request_of(manager, "b", 16, **second))[1] == 0
    assert manager.get_computed_blocks(request_of(manager, "c", 16, **first))[1] == 12


def test_request_that_can_never_fit_waits_for_ever() -> None:
    manager = manager_of(FULL, num_blocks=11, max_num_batched_tokens=16)
    giant = request_of(manager, "giant", 30, max_tokens=30)
    answer = manager.probe(giant, 16)
    assert (answer.fit, answer.num_tokens_that_fit) == (Fit.NEVER, 40)
    assert manager.allocate_slots(giant, 16) is None
    scheduler = Scheduler(manager)
    with pytest.raises(RequestTooLargeError, match="40 tokens"):
        scheduler.add(giant)
    scheduler.add(request_of(manager, "small", 8))
    assert [s.request.request_id for s in scheduler.schedule().scheduled] == ["small"]


def test_full_sequence_admission_ignored_reserved_blocks_and_lookahead() -> None:
    """Two requests that need 6 blocks each in a pool of 10: the second must not get in."""
    manager = manager_of(FULL, num_blocks=11, max_num_batched_tokens=8)
    one, two = (request_of(manager, name, [k] * 24, max_tokens=1) for k, name in enumerate("ab"))
    assert admit(manager, one, 8, full_sequence_must_fit=True) == 0
    promised = 4  # what the first still needs
    assert admit(manager, two, 8, full_sequence_must_fit=True, reserved_blocks=promised) is None
    assert manager.probe(two, 8, full_sequence_must_fit=True, reserved_blocks=promised).num_blocks_short == 2
    assert prefill(manager, one, 8) and prefill(manager, one, 8)
    manager.free(one)
    # Lookahead is part of the sequence: 24 tokens fit 6 blocks, with 4 more slots it is 7.
    taken = manager.block_pool.allocate(4)
    asked = manager.probe(two, 8, full_sequence_must_fit=True, num_lookahead_tokens=4)
    assert (asked.fit, asked.num_blocks_needed) == (Fit.NOT_NOW, 7)
    assert admit(manager, two, 8, full_sequence_must_fit=True, num_lookahead_tokens=4) is None
    assert admit(manager, two, 8, full_sequence_must_fit=True) == 0
    manager.block_pool.free_blocks(taken)


@pytest.mark.parametrize("hit", [0, 8, 16, 24, 32])
@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("window", [2, 5, 8, 11])
def test_window_blocks_held_after_a_long_hit_were_under_counted(hit: int, lookahead: int, window: int) -> None:
    """Admitted with exactly what it needs free, a request is never refused half-way."""

    def cache() -> KVCacheManager:
        manager = manager_of(FULL, SlidingWindow(block_size=4, window=window), num_blocks=64, max_num_batched_tokens=12)
        if hit:
            leave_behind(manager, "a", hit)
        return manager

    options: dict[str, Any] = {"full_sequence_must_fit": True, "num_lookahead_tokens": lookahead}
    manager = cache()
    request = request_of(manager, "b", 64, max_tokens=1)
    need = manager.probe(request, 12, **options).num_blocks_needed
    for num_free, admitted in ((need - 1, None), (need, hit)):
        manager = cache()
        manager.block_pool.allocate(manager.block_pool.num_free - num_free)
        assert admit(manager, request, 12, **options) == admitted
    while request.num_computed_tokens < request.num_tokens:
        step = min(12, request.num_tokens - request.num_computed_tokens)
        assert prefill(manager, request, step, num_lookahead_tokens=lookahead)


def test_state_was_committed_under_the_hash_of_a_boundary_that_no_step_had_ended_at() -> None:
    """Align: steps of 6, 6, 8 over blocks of 4 leave states after 6, 12 and 20 tokens, nowhere else."""
    manager = manager_of(Mamba(block_size=4))
    request = request_of(manager, "a", 20)
    assert admit(manager, request, 6) == 0
    assert prefill(manager, request, 6) and prefill(manager, request, 8)
    cached = {h for h, _ in manager.block_pool.index()}
    assert cached == {request.block_hashes[2], request.block_hashes[4]}
    manager.new_step_starts()
    assert manager.get_computed_blocks(request_of(manager, "b", 20))[1] == 12


def test_tokens_of_a_load_under_way_were_committed_by_the_next_ordinary_call() -> None:
    manager = manager_of(FULL)
    request = request_of(manager, "a", 20)
    assert admit(manager, request, 0, num_external_computed_tokens=16, delay_cache_blocks=True) == 0
    assert not manager.block_pool.index()
    assert prefill(manager, request, 4)
    assert not manager.block_pool.index()
    assert manager.get_computed_blocks(request_of(manager, "b", 20))[1] == 0
    manager.cache_blocks(request, 20)
    assert manager.get_computed_blocks(request_of(manager, "b", 20))[1] == 16


def test_a_second_load_let_tokens_of_the_first_be_committed() -> None:
    manager = manager_of(FULL)
    request = request_of(manager, "a", 24)
    load: dict[str, Any] = {"num_external_computed_tokens": 8, "delay_cache_blocks": True}
    assert admit(manager, request, 0, **load) == 0
    assert manager.allocate_slots(request, 0, **load) is not None
    request.num_computed_tokens = 16
    assert prefill(manager, request, 8)
    assert not manager.block_pool.index()
    for arrived, committed in ((8, 2), (24, 6)):
        manager.cache_blocks(request, arrived)
        assert {h for h, _ in manager.block_pool.index()} == set(request.block_hashes[:committed])


def test_state_of_a_load_that_did_not_arrive_was_committed() -> None:
    """Found by the stateful run, beside the row above: what the load promised at token 4 was never there."""
    manager = manager_of(FULL, Mamba(block_size=4))
    request = request_of(manager, "a", 16)
    assert admit(manager, request, 0, num_external_computed_tokens=4, delay_cache_blocks=True) == 0
    manager.cache_blocks(request, 0)
    request.num_computed_tokens = 0
    assert prefill(manager, request, 8)  # computes everything itself, in a step that ends at 8
    states = {h for h, group in manager.block_pool.index() if group == 1}
    assert states == {request.block_hashes[1]}


def test_hit_statistics_counted_once_per_retry() -> None:
    manager = manager_of(FULL, num_blocks=10, log_stats=True)
    leave_behind(manager, "a", 16)
    taken = manager.block_pool.allocate(5)
    request = request_of(manager, "b", 32, max_tokens=1)
    for _ in range(3):
        assert admit(manager, request) is None
    manager.block_pool.free_blocks(taken[:4])
    assert admit(manager, request) == 16
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert (stats.requests, stats.queries, stats.hits) == (2, 48, 16)


def test_double_free_gave_count_minus_one() -> None:
    manager = manager_of(FULL, num_blocks=10)
    request = request_of(manager, "a", 16)
    assert admit(manager, request) == 0
    blocks = manager.pop_blocks_for_free(request)
    manager.block_pool.free_blocks(reversed(blocks))
    before = state_of(manager)
    with pytest.raises(BlockStateError, match=rf"block {blocks[0]}\b"):
        manager.block_pool.free_blocks(reversed(blocks))
    assert state_of(manager) == before
    # A live request's own blocks are not somebody else's to free.
    other = request_of(manager, "b", 8)
    assert admit(manager, other) == 4
    before = state_of(manager)
    with pytest.raises(BlockStateError):
        manager.block_pool.free_blocks(manager.get_block_ids("b")[0])
    assert state_of(manager) == before
    check_manager(manager)


def test_block_removed_was_sent_while_another_copy_still_served_hits() -> None:
    """Two requests compute the same prompt side by side; the copies are evicted one after the other."""
    manager = manager_of(FULL, num_blocks=10)
    one, two = (request_of(manager, name, 4) for name in "ab")
    assert admit(manager, one) == 0
    assert admit(manager, two) == 0
    assert [type(e) for e in manager.take_events()] == [BlockStored]
    first, second = (manager.get_block_ids(name)[0][0] for name in "ab")
    manager.evict_blocks([first])
    assert manager.take_events() == []
    assert manager.get_computed_blocks(request_of(manager, "c", 5))[1] == 4
    manager.evict_blocks([second])
    assert [type(e) for e in manager.take_events()] == [BlockRemoved]


def test_event_tokens_spanned_blocks_that_were_skipped() -> None:
    """Window 8 beside full blocks of 16: of every 16 tokens only the last two blocks are worth caching."""
    manager = manager_of(FullAttention(block_size=16), WINDOW)
    request = request_of(manager, "a", 48, cache_salt="s")
    assert admit(manager, request) == 0
    stored = [e for e in manager.take_events() if isinstance(e, BlockStored) and e.group_idx == 1]
    assert [e.token_ids for e in stored] == [list(range(8, 16)), list(range(24, 32)), list(range(40, 48))]
    for event in stored:
        assert len(event.block_hashes) == len(event.extra_keys or ()) == 2
        assert event.token_ids is not None and len(event.token_ids) == 2 * event.block_size


def test_window_blocks_were_freed_on_an_optimistic_count() -> None:
    """A step in flight guesses 4 tokens; until its result is known, its window stays."""
    manager = manager_of(SlidingWindow(block_size=2, window=4), max_num_batched_tokens=32)
    request = request_of(manager, "a", 8)
    assert admit(manager, request) == 0
    request.append_output_token_ids(100)
    assert prefill(manager, request, 5)  # one token and four guesses
    request.num_in_flight_tokens = 5
    needed = manager.get_block_ids("a")[0][2:4]  # tokens 5 to 7 are read by the step in flight
    manager.allocate_slots(request, 1)  # the next step, launched before the first has answered
    assert manager.get_block_ids("a")[0][2:4] == needed
    assert all(manager.block_pool.ref_count(b) == 1 for b in needed)
    request.num_in_flight_tokens = 0
    assert manager.allocate_slots(request, 2) is not None
    assert manager.get_block_ids("a")[0][2:4] == [0, 0]


def test_second_request_used_a_block_whose_load_had_failed() -> None:
    manager = manager_of(FULL)
    one = request_of(manager, "a", 20)
    assert admit(manager, one, 4, num_external_computed_tokens=16) == 0
    two = request_of(manager, "b", 24)
    assert admit(manager, two) == 20  # all five blocks of the first
    failed = manager.get_block_ids("a")[0][1]
    assert manager.invalidate_blocks([failed]) == {"a": 4, "b": 4}
    assert len(manager.block_pool.index()) == 1
    assert manager.get_computed_blocks(request_of(manager, "c", 24))[1] == 4
    one.num_computed_tokens = 4
    assert prefill(manager, one, 16)  # computed after all: now it may serve hits
    assert manager.get_computed_blocks(request_of(manager, "c", 24))[1] == 20
    check_manager(manager)


def test_duplicate_live_request_id_leaked_the_first_ones_blocks() -> None:
    manager = manager_of(FULL)
    one, two = request_of(manager, "same", 16), request_of(manager, "same", 8)
    assert admit(manager, one) == 0
    before = state_of(manager)
    with pytest.raises(DuplicateRequestError, match="same"):
        manager.allocate_slots(two, 8)
    with pytest.raises(DuplicateRequestError, match="same"):
        manager.probe(two, 8)
    manager.free(two)  # holds nothing: a no-op, not the first one's end
    assert state_of(manager) == before
    manager.free(one)
    assert manager.block_pool.num_held == 0
    assert admit(manager, two) == 4


def test_read_only_query_left_a_hint_for_another_request() -> None:
    """The junction of one look-up must not steer another request's allocation."""
    manager = manager_of(FULL, Mamba(block_size=4), retention_interval=0)
    leave_behind(manager, "a", 32, step=4)
    asked = request_of(manager, "b", [*range(16), *range(900, 916)])
    before = state_of(manager)
    blocks, hit = manager.get_computed_blocks(asked)
    assert (hit, blocks.junction) == (0, 16)  # full attention shares 16 tokens, no state is left there
    assert manager.probe(asked, 4).junction == 16
    assert state_of(manager) == before
    stranger = request_of(manager, "c", list(range(500, 532)))
    assert admit(manager, stranger, 4) == 0
    while stranger.num_computed_tokens < 32:
        assert prefill(manager, stranger, 4)
    mine = {h for h, group in manager.block_pool.index() if group == 1 and h in stranger.block_hashes}
    assert mine == {stranger.block_hashes[6]}  # its replay boundary, nothing at 16
    assert admit(manager, asked, 4) == 0
    while asked.num_computed_tokens < 32:
        assert prefill(manager, asked, 4)
    mine = {h for h, group in manager.block_pool.index() if group == 1 and h in asked.block_hashes}
    assert mine == {asked.block_hashes[3], asked.block_hashes[6]}  # its own junction as well


def test_window_with_eagle_and_a_larger_alignment_threw_valid_hits_away() -> None:
    """full 16, window 8 over blocks of 4 with EAGLE: the hit is dropped by one block of 4, then aligned once."""
    manager = manager_of(FullAttention(block_size=16), WINDOW, eagle=(1,))
    leave_behind(manager, "a", 48)
    assert manager.get_computed_blocks(request_of(manager, "b", 37))[1] == 32  # 32 + 4 <= 36: the window's run reaches
    assert manager.get_computed_blocks(request_of(manager, "c", 36))[1] == 16  # 32 + 4 > 35
    assert manager.get_computed_blocks(request_of(manager, "d", 64))[1] == 32  # block 12 was never computed


def test_hybrid_sessions_dead_window_blocks_pushed_out_useful_ones() -> None:
    """Three sessions take turns; the pool holds what their next turns need, but not their dead window blocks."""

    def hits(order: str) -> list[int]:
        manager = manager_of(FULL, WINDOW, WINDOW, num_blocks=110, max_model_len=512, eviction_order=order)
        found = []
        for turn in range(3):
            for session in range(3):
                tokens = [session * 1000 + i for i in range(96 + 4 * turn)]
                request = request_of(manager, f"{session}.{turn}", tokens)
                before = manager.get_computed_blocks(request)[1]
                leave_behind(manager, f"{session}.{turn}", tokens, step=32)
                if turn:
                    found.append(before)
        return found

    assert hits("dead_first") == [96] * 3 + [100] * 3  # all of the turn before
    assert sum(hits("recency")) < sum(hits("dead_first"))


def test_errors_are_the_packages_own() -> None:
    assert all(issubclass(e, KVPagerError) for e in (BlockStateError, DuplicateRequestError, RequestTooLargeError))


def test_a_reference_window_shares_only_what_does_not_depend_on_where_the_prompt_ended() -> None:
    """Behind prompt and window a token no longer reads all before it: for a longer prompt its K/V is another."""
    window, prompt = 8, 10
    manager = manager_of(ReferenceWindow(block_size=4, window=window), FULL)
    first = request_of(manager, "first", list(range(prompt)))
    assert admit(manager, first) == 0
    for token in range(100, 130):
        first.append_output_token_ids(token)
        assert manager.allocate_slots(first, 1) is not None
        first.num_computed_tokens += 1
    exact = (prompt + window + 1) // 4
    for blocks in manager.get_blocks(
        "first"
    ).blocks:  # other layers too: they read what the windowed one made of a token
        cached = [position for position, block in enumerate(blocks) if block.block_hash]
        assert set(cached) <= set(range(exact)) and len(blocks) > exact + 1
    second = request_of(manager, "second", [*range(prompt), *range(100, 130)])
    manager.free(first)
    assert manager.get_computed_blocks(second)[1] == exact * 4


def test_a_request_with_a_reference_window_does_not_resume_on_what_a_longer_prompt_left() -> None:
    window, prompt = 8, 10
    manager = manager_of(ReferenceWindow(block_size=4, window=window))
    longer = request_of(manager, "longer", list(range(40)))
    assert admit(manager, longer) == 0
    resumed = request_of(manager, "resumed", list(range(prompt)))
    resumed.append_output_token_ids(list(range(prompt, 40)))
    assert manager.get_computed_blocks(resumed)[1] == (prompt + window + 1) // 4 * 4


def _full_and_states() -> KVCacheManager:
    config = CacheConfig.uniform(60, [FullAttention(block_size=4), Mamba(block_size=4, num_speculative_states=1)])
    return KVCacheManager(config, max_model_len=64)


def test_a_failed_load_is_reported_while_its_blocks_are_held() -> None:
    """After `free` an id may be another request's already: what is computed from it could not be found."""
    manager = KVCacheManager(CacheConfig.uniform(20, [FullAttention(block_size=4)]), max_model_len=64)
    request = Request("a", range(10), block_hasher=BlockHasher.for_config(manager.kv_cache_config))
    assert manager.allocate_slots(request, 2, num_external_computed_tokens=8) is not None
    ids = manager.get_block_ids("a")[0]
    request.num_computed_tokens = 10
    manager.free(request)
    index = manager.block_pool.index()
    for bad in (ids[:1], [0], [19]):
        with pytest.raises(BlockStateError, match="before its request is freed"):
            manager.invalidate_blocks(bad)
    assert manager.block_pool.index() == index


def test_a_popped_block_can_be_reported() -> None:
    manager = KVCacheManager(CacheConfig.uniform(20, [FullAttention(block_size=4)]), max_model_len=64)
    request = Request("a", range(10), block_hasher=BlockHasher.for_config(manager.kv_cache_config))
    assert manager.allocate_slots(request, 10) is not None
    request.num_computed_tokens = 10
    popped = manager.pop_blocks_for_free(request)
    assert manager.invalidate_blocks(popped) == {}
    assert not manager.block_pool.index()
    manager.block_pool.free_blocks(reversed(popped))


@pytest.mark.parametrize(
    "make", [_full_and_states, lambda: KVCacheManager(CacheConfig.uniform(60, [FULL]), max_model_len=64)]
)
def test_blocks_that_hold_only_lookahead_ask_for_nothing_computed(make: Callable[[], KVCacheManager]) -> None:
    manager = make()
    request = Request("a", range(8), block_hasher=BlockHasher.for_config(manager.kv_cache_config))
    assert manager.allocate_slots(request, 8, num_lookahead_tokens=20) is not None
    request.num_computed_tokens = 8
    last = manager.get_block_ids("a")[0][-1]
    assert manager.invalidate_blocks([last]) in ({"a": 8}, {"a": 0})
    request.num_computed_tokens = 8
    check_manager(manager)


def test_another_requests_hit_is_refused() -> None:
    """Nothing has been evicted since it was found, so only a look at its hash tells."""
    manager = KVCacheManager(CacheConfig.uniform(60, [FULL, FULL]), max_model_len=64)
    hasher = BlockHasher.for_config(manager.kv_cache_config)
    first = Request("first", range(20), block_hasher=hasher)
    assert manager.allocate_slots(first, 20) is not None
    hit, num_hit = manager.get_computed_blocks(Request("same", range(20), block_hasher=hasher))
    other = Request("other", range(100, 120), block_hasher=hasher)
    with pytest.raises(InvalidRequestError, match="another request's"):
        manager.allocate_slots(other, 20 - num_hit, num_hit, hit)
    assert manager.live_requests() == [first]
    check_manager(manager)


def test_a_late_signal_for_a_request_whose_id_is_in_use_again_commits_nothing() -> None:
    manager = KVCacheManager(CacheConfig.uniform(60, [FULL]), max_model_len=200)
    hasher = BlockHasher.for_config(manager.kv_cache_config)
    aborted, new = (Request("a", range(start, start + 120), block_hasher=hasher) for start in (0, 500))
    for request in (aborted, new):
        options: dict[str, Any] = {"num_external_computed_tokens": 112, "delay_cache_blocks": True}
        assert manager.allocate_slots(request, 1, **options) is not None
        if request is aborted:
            manager.free(aborted)
    with pytest.raises(InvalidRequestError, match="in use by another live request"):
        manager.cache_blocks(aborted, 112)
    assert not manager.block_pool.index()
    manager.cache_blocks(new, 112)
    assert len(manager.block_pool.index()) == 28


def test_caching_past_the_table_keeps_the_loads_mark() -> None:
    manager = KVCacheManager(CacheConfig.uniform(60, [FULL]), max_model_len=200)
    request = Request("a", range(120), block_hasher=BlockHasher.for_config(manager.kv_cache_config))
    assert manager.allocate_slots(request, 1, num_external_computed_tokens=16, delay_cache_blocks=True) is not None
    with pytest.raises(InvalidRequestError, match="slots for 20"):
        manager.cache_blocks(request, 100)
    request.num_computed_tokens = 17
    assert manager.allocate_slots(request, 3) is not None
    assert not manager.block_pool.index()  # nothing of the load has arrived
