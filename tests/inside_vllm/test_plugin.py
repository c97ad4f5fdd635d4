"""The plug-in beside vLLM's own classes: registering, hashes, events, statistics, residency, pool views."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM 0.25.1; `make test-vllm` runs these tests where it is")

import msgspec
import torch
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.core.kv_cache_manager import KVCacheManager as VLLM
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, make_block_hash_with_group_id
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SinkFullAttentionSpec
from vllm.v1.metrics.stats import PrefixCacheStats

from kvpager.errors import ConfigError
from kvpager.integrations import vllm as plugin
from kvpager.integrations.vllm import v0_25_1

from .hosts import BLOCK, KVPAGER, full, manager, request, window

HASHES_OF_8 = get_request_block_hasher(8, sha256_cbor)
LORA = LoRARequest(lora_name="poet", lora_int_id=3, lora_path="/nowhere")


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem.dummy(), mm_position=place, identifier=identifier, modality="image"
    )


# -- registering --------------------------------------------------------------------------------


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(scheduler_module, "KVCacheManager", VLLM)
    monkeypatch.delenv("KVPAGER_VLLM", raising=False)
    return monkeypatch


def test_off_unless_asked_for(untouched: pytest.MonkeyPatch) -> None:
    for value in (None, "0", "", "yes"):
        if value is not None:
            untouched.setenv("KVPAGER_VLLM", value)
        plugin.register()
        assert scheduler_module.KVCacheManager is VLLM


def test_registering_twice_is_registering_once(untouched: pytest.MonkeyPatch) -> None:
    untouched.setenv("KVPAGER_VLLM", "1")
    plugin.register()
    plugin.register()
    assert scheduler_module.KVCacheManager is KVPAGER


def test_another_version_is_told_once_and_left_alone(untouched: pytest.MonkeyPatch, said: list[str]) -> None:
    untouched.setenv("KVPAGER_VLLM", "1")
    untouched.setattr(plugin, "_vllm_version", lambda: "0.99.0")
    untouched.setattr(plugin, "_said", set())
    for _ in range(3):
        plugin.register()
    assert scheduler_module.KVCacheManager is VLLM
    (message,) = said
    assert "0.25.1" in message and "0.99.0" in message


def test_a_version_that_is_known_is_the_one_installed() -> None:
    assert plugin._vllm_version() in plugin.VERSIONS


# -- hashes -------------------------------------------------------------------------------------

KINDS = ["plain", "salt", "LoRA", "images", "everything"]


def options_of(kind: str, length: int) -> dict[str, Any]:
    """What a request of the kind has beside ``length`` tokens."""
    third = max(1, length // 3)
    images = [image(name, start, third) for name, start in (("cat", 0), ("dog", third), ("owl", length - third))]
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "salt": {"cache_salt": "sesame"},
        "LoRA": {"lora_request": LORA},
        "images": {"mm_features": images if length >= 3 else images[:1]},
        "everything": {"cache_salt": "s", "lora_request": LORA, "mm_features": images[:1]},
    }
    return options[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 160, 1000])
def test_hashes_are_byte_equal(kind: str, length: int) -> None:
    source = random.Random(length)
    prompt = [source.randrange(150_000) for _ in range(length)]
    factories = (v0_25_1.get_request_block_hasher, get_request_block_hasher)
    ours, theirs = (
        request("a", prompt, block_hasher=factory(BLOCK, sha256_cbor), **options_of(kind, length))
        for factory in factories
    )
    assert ours.block_hashes == theirs.block_hashes
    for _ in range(40):
        token = source.randrange(150_000)
        ours.append_output_token_ids(token)
        theirs.append_output_token_ids(token)
    assert ours.block_hashes == theirs.block_hashes
    assert len(ours.block_hashes) == (length + 40) // BLOCK


def test_hashes_of_prompt_embeddings_are_byte_equal() -> None:
    embeddings = torch.arange(50 * 8, dtype=torch.float32).reshape(50, 8)
    ours, theirs = (
        request("a", [0] * 50, block_hasher=factory(BLOCK, sha256_cbor), prompt_embeds=embeddings)
        for factory in (v0_25_1.get_request_block_hasher, get_request_block_hasher)
    )
    assert len(ours.block_hashes) == 3 and ours.block_hashes == theirs.block_hashes


def test_another_algorithm_stays_with_vllm(said: list[str]) -> None:
    ours = request("a", range(40), block_hasher=v0_25_1.get_request_block_hasher(BLOCK, sha256))
    theirs = request("a", range(40), block_hasher=get_request_block_hasher(BLOCK, sha256))
    assert ours.block_hashes == theirs.block_hashes
    assert len(said) == 1 and "sha256_cbor" in said[0]


# -- events -------------------------------------------------------------------------------------


def busy(kind: Any) -> list[Any]:
    """Events of a small life: every request in turn, in a pool where each pushes out another."""
    host = manager(kind, num_blocks=12, enable_kv_cache_events=True)
    events = []
    for number, name in enumerate(KINDS):
        one = request(name, [number] * 20 + list(range(100)), **options_of(name, 120))
        hits, num_hits = host.get_computed_blocks(one)
        assert host.allocate_slots(one, one.num_tokens - num_hits, num_hits, hits) is not None
        events += host.take_events()
        host.free(one)
        events += host.take_events()
    assert host.reset_prefix_cache()
    return events + host.take_events()


def test_events_are_vllms_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_VLLM_EVICTION", "recency")
    ours, theirs = busy(KVPAGER), busy(VLLM)
    assert {type(event) for event in ours} == {type(event) for event in theirs}
    assert len({type(event) for event in ours}) == 3
    encode = msgspec.msgpack.encode
    assert [encode(event) for event in _one_hash_each(ours)] == [encode(event) for event in _one_hash_each(theirs)]


def _one_hash_each(events: list[Any]) -> list[Any]:
    """``BlockRemoved`` one hash at a time, as either may group them as it likes."""
    split = []
    for event in events:
        if isinstance(event, BlockRemoved):
            split += [BlockRemoved([block], event.medium, event.group_idx) for block in event.block_hashes]
        else:
            split.append(event)
    return split


def test_vllms_publisher_sends_them() -> None:
    events = busy(KVPAGER)
    publisher = ZmqEventPublisher(0, endpoint="inproc://kvpager-events", topic="kv")
    with contextlib.ExitStack() as stack:
        stack.callback(publisher.shutdown)
        subscriber = stack.enter_context(zmq.Context.instance().socket(zmq.SUB))
        subscriber.connect("inproc://kvpager-events")
        subscriber.subscribe("kv")
        subscriber.setsockopt(zmq.RCVTIMEO, 100)
        frames = None
        for _ in range(50):  # until the subscription has arrived
            publisher.publish(KVEventBatch(ts=1.0, events=events))
            try:
                frames = subscriber.recv_multipart()
                break
            except zmq.Again:
                continue
        assert frames is not None
        received = msgspec.msgpack.decode(frames[-1], type=KVEventBatch)
    encode = msgspec.msgpack.encode
    assert encode(received.events) == encode(events)
    assert any(isinstance(event, BlockStored) and event.lora_name == "poet" for event in received.events)


HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
MAMBA: dict[str, Any] = {"shapes": ((1,),), "dtypes": (torch.float32,)}
NAMED_SPECS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "FullAttentionSpec": ("full_attention", None, HEADS),
    "TQFullAttentionSpec": ("full_attention", None, HEADS),
    "MLAAttentionSpec": ("mla_attention", None, HEADS),
    "HiddenStateCacheSpec": ("mla_attention", None, HEADS),
    "RSWASpec": ("full_attention", None, HEADS | {"rswa_window": 64}),
    "SinkFullAttentionSpec": ("sink_full_attention", None, HEADS | {"sink_len": 32}),
    "ChunkedLocalAttentionSpec": ("chunked_local_attention", None, HEADS | {"attention_chunk_size": 64}),
    "SlidingWindowSpec": ("sliding_window", 64, HEADS | {"sliding_window": 64}),
    "SlidingWindowMLASpec": ("sliding_window_mla", 64, HEADS | {"sliding_window": 64}),
    "MambaSpec": ("mamba", None, MAMBA | {"mamba_cache_mode": "all"}),
}
"""How vLLM names and describes each of its classes that can be hit."""
NEVER_STORED = {"KVCacheSpec", "AttentionSpec", "EncoderOnlyAttentionSpec", "CrossAttentionSpec"}
CANNOT_BE_BUILT_BY_VLLM = {"SinkFullAttentionSpec"}  # the constructor of its manager lacks an argument in 0.25.1


def stored_kinds(kind: Any, spec: Any) -> set[tuple[str | None, int | None]]:
    host = manager(kind, specs=[spec], enable_kv_cache_events=True)
    assert host.allocate_slots(request("a", range(100)), 100) is not None
    stored = [event for event in host.take_events() if isinstance(event, BlockStored)]
    return {(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in stored}


@pytest.mark.parametrize("name", NAMED_SPECS)
@pytest.mark.parametrize("in_layers", [False, True])
def test_events_name_a_kind_as_vllm_does(name: str, in_layers: bool) -> None:
    kind, size, options = NAMED_SPECS[name]
    spec = getattr(vllm_specs, name)(block_size=BLOCK, **options)
    if in_layers:
        spec = vllm_specs.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"first": spec, "second": spec})
    assert stored_kinds(KVPAGER, spec) == {(kind, size)}
    if name not in CANNOT_BE_BUILT_BY_VLLM and not in_layers:
        assert stored_kinds(VLLM, spec) == {(kind, size)}


def test_every_class_of_spec_is_among_them() -> None:
    def below(spec: type) -> set[str]:
        return {spec.__name__}.union(*(below(other) for other in spec.__subclasses__() if "vllm" in other.__module__))

    assert below(vllm_specs.KVCacheSpec) == {*NAMED_SPECS, *NEVER_STORED, "UniformTypeKVCacheSpecs"}


# -- statistics ---------------------------------------------------------------------------------


def test_an_admission_counts_once_however_often_it_was_tried() -> None:
    host = manager(num_blocks=12)
    first, second = request("first", range(160)), request("second", range(160))
    assert host.allocate_slots(first, 160)
    for _ in range(3):
        host.get_computed_blocks(second)
        assert host.allocate_slots(second, 160) is None
    host.free(first)
    hits, num_hits = host.get_computed_blocks(second)
    assert host.allocate_slots(second, 160 - num_hits, num_hits, hits)
    stats = host.make_prefix_cache_stats()
    assert type(stats) is PrefixCacheStats
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (2, 320, 144, False)
    host.free(second)
    assert host.reset_prefix_cache()
    stats = host.make_prefix_cache_stats()
    assert (stats.requests, stats.reset) == (0, True)


def test_usage_means_what_it_meant() -> None:
    ours, theirs = manager(KVPAGER), manager(VLLM)
    for host in (ours, theirs):
        host.allocate_slots(request("a", range(100)), 100)
    assert ours.usage == pytest.approx(theirs.usage) and ours.usage > 0
    assert ours.block_pool.get_usage() == ours.usage


def test_residency_is_told_to_vllms_collector() -> None:
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    host = manager(num_blocks=12, metrics_collector=collector)
    for name in ("a", "b"):  # b hits what a leaves, twice used
        one = request(name, range(100))
        hits, num_hits = host.get_computed_blocks(one)
        host.allocate_slots(one, 100 - num_hits, num_hits, hits)
        host.free(one)
    other = request("other", range(1000, 1170))
    assert host.allocate_slots(other, 170)
    ended = collector.drain_events()
    assert len(ended) == 6 + 2  # the full blocks, and what a and b had begun behind them
    assert all(event.lifetime_seconds >= 0 and event.idle_seconds >= 0 for event in ended)


@pytest.mark.parametrize("enable_caching", [True, False])
def test_residency_counts_what_vllm_counts(enable_caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_VLLM_EVICTION", "recency")
    ours, theirs = (num_stays_ended(kind, enable_caching) for kind in (KVPAGER, VLLM))
    assert ours == theirs and (ours > 30) == enable_caching


def num_stays_ended(kind: Any, enable_caching: bool) -> int:
    """Requests of odd lengths in a small pool: each leaves a block behind that is not full."""
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    host = manager(kind, num_blocks=12, metrics_collector=collector, enable_caching=enable_caching)
    for number in range(12):
        one = request(str(number), range(number % 3 * 1000, number % 3 * 1000 + 50 + 7 * number))
        hits, num_hits = host.get_computed_blocks(one)
        assert host.allocate_slots(one, one.num_tokens - num_hits, num_hits, hits) is not None
        host.free(one)
    return len(collector.drain_events())


# -- what connectors see of the pool ------------------------------------------------------------


def test_blocks_of_the_pool_have_their_group_in_the_hash() -> None:
    host = manager(specs=[full(), window(64)])
    one = request("a", range(100))
    host.allocate_slots(one, 100)
    for group, ids in enumerate(host.get_block_ids("a")):
        for position, block_id in enumerate(ids):
            block = host.block_pool.blocks[block_id]
            expected = make_block_hash_with_group_id(one.block_hashes[position], group) if position < 6 else None
            assert (block.block_id, block.block_hash, block.ref_cnt, block.is_null) == (block_id, expected, 1, False)
    assert host.block_pool.blocks[0].is_null and host.block_pool.null_block.is_null
    assert len(host.block_pool.blocks) == 64 and len(host.block_pool.blocks[2:5]) == 3


def test_a_block_is_the_same_wherever_it_comes_from() -> None:
    host = manager(specs=[full(), window(32)])
    pool = host.block_pool
    first, second = request("first", range(100)), request("second", range(100))
    allocated = host.allocate_slots(first, 100)
    hits, num_hits = host.get_computed_blocks(second)
    assert num_hits == 96
    each, _ = host.coordinator.find_longest_cache_hit_per_group(second.block_hashes, 99)
    whole, joined = host.get_blocks("first"), allocated + allocated.new_empty()
    made = host.create_kv_cache_blocks(whole.blocks)
    tables = [group.req_to_blocks["first"] for group in host.coordinator.single_type_managers]
    places = [*(blocks.blocks for blocks in (allocated, hits, whole, joined, made)), each, tables]
    for groups in places:
        for group, blocks in enumerate(groups):
            assert list(blocks) == [pool.blocks[block.block_id] for block in blocks] == blocks[:]
            hashes = {block.block_hash for block in blocks[:6] if not block.is_null}
            known = {make_block_hash_with_group_id(block_hash, group) for block_hash in first.block_hashes}
            assert hashes and hashes <= known
    assert hits.blocks[1][0] == pool.null_block and len({pool.null_block, hits.blocks[1][0]}) == 1


def test_the_free_queue_says_how_long_it_is_now() -> None:
    host = manager()
    queue = host.block_pool.free_block_queue
    host.allocate_slots(request("a", range(40)), 40)
    assert queue.num_free_blocks == host.block_pool.get_num_free_blocks() == 60


def test_a_touched_block_outlives_its_request() -> None:
    host = manager()
    one = request("a", range(40))
    host.allocate_slots(one, 40)
    (ids,) = host.get_block_ids("a")
    host.block_pool.touch([host.block_pool.blocks[block_id] for block_id in ids[:2]])
    host.free(one)
    assert host.block_pool.get_num_free_blocks() == 63 - 2
    assert not host.reset_prefix_cache()
    host.block_pool.free_blocks(host.block_pool.blocks[block_id] for block_id in ids[:2])
    assert host.block_pool.get_num_free_blocks() == host.block_pool.free_block_queue.num_free_blocks == 63
    host.check()


def test_the_old_queue_is_refused_by_name() -> None:
    host = manager()
    with pytest.raises(AttributeError, match=r"fake_free_list_head.*KVPAGER_VLLM=0"):
        _ = host.block_pool.free_block_queue.fake_free_list_head


def test_groups_pass_for_vllms_classes_and_show_their_tables() -> None:
    host = manager(specs=[full(), window(64)])
    first, second = host.coordinator.single_type_managers
    assert isinstance(first, FullAttentionManager) and isinstance(second, SlidingWindowManager)
    one = request("a", range(100))
    host.allocate_slots(one, 100)
    assert "a" in first.req_to_blocks and len(second.req_to_blocks["a"]) == 7
    assert first.num_cached_block["a"] == 6
    host.free(one)
    assert not first.req_to_blocks and "a" not in second.num_cached_block


# -- hits ---------------------------------------------------------------------------------------


def eagle_config() -> Any:
    """Blocks of 8 tokens in two equal windows, one of them EAGLE's, and of 32 where all is read."""
    wide = vllm_specs.FullAttentionSpec(block_size=32, **HEADS)
    narrow = vllm_specs.SlidingWindowSpec(block_size=8, sliding_window=8, **HEADS)
    groups = [
        vllm_specs.KVCacheGroupSpec(["full"], wide),
        vllm_specs.KVCacheGroupSpec(["main"], narrow),
        vllm_specs.KVCacheGroupSpec(["drafts"], narrow, is_eagle_group=True),
    ]
    return vllm_specs.KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("num_tokens", [32, 39, 40, 41, 64, 71, 72, 73, 100, 128, 200])
def test_a_window_beside_eagles_caches_one_block_less_and_is_hit_alike(num_tokens: int) -> None:
    """vLLM looks equal windows up together, so that both need the block behind the hit; only EAGLE's reads it."""
    hits, cached = [], []
    for kind in (KVPAGER, VLLM):
        host = kind(eagle_config(), 512, 32, 8, use_eagle=True)
        first, second = (request(name, range(num_tokens), block_hasher=HASHES_OF_8) for name in ("a", "b"))
        assert host.allocate_slots(first, num_tokens) is not None
        blocks = host.get_blocks("a").blocks
        cached.append([sum(block.block_hash is not None for block in group) for group in blocks])
        host.free(first)
        hits.append(host.get_computed_blocks(second)[1])
    assert hits[0] == hits[1]
    ours, theirs = cached
    assert ours[0] == theirs[0] and ours[2] == theirs[2]
    assert ours[1] == num_tokens // 32 <= theirs[1]


# -- configurations -----------------------------------------------------------------------------


def test_static_sinks_are_set_aside_and_not_in_tables() -> None:
    sinks = SinkFullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sink_len=32)
    host = manager(specs=[sinks])  # vLLM 0.25.1 cannot build its own: its constructor lacks an argument
    host.allocate_slots(request("a", range(40)), 40)
    assert host.get_block_ids("a") == ([3, 4, 5],)
    host.check()


def test_somebodys_own_kind_of_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v0_25_1, "_KNOWN_MANAGERS", frozenset())
    with pytest.raises(ConfigError, match=r"FullAttentionSpec.*unset KVPAGER_VLLM"):
        manager()


def test_what_kvpager_does_not_do_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, attention_chunk_size=40
    )
    with pytest.raises(ConfigError, match="40"):
        manager(specs=[chunked])
    with pytest.raises(ConfigError, match="aligns hits to 32"):
        manager(specs=[full(), window(64)], scheduler_block_size=32)
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "64")
    with pytest.raises(ConfigError, match="VLLM_PREFIX_CACHE_RETENTION_INTERVAL"):
        manager(specs=[full()])
    assert manager(specs=[full(), window(64)]).manager.kv_cache_config.retention_interval == 64


def test_an_unknown_eviction_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_VLLM_EVICTION", "lru")
    with pytest.raises(ConfigError, match="KVPAGER_VLLM_EVICTION is 'lru'; set it to dead_first or recency"):
        manager()


def test_max_tokens_beyond_the_cache_does_not_block_the_queue(said: list[str]) -> None:
    host = manager(num_blocks=12)
    assert "cannot hold a sequence of max_model_len" in said.pop()
    assert host.allocate_slots(request("modest", range(40), max_tokens=10**6), 40) is not None
    giant = request("giant", range(300))
    for _ in range(3):
        host.get_computed_blocks(giant)
        assert host.allocate_slots(giant, 300) is None
    assert len(said) == 1 and "giant" in said[0] and "waits for ever" in said[0]
