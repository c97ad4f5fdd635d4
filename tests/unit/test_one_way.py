"""All calls take one way, which is short, and reads everything before it changes anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvpager import BlockHasher, CacheConfig, FullAttention, KVCacheManager, Request, SlidingWindow, check_manager
from kvpager.blocks import KVCacheBlocks

SPECS = [FullAttention(block_size=16), *(SlidingWindow(block_size=16, window=128) for _ in range(3))]


def make_manager(**options: Any) -> tuple[KVCacheManager, Callable[[str, int], Request]]:
    config = CacheConfig.uniform(400, SPECS)
    manager, hasher = KVCacheManager(config, max_model_len=2048, **options), BlockHasher.for_config(config)
    return manager, lambda name, tokens: Request(name, range(ord(name[0]), ord(name[0]) + tokens), block_hasher=hasher)


def profiled_calls(call: Callable[[], object]) -> int:
    """How many calls, of Python and of C, the interpreter's profiler sees."""
    count = 0

    def profile(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_an_admission_with_a_hit_is_a_few_calls() -> None:
    manager, make = make_manager(log_stats=True)
    assert manager.allocate_slots(make("first", 500), 500) is not None
    second = make("follower", 500)

    def admit() -> None:
        blocks, hit = manager.get_computed_blocks(second)
        assert hit == 496
        assert manager.allocate_slots(second, 500 - hit, hit, blocks, full_sequence_must_fit=True) is not None

    assert profiled_calls(admit) <= 15


@pytest.mark.parametrize("options", [{}, {"full_sequence_must_fit": True}, {"num_external_computed_tokens": 32}])
def test_a_refusal_is_a_few_calls(options: dict[str, Any]) -> None:
    manager, make = make_manager()
    request = make("big", 1000)

    def ask() -> None:
        blocks, hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 900, hit, blocks, reserved_blocks=390, **options) is None

    assert profiled_calls(ask) <= 20


class Failing:
    """An event source that fails in one of its answers."""

    def __init__(self, failing: str) -> None:
        self._failing = failing

    def _answer(self, name: str) -> None:
        if name == self._failing:
            raise RuntimeError(name)

    @property
    def lora_id(self) -> None:
        self._answer("lora_id")

    @property
    def lora_name(self) -> None:
        self._answer("lora_name")

    def extra_keys(self, block_start: int, block_end: int) -> tuple[object, ...] | None:
        self._answer("extra_keys" if block_end - block_start > 16 else "extra_keys of a block")
        return ("some",)


@pytest.mark.parametrize("failing", ["lora_id", "lora_name", "extra_keys", "extra_keys of a block"])
def test_what_events_tell_is_read_before_anything_changes(failing: str) -> None:
    source: Any = Failing(failing)
    manager, make = make_manager(enable_kv_cache_events=True, event_source=lambda _: source)
    request = make("a", 200)
    loading = make("b", 300)
    options: dict[str, Any] = {"num_external_computed_tokens": 96, "delay_cache_blocks": True}
    source = Failing("")
    assert manager.allocate_slots(loading, 1, **options) is not None
    source = Failing(failing)
    before = manager.block_pool.num_free, manager.block_pool.index()
    for call in (
        lambda: manager.allocate_slots(request, 200),
        lambda: manager.allocate_decode_slots([request], [200]),
        lambda: manager.cache_blocks(loading, 96),
    ):
        with pytest.raises(RuntimeError, match=failing):
            call()
        assert (manager.block_pool.num_free, manager.block_pool.index()) == before
        assert manager.live_requests() == [loading] and manager.take_events() == []
        check_manager(manager)
    source = Failing("")
    assert manager.allocate_slots(request, 200) is not None
    manager.cache_blocks(loading, 96)
    assert len(manager.take_events()) == 2 * len(SPECS)


@pytest.mark.parametrize("bad", [2**63, 2**70, -1, float("nan"), 1.0, True, "1", None])
@pytest.mark.parametrize(
    "name",
    [
        "num_new_tokens",
        "num_new_computed_tokens",
        "num_lookahead_tokens",
        "num_external_computed_tokens",
        "num_encoder_tokens",
        "reserved_blocks",
    ],
)
def test_every_count_is_checked_before_anything_happens(name: str, bad: Any) -> None:
    manager, make = make_manager()
    running, new = make("running", 40), make("new", 40)
    assert manager.allocate_slots(running, 40) is not None
    running.num_computed_tokens = 40
    running.append_output_token_ids(1)
    before = manager.get_block_ids("running"), manager.block_pool.free_queue()
    for request in (running, new):
        for call in (manager.allocate_slots, manager.probe):
            if name == "num_new_computed_tokens" and call == manager.probe:
                continue
            if name == "num_new_tokens" and bad is None and call == manager.probe:
                continue  # all that are left
            with pytest.raises(ValueError, match=f"{name} must be an integer") as error:
                call(request, **{"num_new_tokens": 1, name: bad})  # type: ignore[operator]
            assert repr(bad) in str(error.value)
    assert (manager.get_block_ids("running"), manager.block_pool.free_queue()) == before
    check_manager(manager)


def test_a_hit_that_a_host_made_up_is_refused() -> None:
    """Ids that are not the pool's, in blocks that say they are."""
    from kvpager import BlockList, KVPagerError

    manager, make = make_manager()
    request = make("a", 40)
    made = KVCacheBlocks(manager.block_pool, [BlockList([10**6, 10**6 + 1]) for _ in SPECS])
    with pytest.raises(KVPagerError):
        manager.allocate_slots(request, 8, 32, made)
    check_manager(manager)
