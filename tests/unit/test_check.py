"""check_manager notices each way in which a manager can be wrong, and says both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

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


class Wrong:
    """A coordinator that says something else than the true one about its tables."""

    def __init__(self, true: Any, **lies: Callable[..., Any]) -> None:
        self._true = true
        for name, lie in lies.items():
            setattr(self, name, lie)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._true, name)


def replace_table(manager: Any, name: str, ids: list[int]) -> None:
    true = manager.coordinator
    tables = {request_id: true.tables(request_id) for request_id in true.request_ids()} | {name: [BlockList(ids)]}
    manager.coordinator = Wrong(true, tables=tables.__getitem__, request_ids=lambda: list(tables))


def forget(manager: Any, name: str) -> None:
    """The request is not live any more, but nobody gave its blocks back."""
    true = manager.coordinator
    manager.coordinator = Wrong(
        true,
        live_requests=lambda: [one for one in true.live_requests() if one.request_id != name],
        request_ids=lambda: [one for one in true.request_ids() if one != name],
    )


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (lambda m: replace_table(m, "a", [1, 2]), ["references of requests to block 3", "1 is not 0"]),
        (lambda m: replace_table(m, "a", [1, 2, 3, 5]), ["references of requests to block 5", "1 is not 2"]),
        (lambda m: replace_table(m, "a", [1, 2, 3, 7]), ["references of requests to block 7", "0 is not 1"]),
        (lambda m: replace_table(m, "c", []), ["ids that have tables"]),
        (lambda m: forget(m, "b"), ["references of requests to block 4"]),
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
    pool, true = manager.block_pool, manager.coordinator
    tables = {"a": [BlockList([1, 2, 3, 5])], "b": [BlockList([4, 5])]}  # b's second block, which it still writes
    manager.coordinator = cast(Any, Wrong(true, tables=tables.__getitem__))
    manager.block_pool = cast(Any, Wrong(pool, ref_count=lambda block: 2 if block == 5 else pool.ref_count(block)))
    with pytest.raises(InvariantError, match="content that is written to block 5"):
        check(manager)
