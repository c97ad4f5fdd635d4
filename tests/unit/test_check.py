"""check_manager notices each way in which a manager can be wrong, and says both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpager import BlockHasher, BlockList, CacheConfig, FullAttention, InvariantError, KVCacheManager, Request
from kvpager import check_manager as check


@pytest.fixture
def manager() -> KVCacheManager:
    config = CacheConfig.uniform(12, [FullAttention(block_size=4)])
    manager = KVCacheManager(config, max_model_len=64)
    hasher = BlockHasher.for_config(config)
    for name, tokens in (("a", range(10)), ("b", range(20, 26))):
        assert manager.allocate_slots(Request(name, tokens, block_hasher=hasher), len(tokens)) is not None
    check(manager)
    return manager


def replace_table(manager: KVCacheManager, name: str, ids: list[int]) -> None:
    manager.coordinator.single_type_managers[0].tables[name] = BlockList(ids)


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (lambda m: replace_table(m, "a", [1, 2]), ["references of requests to block 3", "1 is not 0"]),
        (lambda m: replace_table(m, "a", [1, 2, 3, 5]), ["references of requests to block 5", "1 is not 2"]),
        (lambda m: replace_table(m, "a", [1, 2, 3, 7]), ["references of requests to block 7", "0 is not 1"]),
        (lambda m: replace_table(m, "c", []), ["requests with a table in group 0"]),
        (lambda m: m.coordinator.single_type_managers[0].tables.pop("b"), ["references of requests to block 4"]),
        (lambda m: [m._holdings.remove(r.request_id) for r in m.live_requests()], ["requests with a table", "set()"]),
    ],
)
def test_a_broken_manager_is_noticed(
    manager: KVCacheManager, breakage: Callable[[KVCacheManager], object], words: list[str]
) -> None:
    breakage(manager)
    with pytest.raises(InvariantError) as error:
        check(manager)
    assert all(word in str(error.value) for word in words), error.value


def test_two_requests_that_write_one_block_are_noticed(manager: KVCacheManager) -> None:
    pool, group = manager.block_pool, manager.coordinator.single_type_managers[0]
    shared = group.tables["b"].slice(1, 2)  # b's second block, which it still writes
    pool.adopt(group.tables["a"], shared, 0, 1)
    with pytest.raises(InvariantError, match="content that is written to block 5"):
        check(manager)
