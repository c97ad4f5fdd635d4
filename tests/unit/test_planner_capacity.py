"""What a plan says fits, held to the manager that takes its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpager.errors import ConfigError
from kvpager.manager import Fit, KVCacheManager
from kvpager.planner import Plan, PlanOptions, load_cache_config, plan
from kvpager.request import Request

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
STEP = 512

HYBRIDS = ["gemma-3-4b", "gpt-oss-20b", "qwen3-next-80b-a3b", "nemotron-h-8b", "falcon-h1-0.5b", "llama-4-scout"]
ALL_KINDS = ["llama-3.1-8b", "mistral-7b-v0.1", "deepseek-v3", "jamba-v0.1", "lfm2-1.2b", *HYBRIDS]


def with_blocks(name: str, num_blocks: int, **options: Any) -> Plan:
    """A plan whose memory is worth so many blocks and a bit."""
    path = CONFIGS / f"{name}.json"
    sized = plan(path, PlanOptions(memory_bytes=1 << 40, max_step=STEP, **options))
    return plan(path, PlanOptions(memory_bytes=num_blocks * sized.block_bytes + 7, max_step=STEP, **options))


def manager_of(planned: Plan) -> KVCacheManager:
    return KVCacheManager(
        planned.cache_config,
        max_model_len=planned.max_model_len,
        max_num_batched_tokens=STEP,
        enable_caching=False,
    )


def request(name: str, num_tokens: int) -> Request:
    return Request.from_hashes(name, num_tokens, [])


def prefill(manager: KVCacheManager, what: Request, num_tokens: int) -> bool:
    """Compute the first tokens in steps; False if the manager refuses one."""
    while what.num_computed_tokens < num_tokens:
        step = min(STEP, num_tokens - what.num_computed_tokens)
        if manager.allocate_slots(what, step, full_sequence_must_fit=what.num_computed_tokens == 0) is None:
            return False
        what.num_computed_tokens += step
    return True


def decode(manager: KVCacheManager, running: list[Request], num_tokens: int) -> bool:
    """A token for each in turn, until all have so many."""
    while any(what.num_computed_tokens < num_tokens for what in running):
        for what in running:
            if manager.allocate_slots(what, 1) is None:
                return False
            what.num_computed_tokens += 1
    return True


@pytest.mark.parametrize("name", ALL_KINDS)
@pytest.mark.parametrize("num_blocks", [40, 700])
def test_the_longest_sequence_is_the_longest_that_the_manager_takes(name: str, num_blocks: int) -> None:
    planned = with_blocks(name, num_blocks)
    longest = planned.longest_sequence

    if longest:
        assert prefill(manager_of(planned), request("longest", longest), longest)
    if longest < planned.max_model_len:
        longer = request("longer", longest + 1)
        assert manager_of(planned).probe(longer, full_sequence_must_fit=True).fit is Fit.NEVER
        assert not prefill(manager_of(planned), longer, longest + 1)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_so_many_requests_run_at_once(name: str) -> None:
    planned = with_blocks(name, 1600)
    num_tokens = 2000
    manager, count = manager_of(planned), planned.concurrency(num_tokens)
    running = [request(str(i), num_tokens) for i in range(count)]

    assert count >= 2
    for index, what in enumerate(running, start=1):
        assert prefill(manager, what, num_tokens - 40 - count + index)
        assert decode(
            manager, running[:index], num_tokens - 40 - count + index + 1
        )  # they go on while the next prefills
    assert decode(manager, running, num_tokens)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "qwen2-7b"])
def test_where_nothing_dies_one_more_is_refused(name: str) -> None:
    planned = with_blocks(name, 900)
    manager = manager_of(planned)
    for index in range(planned.concurrency(2000)):
        assert prefill(manager, request(str(index), 2000), 2000)
    assert manager.allocate_slots(request("more", 2000), STEP, full_sequence_must_fit=True) is None


def test_concurrency_counts_one_prefill_at_a_time() -> None:
    planned = with_blocks("gpt-oss-20b", 1001)
    # while it decodes 2048 tokens: 128 full blocks and 9 for a window of 128; prefilling 512 more: 40 + 1
    assert planned.blocks_while_decoding(2048) == 128 + 9
    first = planned.blocks_while_prefilling(2048)
    assert first in (128 + 40, 128 + 41)
    assert planned.concurrency(2048) == 1 + (1000 - first) // (128 + 9)


def test_the_null_block_is_not_counted() -> None:
    planned = with_blocks("llama-3.1-8b", 11)
    assert planned.num_blocks == 11
    assert planned.longest_sequence == 10 * 16
    assert planned.concurrency(16) == 10


def test_longer_than_the_model_takes() -> None:
    planned = with_blocks("llama-3.1-8b", 10_000, max_model_len=1000)
    assert planned.longest_sequence == 1000
    assert planned.concurrency(1000) == 9999 // 63
    assert planned.concurrency(1001) == 0


def test_memory_left_of_the_weights() -> None:
    path, options = CONFIGS / "llama-3.1-8b.json", {"memory_bytes": 80 << 30, "weights_bytes": 16 << 30}
    planned = plan(path, PlanOptions(**options))  # type: ignore[arg-type]
    assert planned.num_blocks == (64 << 30) // (16 * 131072)
    assert load_cache_config(path, PlanOptions(**options)) == planned.cache_config  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [0, 1 << 40])
def test_too_little_memory_says_how_much_is_needed(weights: int) -> None:
    with pytest.raises(ConfigError, match="the null block and one more take 4 MiB"):
        plan(CONFIGS / "llama-3.1-8b.json", PlanOptions(memory_bytes=3 << 20, weights_bytes=weights))


def test_a_window_that_nothing_outgrows_is_full_attention() -> None:
    planned = with_blocks("gemma-2-9b", 1000, max_model_len=4096)
    assert [group.spec.kind for group in planned.grouping.groups] == ["full_attention"]
    assert planned.fixed_bytes_per_request == 0
    assert planned.bytes_per_token == 42 * 8192


@pytest.mark.parametrize(("mode", "states"), [("none", 1), ("align", 2)])
def test_states_of_a_request(mode: str, states: int) -> None:
    planned = with_blocks("granite-4.0-h-small", 1000, state_mode=mode)
    assert planned.fixed_bytes_per_request == 36 * states * 528 * 4096


def test_all_states_take_room_while_prefilling() -> None:
    planned = with_blocks("granite-4.0-h-small", 1000, state_mode="all")  # blocks of 528 tokens, steps of 512
    assert planned.blocks_while_decoding(52800) == 100 + 9 * 2
    assert planned.blocks_while_prefilling(52800) == 100 + 9 * 2
    assert planned.blocks_of_group(planned.grouping.groups[0], 52800, max_step=2000) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"memory_bytes": 0},
        {"memory_bytes": 1.5},
        {"block_size": 0},
        {"tensor_parallel": 0},
        {"pipeline_parallel": -1},
        {"max_model_len": 0},
        {"max_step": True},
        {"weights_bytes": -1},
        {"kv_dtype": "int4"},
        {"state_mode": "some"},
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ConfigError, match=name):
        PlanOptions(**{"memory_bytes": 1 << 30, **options})


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match="pipeline parallel size 33 is more than the model's 32 layers"):
        plan(CONFIGS / "llama-3.1-8b.json", PlanOptions(memory_bytes=1 << 30, pipeline_parallel=33))


def test_a_chunk_that_blocks_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="chunk_size"):
        plan(CONFIGS / "llama-4-scout.json", PlanOptions(memory_bytes=1 << 34, block_size=24))
