"""Bad input at the API: an error that says what came and what to do, and a manager that is unchanged and usable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpager import (
    AttentionSpec,
    BlockHasher,
    BlockStateError,
    CacheConfig,
    ChunkedLocalAttention,
    ConfigError,
    CrossAttention,
    DuplicateRequestError,
    Fit,
    FullAttention,
    GroupSpec,
    InvalidRequestError,
    KVCacheManager,
    KVPagerError,
    Mamba,
    OutOfBlocksError,
    Request,
    SinkAttention,
    SlidingWindow,
    UnknownBlockError,
    UnknownRequestError,
    check_manager,
)

FULL = FullAttention(block_size=4)


def make_manager(*specs: AttentionSpec, num_blocks: int = 20, **options: Any) -> KVCacheManager:
    options = {"max_model_len": 64, "max_num_batched_tokens": 16, **options}
    return KVCacheManager(CacheConfig.uniform(num_blocks, specs or (FULL,)), **options)


def make_request(manager: KVCacheManager, name: str = "a", tokens: int = 10, **options: Any) -> Request:
    return Request(name, range(tokens), block_hasher=BlockHasher.for_config(manager.kv_cache_config), **options)


def state(manager: KVCacheManager) -> object:
    pool = manager.block_pool
    coordinator = manager.coordinator
    tables = {k: [t.ids() for t in coordinator.tables(k)] for k in coordinator.request_ids()}
    return tables, pool.free_queue(), pool.index(), [pool.ref_count(i) for i in range(pool.num_blocks)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CacheConfig.uniform(0, [FULL]), ["num_blocks", "at least 1", "0"]),
        (lambda: CacheConfig.uniform(1, [FULL]), ["num_blocks is 1", "at least 2"]),
        (lambda: CacheConfig.uniform(3, [SinkAttention(block_size=4, sink_len=8)]), ["2 static sink", "at least 4"]),
        (lambda: CacheConfig.uniform(9, [FULL], hash_block_size=3), ["hash_block_size 3", "4", "group 0"]),
        (lambda: CacheConfig.uniform(9, [FULL], hash_block_size=0), ["hash_block_size", "at least 1"]),
        (lambda: CacheConfig.uniform(9, [FULL], dcp_world_size=0), ["dcp_world_size", "at least 1"]),
        (lambda: CacheConfig.uniform(9, [FULL], retention_interval=4), ["retention_interval", "no sliding-window"]),
        (
            lambda: CacheConfig.uniform(9, [FULL, SlidingWindow(block_size=4, window=9)], retention_interval=6),
            ["retention_interval", "multiple", "4", "6"],
        ),
        (
            lambda: CacheConfig.uniform(9, [ChunkedLocalAttention(block_size=4, chunk_size=12)], dcp_world_size=2),
            ["chunk_size", "multiple", "8", "12"],
        ),
        (lambda: GroupSpec(layer_names=(), spec=FULL), ["at least one layer"]),
        (lambda: GroupSpec(layer_names=("x",), spec="full"), ["attention kind", "full"]),  # type: ignore[arg-type]
        (lambda: GroupSpec(layer_names="model.layers.0", spec=FULL), ["layer_names", "'model.layers.0'", "brackets"]),  # type: ignore[arg-type]
        (lambda: GroupSpec(layer_names=("x", 1), spec=FULL), ["layer_names", "('x', 1)"]),  # type: ignore[arg-type]
        (lambda: GroupSpec(layer_names=None, spec=FULL), ["layer_names", "None"]),  # type: ignore[arg-type]
        (lambda: CacheConfig(num_blocks=4, groups=None), ["groups", "None"]),  # type: ignore[arg-type]
        (lambda: CacheConfig.uniform(4, [FULL], namespace=5), ["namespace", "5"]),
        (lambda: CacheConfig(num_blocks=4, groups=[FULL]), ["GroupSpec"]),  # type: ignore[arg-type]
        (lambda: make_manager(max_model_len=0), ["max_model_len", "at least 1"]),
        (lambda: make_manager(max_num_batched_tokens=0), ["max_num_batched_tokens", "at least 1"]),
        (lambda: make_manager(watermark=1.0), ["watermark", "below 1"]),
        (lambda: make_manager(eviction_order="lru"), ["eviction_order", "dead_first", "lru"]),
        (
            lambda: make_manager(FULL, ChunkedLocalAttention(block_size=4, chunk_size=8), use_eagle=True),
            ["EAGLE", "chunked-local"],
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(make: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("specs", "options", "words"),
    [
        ((FULL, CrossAttention(block_size=4)), {}, ["group 1", "cross_attention"]),
        ((Mamba(block_size=4, mode="none"),), {}, ["group 0", "mamba", "'none'"]),
        ((FullAttention(block_size=16), FULL), {"max_model_len": 16}, ["multiples of 16", "16"]),
    ],
)
def test_a_configuration_that_can_never_hit_warns_and_says_why(
    specs: tuple[AttentionSpec, ...], options: dict[str, Any], words: list[str]
) -> None:
    with pytest.warns(UserWarning, match="never hit") as caught:
        manager = make_manager(*specs, **options)
    assert all(word in str(caught[0].message) for word in words)
    request = make_request(manager)
    assert manager.get_computed_blocks(request)[1] == 0


def test_without_caching_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_manager(Mamba(block_size=4, mode="none"), enable_caching=False)


# -- calls on a manager with one running request, "a": 10 tokens, 8 computed -----------------------------------------


@pytest.fixture
def manager() -> Iterator[KVCacheManager]:
    manager = make_manager(FULL, SlidingWindow(block_size=4, window=5), num_blocks=30)
    yield manager
    check_manager(manager)


@pytest.fixture
def request_a(manager: KVCacheManager) -> Request:
    request = make_request(manager)
    assert manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    return request


def raises_and_changes_nothing(
    manager: KVCacheManager, error: type[KVPagerError], words: list[str], call: Callable[[], object]
) -> None:
    before = state(manager)
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value
    assert state(manager) == before


def test_nothing_to_allocate(manager: KVCacheManager, request_a: Request) -> None:
    for call in (manager.allocate_slots, manager.probe):
        raises_and_changes_nothing(
            manager,
            InvalidRequestError,
            ["num_new_tokens is 0"],
            lambda call=call: call(request_a, 0),  # type: ignore[misc]
        )
    with pytest.raises(ValueError, match="num_new_tokens"):
        manager.allocate_slots(request_a, 0)


@pytest.mark.parametrize(
    "counts",
    [
        {"num_new_tokens": -1},
        {"num_new_tokens": 1, "num_lookahead_tokens": -2},
        {"num_new_tokens": 1, "num_external_computed_tokens": -3},
        {"num_new_tokens": 1, "num_encoder_tokens": -4},
        {"num_new_tokens": 1.5},
    ],
)
def test_counts_that_are_no_counts(manager: KVCacheManager, request_a: Request, counts: dict[str, Any]) -> None:
    name, value = list(counts.items())[-1]
    raises_and_changes_nothing(
        manager, InvalidRequestError, [name, str(value)], lambda: manager.allocate_slots(request_a, **counts)
    )


def test_a_duplicate_live_request_id(manager: KVCacheManager, request_a: Request) -> None:
    twin = make_request(manager, "a", 6)
    for call in (lambda: manager.allocate_slots(twin, 6), lambda: manager.probe(twin)):
        raises_and_changes_nothing(manager, DuplicateRequestError, ["'a'", "in use"], call)
    manager.free(twin)  # frees nothing: the blocks are not its own
    assert manager.get_block_ids("a")[0]


@pytest.mark.parametrize("computed", [9, 100, -1])
def test_computed_tokens_beyond_the_slots(manager: KVCacheManager, request_a: Request, computed: int) -> None:
    request_a.num_computed_tokens = computed
    raises_and_changes_nothing(
        manager, InvalidRequestError, [str(computed), "0 to 8"], lambda: manager.allocate_slots(request_a, 1)
    )


def test_computed_tokens_below_what_dead_blocks_allow(manager: KVCacheManager, request_a: Request) -> None:
    assert manager.allocate_slots(request_a, 2)
    request_a.num_computed_tokens = 10
    request_a.append_output_token_ids([1] * 8)
    assert manager.allocate_slots(request_a, 8)  # with 10 computed and a window of 5, block 0 is dead
    request_a.num_computed_tokens = 7
    raises_and_changes_nothing(
        manager, InvalidRequestError, ["7", "8 to 20"], lambda: manager.allocate_slots(request_a, 1)
    )


def test_blocks_released_by_a_count_beyond_the_slots_are_not_read_again() -> None:
    manager = make_manager(ChunkedLocalAttention(block_size=4, chunk_size=8))
    request = make_request(manager, tokens=20)
    assert manager.allocate_slots(request, 12)
    request.num_computed_tokens = 12
    manager.remove_skipped_blocks("a", 16)  # tokens 12 to 15 would read the third block, which is gone
    raises_and_changes_nothing(
        manager, InvalidRequestError, ["12", "16 to 12"], lambda: manager.allocate_slots(request, 4)
    )


def test_a_freed_request_starts_over(manager: KVCacheManager, request_a: Request) -> None:
    manager.free(request_a)
    raises_and_changes_nothing(
        manager, InvalidRequestError, ["8", "starts over at 0"], lambda: manager.allocate_slots(request_a, 1)
    )


def test_hits_that_do_not_fit(manager: KVCacheManager, request_a: Request) -> None:
    other = make_manager(FULL, SlidingWindow(block_size=4, window=5), num_blocks=30)
    foreign = make_request(other)
    assert other.allocate_slots(foreign, 10)
    foreign_hit, num_foreign = other.get_computed_blocks(make_request(other, "b"))
    request_b = make_request(manager, "b")
    hit, num_hit = manager.get_computed_blocks(request_b)
    assert num_hit == num_foreign == 8

    def allocate(*arguments: Any) -> Callable[[], object]:
        return lambda: manager.allocate_slots(*arguments)

    for arguments, words in (
        ((request_b, 2, 8, foreign_hit), ["another manager"]),
        ((request_b, 2, 8), ["8 hit tokens", "without blocks"]),
        ((request_a, 2, 8, hit), ["holds blocks already"]),
    ):
        raises_and_changes_nothing(manager, InvalidRequestError, words, allocate(*arguments))
    raises_and_changes_nothing(manager, InvalidRequestError, ["group 0", "4"], allocate(request_b, 2, 4, hit))


def test_a_hit_that_was_evicted_since(manager: KVCacheManager, request_a: Request) -> None:
    request_b = make_request(manager, "b")
    hit, num_hit = manager.get_computed_blocks(request_b)
    manager.evict_blocks([hit.blocks[0][1].block_id])
    raises_and_changes_nothing(
        manager,
        InvalidRequestError,
        ["evicted since", "ask again"],
        lambda: manager.allocate_slots(request_b, 2, num_hit, hit),
    )


def test_a_hit_is_still_good_when_something_else_was_evicted(manager: KVCacheManager, request_a: Request) -> None:
    request_b = make_request(manager, "b")
    hit, num_hit = manager.get_computed_blocks(request_b)
    manager.evict_blocks([manager.get_block_ids("a")[1][0]])
    assert manager.allocate_slots(request_b, 2, num_hit, hit) is not None


@pytest.mark.parametrize("block_id", [-1, 30, 10**6, "1", 1.0])
def test_block_ids_that_are_not_in_the_pool(manager: KVCacheManager, request_a: Request, block_id: Any) -> None:
    pool = manager.block_pool
    for call in (pool.free_blocks, pool.touch, manager.evict_blocks, manager.invalidate_blocks):
        raises_and_changes_nothing(
            manager,
            UnknownBlockError,
            [str(block_id), "0 to 29"],
            lambda call=call: call([1, block_id]),  # type: ignore[misc]
        )


def test_double_frees_and_the_null_block(manager: KVCacheManager, request_a: Request) -> None:
    pool = manager.block_pool
    held = manager.get_block_ids("a")[0][0]
    free = pool.free_queue()[0]
    for ids, words in (([held], [str(held), "handed out"]), ([free], [str(free)]), ([0], ["null block"])):
        raises_and_changes_nothing(manager, BlockStateError, words, lambda ids=ids: pool.free_blocks(ids))  # type: ignore[misc]
    raises_and_changes_nothing(manager, BlockStateError, ["null block"], lambda: pool.touch([0]))
    taken = pool.allocate(2)
    raises_and_changes_nothing(manager, BlockStateError, ["2x", "1 of"], lambda: pool.free_blocks([taken[0], *taken]))
    pool.free_blocks(taken)
    raises_and_changes_nothing(manager, BlockStateError, [str(taken[0])], lambda: pool.free_blocks(taken))


def test_more_blocks_than_are_free(manager: KVCacheManager, request_a: Request) -> None:
    pool = manager.block_pool
    raises_and_changes_nothing(manager, OutOfBlocksError, ["100", str(pool.num_free)], lambda: pool.allocate(100))


def test_requests_that_hold_nothing(manager: KVCacheManager) -> None:
    unknown = make_request(manager, "x")
    raises_and_changes_nothing(manager, UnknownRequestError, ["'x'"], lambda: manager.cache_blocks(unknown, 4))
    manager.free(unknown)
    manager.remove_skipped_blocks("x", 10)
    assert manager.pop_blocks_for_free(unknown) == []
    assert manager.get_block_ids("x") == ([], [])
    assert manager.get_num_common_prefix_blocks("x") == [0, 0]


def test_a_request_that_could_never_fit_is_refused_with_what_would(manager: KVCacheManager) -> None:
    small = make_manager(num_blocks=6)
    request = make_request(small, "big", tokens=8, max_tokens=20)
    probe = small.probe(request)
    assert (probe.fit, probe.num_tokens_that_fit) == (Fit.NEVER, 20)
    raises_nothing_and_returns_none = small.allocate_slots(request, 8)
    assert raises_nothing_and_returns_none is None
    assert small.block_pool.num_free == 5
    fitting = make_request(small, "fits", tokens=8, max_tokens=12)
    assert small.probe(fitting).fit is Fit.NOW


def test_mixed_allocations_of_two_managers_do_not_join(manager: KVCacheManager, request_a: Request) -> None:
    other = make_manager(FULL, SlidingWindow(block_size=4, window=5))
    with pytest.raises(InvalidRequestError, match="two managers"):
        manager.get_blocks("a") + other.empty_kv_cache_blocks
    with pytest.raises(InvalidRequestError, match="has 2"):
        manager.get_blocks("a").get_unhashed_block_ids()
