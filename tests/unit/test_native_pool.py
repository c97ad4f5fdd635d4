"""What the compiled pool survives: wrong types, ids and ranges, lists made by hand, callbacks, threads, its own end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from kvpager import BlockList, BlockPool
from kvpager.errors import (
    BlockStateError,
    ConfigError,
    InvalidRequestError,
    UnknownBlockError,
)


def state(pool: BlockPool) -> Any:
    refs = [(pool.ref_count(i), pool.outside_count(i), pool.block_hash(i)) for i in range(pool.num_blocks)]
    return pool.free_queue(), pool.index(), refs, pool.num_free, pool.num_popped, pool.generation


# -- wrong arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("touch", (5,)),
        ("allocate", (None,)),
    ],
)
def test_wrong_types(verb: str, arguments: tuple[Any, ...]) -> None:
    pool = BlockPool(8, 1)
    pool.reserve(2)
    before = state(pool)
    with pytest.raises(TypeError):
        getattr(pool, verb)(*arguments)
    assert state(pool) == before


@pytest.mark.parametrize(
    ("verb", "arguments", "error"),
    [
        ("touch", ([3, 8],), UnknownBlockError),
        ("touch", ([3, -1],), UnknownBlockError),
        ("touch", ([3, 2**70],), UnknownBlockError),
        ("touch", (["3"],), UnknownBlockError),
        ("free_blocks", ([1],), BlockStateError),
        ("free_blocks", ([0],), BlockStateError),
        ("evict_blocks", ([9],), UnknownBlockError),
    ],
)
def test_refused_and_nothing_changed(verb: str, arguments: tuple[Any, ...], error: type[Exception]) -> None:
    pool = BlockPool(8, 1)
    pool.reserve(2)
    before = state(pool)
    with pytest.raises(error):
        getattr(pool, verb)(*arguments)
    assert state(pool) == before


@pytest.mark.parametrize("number", [-1, 2**31, 2**70, "1", None, 1.0])
def test_list_of_what_are_no_ids(number: Any) -> None:
    with pytest.raises(UnknownBlockError):
        BlockList([number])


@pytest.mark.parametrize(
    "options", [{"num_blocks": 0}, {"num_blocks": 2**31}, {"num_groups": -1}, {"eviction_order": "lru"}]
)
def test_bad_pools(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BlockPool(**{"num_blocks": 8, "num_groups": 1, **options})


def test_a_list_behaves_like_one() -> None:
    blocks = BlockList(range(5))
    assert (len(blocks), blocks[0], blocks[-1], list(blocks)) == (5, 0, 4, [0, 1, 2, 3, 4])
    assert blocks.ids(1) == blocks.ids()[1:]
    assert blocks.ids(-2, 99) == [3, 4]
    assert blocks.slice(1, 3).ids() == [1, 2]
    with pytest.raises(IndexError):
        blocks[5]
    with pytest.raises(IndexError):
        blocks[-6]


def test_rows_are_filled_without_an_object_a_block() -> None:
    rows = np.zeros((2, 8), np.int32)
    assert BlockList([4, 5]).copy_into(rows[1], 3) == 5
    assert rows.tolist() == [[0] * 8, [0, 0, 0, 4, 5, 0, 0, 0]]
    assert BlockList([7, 8]).copy_into(rows[:, 0]) == 2
    assert rows[:, 0].tolist() == [7, 8]
    for offset in (7, -1):
        with pytest.raises(InvalidRequestError, match="do not fit"):
            BlockList([1, 2]).copy_into(rows[0], offset)
    with pytest.raises(TypeError):
        BlockList([1]).copy_into(np.zeros(3, np.int64))


# -- the pool's end ---------------------------------------------------------------------------------


class Watcher:
    """A residency sampler that does what it is told to."""

    def __init__(self) -> None:
        self.then: Any = lambda: None
        self.calls: list[tuple[str, int]] = []

    def allocated(self, block_id: int) -> None:
        self._note("allocated", block_id)

    def used(self, block_id: int) -> None:
        self._note("used", block_id)

    def evicted(self, block_id: int) -> None:
        self._note("evicted", block_id)

    def reset(self) -> None:
        self._note("reset", 0)

    def _note(self, what: str, block_id: int) -> None:
        self.calls.append((what, block_id))
        self.then()


def test_a_pool_and_its_observer_that_know_each_other_can_go() -> None:
    watcher: Any = Watcher()
    watcher.pool = BlockPool(8, 1, residency=watcher)
    gone = weakref.ref(watcher)
    del watcher
    gc.collect()
    assert gone() is None


# -- re-entrance ------------------------------------------------------------------------------------


def test_an_observer_may_call_the_pool() -> None:
    watcher: Any = Watcher()
    pool = BlockPool(16, 1, residency=watcher)
    inner: list[int] = []

    def allocate_once() -> None:
        watcher.then = lambda: None
        inner.extend(pool.allocate(2))

    watcher.then = allocate_once
    assert (pool.allocate(4), inner) == ([1, 2, 3, 4], [5, 6])
    assert sorted(watcher.calls) == [("allocated", i) for i in range(1, 7)]
    pool.free_blocks([1, 2, 3, 4, 5, 6])
    assert pool.num_free == 15


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_observer_that_fails_undoes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    watcher: Any = Watcher()
    pool = BlockPool(8, 1, residency=watcher)

    def fail() -> None:
        raise RuntimeError("observer")

    watcher.then = fail
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.num_popped == 3
    assert len(watcher.calls) == 3


def test_arguments_that_run_code_see_a_whole_pool() -> None:
    pool = BlockPool(16, 1)
    taken = pool.allocate(4)

    class Meddler(list[Any]):
        def __iter__(self) -> Any:
            pool.free_blocks(taken)
            return iter([5, 6])

    pool.touch(Meddler())
    assert (pool.num_free, pool.num_popped) == (13, 2)


def test_a_block_that_was_never_used_is_touched_out_of_the_middle() -> None:
    pool = BlockPool(8, 1)
    pool.touch([5])
    assert pool.free_queue() == [1, 2, 3, 4, 6, 7]
    pool.touch([2])
    assert pool.allocate(5) == [1, 3, 4, 6, 7]
    pool.free_blocks([2, 5])
    assert sorted(pool.allocate(2)) == [2, 5]


def test_threads_that_share_a_pool() -> None:
    """The GIL makes calls atomic: whatever the threads' order, the pool stays whole."""
    pool = BlockPool(300, 1, enable_events=True)
    failures: list[Exception] = []
    until = time.monotonic() + 0.5

    def work(number: int) -> None:
        try:
            while time.monotonic() < until:
                taken = pool.allocate(8)
                pool.touch(taken[:3])
                pool.free_blocks(taken[:3])
                pool.free_blocks(taken)
                pool.evict_blocks([number + 1])
                pool.take_events()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.num_free == 299
    assert sorted(pool.free_queue()) == list(range(1, 300))


def test_a_big_pool_starts_at_once() -> None:
    started = time.perf_counter()
    pool = BlockPool(1_000_000, 4)
    assert time.perf_counter() - started < 0.05
    assert pool.allocate(2) == [1, 2]
    pool.touch([999_999])  # out of the middle of what was never used
    pool.free_blocks([999_999])
    assert pool.num_free == 999_997
