"""Differences that a random walk can't steer through: one scenario each, both sides asserted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as VllmRequest

from kvpager.errors import BlockStateError, ConfigError, DuplicateRequestError
from kvpager.extra_keys import LoRA
from kvpager.hashing import BlockHasher
from kvpager.manager import Fit
from kvpager.request import Request

from .conftest import SEED
from .differences import DIFFERENCES
from .kvpager_side import KvpagerSide, make_config
from .layouts import FULL, WINDOW, Layout
from .reference import Kind
from .side import Allocation, Extras
from .vllm_side import VllmSide, make_manager

PLAIN = Layout(name="full", kinds=(FULL,))
HYBRID = Layout(name="full + window", kinds=(FULL, WINDOW))
NUM_BLOCKS = 40


def both(layout: Layout, num_blocks: int = NUM_BLOCKS) -> tuple[VllmSide, KvpagerSide]:
    return VllmSide(layout, num_blocks), KvpagerSide(layout, num_blocks)


def admit(side: VllmSide | KvpagerSide, rid: str, prompt: list[int], num_external: int = 0) -> list[list[int]]:
    """A request computes its whole prompt in one step; the blocks that it hit."""
    side.new(rid, prompt, 4, Extras())
    blocks, hit, ids = side.hit(rid)
    num_new = len(prompt) - hit - num_external
    allocation = Allocation(num_new=num_new, num_hit=hit, hit_blocks=blocks, num_external=num_external)
    assert side.allocate(rid, allocation) is not None
    side.set_computed(rid, len(prompt))
    side.set_status(rid, "running")
    return ids


def test_lora_named_like_a_salt() -> None:
    assert "LoRA named like a salt" in DIFFERENCES
    hash_function = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(4, hash_function)
    plain: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3, 4],
        "sampling_params": SamplingParams(),
        "pooling_params": None,
    }
    lora = VllmRequest(request_id="a", lora_request=LoRARequest("x", 1, "path"), block_hasher=hasher, **plain)
    salt = VllmRequest(request_id="b", cache_salt="x", block_hasher=hasher, **plain)
    assert lora.block_hashes == salt.block_hashes

    ours = BlockHasher(4)
    adapter = Request("a", [1, 2, 3, 4], block_hasher=ours, lora=LoRA(name="x", id=1))
    salted = Request("b", [1, 2, 3, 4], block_hasher=ours, cache_salt="x")
    assert adapter.block_hashes != salted.block_hashes
    compatible = BlockHasher(4, seed=SEED, algorithm="sha256_cbor")
    assert Request("c", [1, 2, 3, 4], block_hasher=compatible, cache_salt="x").block_hashes == salt.block_hashes


def test_double_free() -> None:
    assert "double free" in DIFFERENCES
    vllm, pager = both(PLAIN)
    for side in (vllm, pager):
        admit(side, "a", [1] * 8)
    blocks, ids = vllm.pop("a"), pager.pop("a")
    vllm.give_back(blocks)
    vllm.give_back(blocks[-1:])
    assert vllm.manager.block_pool.blocks[blocks[-1]].ref_cnt == -1

    pager.give_back(ids)
    before = pager.state()
    with pytest.raises(BlockStateError, match=str(ids[-1])):
        pager.give_back(ids[-1:])
    assert pager.state() == before
    pager.check()


def test_tokens_in_flight() -> None:
    assert "tokens in flight" in DIFFERENCES
    vllm, pager = both(HYBRID)
    for side in (vllm, pager):
        admit(side, "a", list(range(24)))
        side.append("a", [7])
    pager.requests["a"].num_in_flight_tokens = 12
    for side in (vllm, pager):
        assert side.allocate("a", Allocation(num_new=1)) is not None
    freed = [position for position, block in enumerate(vllm.table("a")[1]) if block == 0]
    kept = [position for position, block in enumerate(pager.table("a")[1]) if block]
    assert freed == list(range(WINDOW.dead_blocks(24)))
    assert kept[0] == WINDOW.dead_blocks(12) < len(freed)  # the step in flight still reads them


def test_failed_load() -> None:
    assert "failed load" in DIFFERENCES
    vllm, pager = both(PLAIN)
    prompt = list(range(16))
    garbage = {}
    for side in (vllm, pager):
        admit(side, "a", prompt, num_external=8)
        garbage[side.name] = side.table("a")[0]
    vllm.evict(set(garbage["vLLM"][1:2]))
    assert pager.manager.invalidate_blocks(garbage["kvpager"][1:2]) == {"a": 4}
    for side in (vllm, pager):
        admit(side, "b", [*prompt[:8], 99])  # somebody computes the lost block again
    hit_by_vllm, hit_by_pager = admit(vllm, "c", prompt)[0], admit(pager, "c", prompt)[0]
    assert garbage["vLLM"][2] in hit_by_vllm  # computed from what never arrived
    assert not set(garbage["kvpager"][1:]) & set(hit_by_pager)


def test_duplicate_request_id() -> None:
    assert "duplicate request id" in DIFFERENCES
    vllm, pager = both(PLAIN)
    for side in (vllm, pager):
        admit(side, "a", [1, 2, 3])
        side.new("a", [4] * 20, 4, Extras())  # another request, the same id
    held = len(vllm.table("a")[0])
    assert vllm.allocate("a", Allocation(num_new=20)) is not None
    assert len(vllm.table("a")[0]) == 5 > held == 1  # it goes on in the other's table
    before = pager.state()
    with pytest.raises(DuplicateRequestError, match="'a'"):
        pager.allocate("a", Allocation(num_new=20))
    assert pager.state() == before


def test_queries_write() -> None:
    assert "queries write" in DIFFERENCES
    vllm, pager = both(HYBRID)
    shared = list(range(24))
    for side in (vllm, pager):
        admit(side, "a", [*shared, 1, 2, 3, 4, 5, 6, 7, 8])
        window = [block for block in side.table("a")[1] if block]
        side.evict(set(window[:-2]))  # the window's blocks before the shared prefix's end are gone
        side.new("b", [*shared, 9, 9, 9, 9], 4, Extras())
        side.new("c", [5] * 24, 4, Extras(skip=True))
    coordinator: Any = vllm.manager.coordinator
    vllm.hit("b")
    hint = coordinator.num_uncached_common_prefix_tokens
    vllm.hit("c")  # reads nothing of the cache, and would be split at b's junction
    assert coordinator.num_uncached_common_prefix_tokens == hint > 0

    before = pager.state()
    for_b, _, _ = pager.hit("b")
    for_c, _, _ = pager.hit("c")
    assert for_b.junction == hint and for_c.junction == 0
    assert pager.state() == before


def test_hit_state_that_a_load_makes_useless() -> None:
    assert "step: over-counted" in DIFFERENCES
    vllm, pager = both(Layout(name="states", kinds=(FULL, Kind(name="mamba-align"))))
    prompt = list(range(13))
    for side in (vllm, pager):
        side.new("a", prompt[:8], 4, Extras())
        assert side.allocate("a", Allocation(num_new=8)) is not None
        side.free("a")
        side.new_step()
        side.new("b", prompt, 4, Extras())
    free = NUM_BLOCKS - 1
    # Three blocks of attention and the loaded state: the state that was hit is not read any more.
    for spare, vllm_takes_it, pager_takes_it in ((3, False, False), (4, False, True)):
        for side, takes_it in ((vllm, vllm_takes_it), (pager, pager_takes_it)):
            blocks, hit, _ = side.hit("b")
            load = Allocation(
                num_new=0, num_hit=hit, hit_blocks=blocks, num_external=4, delay=True, reserved=free - spare
            )
            assert hit == 8 and (side.allocate("b", load) is not None) == takes_it
    assert free - len(pager.state().free) == 4


def test_chunk_not_a_multiple_of_the_block() -> None:
    assert "chunk not a multiple of the block" in DIFFERENCES
    layout = Layout(name="odd", kinds=(FULL, Kind(name="chunk", chunk=10)))
    make_manager(layout, NUM_BLOCKS)
    with pytest.raises(ConfigError, match="10"):
        make_config(layout, NUM_BLOCKS)


def test_never_fits_is_told() -> None:
    assert "never fits: told" in DIFFERENCES
    vllm, pager = both(PLAIN, num_blocks=9)
    for side in (vllm, pager):
        side.new("a", list(range(36)), 4, Extras())
        assert side.allocate("a", Allocation(num_new=36)) is None
    answer = pager.manager.probe(pager.requests["a"])
    assert answer.fit is Fit.NEVER and answer.num_tokens_that_fit == 32


def test_events_are_vllms_on_the_wire() -> None:
    _, pager = both(HYBRID)
    admit(pager, "a", list(range(24)))
    pager.evict({3})
    pager.free("a")
    assert pager.reset()
    events = pager.events()
    decoded = msgspec.msgpack.decode(
        msgspec.msgpack.encode(events),
        type=list[kv_events.BlockStored | kv_events.BlockRemoved | kv_events.AllBlocksCleared],
    )
    assert [type(event).__name__ for event in decoded] == [type(event).__name__ for event in events]
    for event, read in zip(events, decoded, strict=True):
        assert msgspec.to_builtins(event) == msgspec.to_builtins(read)
