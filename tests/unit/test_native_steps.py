"""What the compiled step survives: requests that misbehave while they are read, wrong types, cycles, many of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import pytest

from kvpager import BlockPool, CacheConfig, FullAttention, KVCacheManager, Request, check_manager
from kvpager._native import AttentionKind, KVCacheCoordinator, SingleTypeKVCacheManager
from kvpager.errors import ConfigError, InvalidRequestError


class Odd(Request):
    """A request that does something when the step reads how long its prompt is."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def then_once(self, act: Callable[[], object]) -> None:
        def then() -> None:
            self.then = lambda: None
            act()

        self.then = then

    @property
    def num_prompt_tokens(self) -> int:
        self.then()
        return self._prompt

    @num_prompt_tokens.setter
    def num_prompt_tokens(self, value: int) -> None:
        self._prompt = value


AnyRequest = TypeVar("AnyRequest", bound=Request)


def make_manager(**options: Any) -> KVCacheManager:
    return KVCacheManager(CacheConfig.uniform(20, [FullAttention(block_size=4)]), max_model_len=64, **options)


def running(manager: KVCacheManager, request: AnyRequest) -> AnyRequest:
    """The request, all of its prompt computed, about to need a new block."""
    assert manager.allocate_slots(request, request.num_tokens) is not None
    request.num_computed_tokens = request.num_tokens
    request.append_output_token_ids(1)
    return request


def test_a_request_that_is_freed_while_it_is_read() -> None:
    manager = make_manager()
    odd = Odd("odd", [1] * 4)
    running(manager, odd)
    odd.then_once(lambda: manager.free(odd))
    with pytest.raises(InvalidRequestError, match="starts over at 0"):
        manager.allocate_slots(odd, 1)
    assert manager.usage == 0
    check_manager(manager)


def test_a_request_that_is_freed_while_it_is_freed() -> None:
    manager = make_manager()
    odd = Odd("odd", [1] * 4)
    running(manager, odd)
    odd.then_once(lambda: manager.free(odd))
    manager.free(odd)
    assert manager.usage == 0 and not manager.live_requests()
    check_manager(manager)


def test_a_request_that_is_admitted_while_it_is_admitted() -> None:
    manager = make_manager()
    odd = Odd("odd", [1] * 4)
    blocks, hit = manager.get_computed_blocks(odd)
    odd.then_once(lambda: manager.allocate_slots(odd, 4, hit, blocks))
    assert manager.allocate_slots(odd, 4, hit, blocks) is manager.empty_kv_cache_blocks  # it has its block already
    assert [len(ids) for ids in manager.get_block_ids("odd")] == [1]
    check_manager(manager)


def test_a_request_that_steps_another_while_it_is_read() -> None:
    manager = make_manager()
    odd, other = Odd("odd", [1] * 4), running(manager, Request("other", [2] * 4))
    running(manager, odd)
    odd.then_once(lambda: manager.allocate_slots(other, 1))
    answer = manager.allocate_decode_slots([odd, other])
    assert (answer.refused, answer.changed()) == (None, [0])
    assert [len(manager.get_block_ids(name)[0]) for name in ("odd", "other")] == [2, 2]
    check_manager(manager)


def test_a_batch_that_shrinks_while_it_is_served() -> None:
    manager = make_manager()
    odd = Odd("odd", [1] * 4)
    batch = [running(manager, odd), *(running(manager, Request(f"{i}", [i] * 4)) for i in range(3))]
    odd.then = batch.clear
    requests = list(batch)
    assert manager.allocate_decode_slots(requests).changed() == [0, 1, 2, 3]
    check_manager(manager)


@pytest.mark.parametrize("name", ["num_computed_tokens", "num_tokens", "num_prompt_tokens", "block_hashes"])
def test_a_request_without_an_attribute(name: str) -> None:
    manager = make_manager()
    request = running(manager, Request("a", [1] * 4))
    value = getattr(request, name)
    delattr(request, name)
    with pytest.raises(AttributeError):
        manager.allocate_slots(request, 1)
    setattr(request, name, value)
    assert manager.allocate_slots(request, 1) is not None
    check_manager(manager)


@pytest.mark.parametrize("bad", [2**70, -1, "3", None])
def test_counts_that_cannot_be(bad: Any) -> None:
    manager = make_manager()
    request = running(manager, Request("a", [1] * 4))
    request.num_computed_tokens = bad
    with pytest.raises((TypeError, ValueError)):
        manager.allocate_slots(request, 1)
    with pytest.raises((TypeError, ValueError)):
        manager.allocate_decode_slots([request])
    request.num_computed_tokens = 4
    assert manager.allocate_slots(request, 1) is not None
    check_manager(manager)


@pytest.mark.parametrize("bad", [b"short", None, "text"])
def test_hashes_that_are_none_change_nothing(bad: Any) -> None:
    manager = make_manager()
    request = running(manager, Request("a", [1] * 6))
    request.append_output_token_ids([1, 1])
    request.block_hashes = [bad, bad]
    before = manager.get_block_ids("a"), manager.block_pool.free_queue()
    with pytest.raises(InvalidRequestError, match="a hash is 32 bytes"):
        manager.allocate_slots(request, 2)
    assert (manager.get_block_ids("a"), manager.block_pool.free_queue()) == before
    request.block_hashes = []
    assert manager.allocate_slots(request, 2) is not None
    check_manager(manager)


KIND: dict[str, Any] = {
    "content": "tokens",
    "block_size": 4,
    "lag": None,
    "span": 4,
    "num_speculative_states": 0,
    "keeps_prompt": False,
    "needs_whole_prefix": True,
}
GROUP: dict[str, Any] = {
    "group_id": 0,
    "hashes_per_block": 1,
    "alignment": 4,
    "commit_lookahead": 0,
    "draft_lookahead": 0,
    "shareable_decoded": None,
    "interval": None,
    "zeroes_new": False,
}
COORDINATOR: dict[str, Any] = {
    "hash_block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
    "watermark_blocks": 0,
    "can_hit": True,
    "trusts_max_tokens": True,
    "records_admissions": False,
}


def test_wrong_types() -> None:
    group = SingleTypeKVCacheManager(AttentionKind(**KIND), **GROUP)
    for pool, groups in (("pool", [group]), (BlockPool(8, 1), ["group"]), (BlockPool(8, 1), None)):
        with pytest.raises(TypeError):
            KVCacheCoordinator(pool, groups, **COORDINATOR)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="group 0 stands at place 0 of 0"):
        KVCacheCoordinator(BlockPool(8, 0), [group], **COORDINATOR)
    second = SingleTypeKVCacheManager(AttentionKind(**KIND), **GROUP | {"group_id": 1})
    with pytest.raises(InvalidRequestError, match="group 1 stands at place 0"):
        KVCacheCoordinator(BlockPool(8, 2), [second], **COORDINATOR)


@pytest.mark.parametrize(
    "bad",
    [
        {"block_size": 0},
        {"span": 6},
        {"span": 0},
        {"lag": -1},
        {"lag": 2**62},
        {"content": "heap"},
        {"block_size": True},
    ],
)
def test_numbers_that_describe_no_kind(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AttentionKind(**KIND | bad)


@pytest.mark.parametrize("bad", [{"alignment": 0}, {"alignment": 6}, {"hashes_per_block": 0}, {"interval": -4}])
def test_numbers_that_describe_no_group(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SingleTypeKVCacheManager(AttentionKind(**KIND), **GROUP | bad)


@pytest.mark.parametrize("bad", [0, 2**63, 2**41, 4.0, True])
def test_numbers_that_describe_no_coordinator(bad: Any) -> None:
    group = SingleTypeKVCacheManager(AttentionKind(**KIND), **GROUP)
    with pytest.raises(ConfigError, match="max_model_len must be an integer"):
        KVCacheCoordinator(BlockPool(8, 1), [group], **COORDINATOR | {"max_model_len": bad})


def test_requests_are_found_by_id_and_by_object() -> None:
    """Many come and go: the table by address grows and closes its gaps."""
    rng = Random(1)
    manager = KVCacheManager(CacheConfig.uniform(3_000, [FullAttention(block_size=4)]), max_model_len=64)
    live = dict[str, Request]()
    for number in range(2_000):
        if live and rng.random() < 0.45:
            manager.free(live.pop(rng.choice(list(live))))
        else:
            request = live[f"{number}"] = Request(f"{number}", [1])
            assert manager.allocate_slots(request, 1) is not None
        assert manager.live_requests() == list(live.values())
    for request in live.values():
        assert manager.probe(request, 1).num_blocks_needed == 0
    check_manager(manager)


def test_a_manager_that_knows_itself_can_go() -> None:
    class Hosted(Request):
        host: Host

    class Host:
        def __init__(self) -> None:
            self.manager = make_manager(enable_kv_cache_events=True, event_source=self.source)
            self.request = running(self.manager, Hosted("a", [1] * 4))
            self.request.host = self

        def source(self, request: Any) -> Any:
            return request

    host = Host()
    host.manager.allocate_slots(host.request, 1)
    gone = weakref.ref(host), weakref.ref(host.manager)
    del host
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class Slotted:
    """A host's request with slots; each test changes a class of its own."""

    __slots__ = ("num_computed_tokens",)

    def __init__(self, request: Request) -> None:
        self.num_computed_tokens = request.num_computed_tokens


def slotted_host(manager: KVCacheManager) -> Any:
    """A running request of a new class that has a slot for its computed tokens; one step has been made already."""
    names = ("request_id", "num_tokens", "num_prompt_tokens", "block_hashes", "status", "num_preemptions")
    names += ("skip_reading_prefix_cache", "all_token_ids")
    given = Request("host", [1] * 6)
    host = type("Host", (Slotted,), {name: getattr(given, name) for name in names})(given)
    assert manager.allocate_slots(host, 6) is not None
    host.num_computed_tokens = 6
    assert manager.allocate_slots(host, 1) is manager.empty_kv_cache_blocks
    return host


def test_a_slot_that_becomes_a_property() -> None:
    manager = make_manager()
    host = slotted_host(manager)
    type(host).num_computed_tokens = property(lambda self: 8)
    appended = manager.allocate_slots(host, 1)
    assert appended is not None and len(appended.blocks[0]) == 1  # 8 + 1 tokens need a third block


def test_a_slot_that_is_empty() -> None:
    manager = make_manager()
    host = slotted_host(manager)
    del host.num_computed_tokens
    with pytest.raises(AttributeError, match="num_computed_tokens"):
        manager.allocate_slots(host, 1)
    host.num_computed_tokens = 6
    assert manager.allocate_slots(host, 1) is manager.empty_kv_cache_blocks


def test_a_slot_of_another_class_is_none() -> None:
    manager = make_manager()
    host = slotted_host(manager)
    type(host).num_computed_tokens = Request.num_computed_tokens
    with pytest.raises(TypeError, match="num_computed_tokens"):
        manager.allocate_slots(host, 1)


@pytest.mark.parametrize("bad", [-1, 2.0, "6", None, 2**70])
def test_a_slot_with_no_count_in_it(bad: Any) -> None:
    manager = make_manager()
    host = slotted_host(manager)
    host.num_computed_tokens = bad
    with pytest.raises((InvalidRequestError, TypeError)):
        manager.allocate_slots(host, 1)
    host.num_computed_tokens = 6
    check_manager(manager)


def test_requests_of_many_classes_take_turns() -> None:
    manager = make_manager()
    hosts = [slotted_host(manager)]
    plain = running(manager, Request("plain", [1] * 7))
    for computed in (7, 8):
        for request in (*hosts, plain, *hosts):
            request.num_computed_tokens = computed
            appended = manager.allocate_slots(request, 1)
            assert appended is not None
    assert [len(ids) for ids in (*manager.get_block_ids("host"), *manager.get_block_ids("plain"))] == [3, 3]
