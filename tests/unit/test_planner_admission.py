"""\"N requests of L tokens fit\": the manager admits N and refuses N + 1, for every configuration and three L."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpager.errors import ConfigError
from kvpager.manager import KVCacheManager
from kvpager.planner import Plan, PlanOptions, plan
from kvpager.request import Request
from planner_configs import EXAMPLES, FURTHER, SHARED, expected_of_shared

STEP = 512
WANTED = 4
LENGTHS = (48, 1000, 9000)
MAY_DIFFER = "the manager may admit more"
CONFIGS: dict[str, Path | dict[str, Any]] = {
    **{path.stem: path for path in sorted(EXAMPLES.glob("*.json"))},
    **{name: further.fields for name, further in FURTHER.items()},
    **{f"shared/{name}": (SHARED or Path()) / f"{name}.json" for name in expected_of_shared()},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "gemma-3-4b": {"kv_dtype": "fp8"},
    "llama-3.1-8b": {"speculative": f"eagle:{EXAMPLES / 'llama-3.1-8b.json'}:3"},
    "deepseek-v3": {"tensor_parallel": 8, "decode_context_parallel": 8, "speculative": "mtp:2"},
    "qwen3-next-80b-a3b": {"speculative": "mtp:3"},
    "nemotron-h-8b": {"state_mode": "none"},
    "granite-4.0-h-small": {"state_mode": "all"},
}


class Life:
    """Requests of a plan's manager: prefilled in steps, then a token (and its drafts) at a time."""

    def __init__(self, planned: Plan) -> None:
        self.plan = planned
        self.manager = KVCacheManager(
            planned.cache_config,
            max_model_len=planned.max_model_len,
            max_num_batched_tokens=STEP,
            enable_caching=False,
        )
        self.count = 0

    @property
    def held(self) -> int:
        pool = self.manager.block_pool
        return pool.num_blocks - 1 - pool.num_reserved - pool.num_free

    def admit(self, length: int) -> Request | None:
        """A newcomer's first step; None where the manager refuses it."""
        self.count += 1
        request = Request.from_hashes(str(self.count), length, [])
        return request if self.step(request, min(STEP, length), admitting=True) else None

    def step(self, request: Request, tokens: int, *, admitting: bool = False) -> bool:
        done = self.manager.allocate_slots(
            request,
            tokens,
            num_lookahead_tokens=self.plan.num_drafted,
            num_encoder_tokens=self.plan.num_encoder_tokens if admitting else 0,
            full_sequence_must_fit=admitting,
        )
        if done is not None:
            request.num_computed_tokens += tokens
        return done is not None

    def grow(self, request: Request, length: int) -> None:
        """Prefill to just below ``length``, then decode."""
        while request.num_computed_tokens < length - 2:
            assert self.step(request, min(STEP, length - 2 - request.num_computed_tokens))
        while request.num_computed_tokens < length:
            assert self.step(request, 1)


def sized(config: Path | dict[str, Any], blocks: int, **options: Any) -> Plan:
    """A plan whose memory is worth so many blocks."""
    generous = plan(config, PlanOptions(memory_bytes=1 << 50, max_step=STEP, **options))
    return plan(config, PlanOptions(memory_bytes=blocks * generous.block_bytes + 7, max_step=STEP, **options))


def fullest(planned: Plan, length: int) -> tuple[int, int]:
    """The length below ``length`` at which a decoding request holds the most blocks, and how many."""
    places = {length - back for back in range(20)} | {
        length - 1 - (length - 1) % group.block_size + after for group in planned.cache_config.specs for after in (1, 2)
    }
    held = {}
    for place in sorted(place for place in places if 3 <= place <= length):
        life = Life(planned)
        request = life.admit(place)
        assert request is not None
        life.grow(request, place)
        held[place] = life.held
    return max(held.items(), key=lambda item: (item[1], item[0]))


@pytest.mark.filterwarnings("ignore:prefix caching is on but can never hit")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_manager_admits_so_many_and_refuses_one_more(name: str, length: int) -> None:
    options = OPTIONS.get(name, {})
    generous = plan(CONFIGS[name], PlanOptions(memory_bytes=1 << 50, max_step=STEP, **options))
    length = min(length, generous.max_model_len)
    first, decoding = generous.blocks_while_prefilling(length), generous.blocks_while_decoding(length)
    planned = sized(CONFIGS[name], 1 + first + (WANTED - 1) * decoding + decoding // 2, **options)
    assert planned.concurrency(length) == WANTED

    place, most = fullest(planned, length)
    assert most <= decoding
    life = Life(planned)
    for _ in range(WANTED):
        request = life.admit(length)
        assert request is not None
        life.grow(request, place)
    one_more = life.admit(length)
    assert one_more is None or any(MAY_DIFFER in note for note in planned.notes)
    if most == decoding:
        assert one_more is None


def test_no_note_where_both_must_agree() -> None:
    assert not any(MAY_DIFFER in note for note in sized(EXAMPLES / "llama-3.1-8b.json", 100).notes)
    assert any(MAY_DIFFER in note for note in sized(EXAMPLES / "gemma-3-4b.json", 10_000).notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 4, "decode_context_parallel": 3}, "must divide tensor_parallel 4"),
        ({"tensor_parallel": 8, "decode_context_parallel": 2}, "8 ranks keep 1 copies of them"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"speculative": "mtp:0"}, "drafts nothing"),
        ({"speculative": "ngram:3"}, "is not a drafter; give mtp:TOKENS"),
        ({"speculative": "mtp:3"}, "has no drafting layers"),
        ({"speculative": "eagle:nowhere.json"}, "nowhere.json: No such file"),
    ],
)
def test_options_that_do_not_go_with_a_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(EXAMPLES / "llama-3.1-8b.json", PlanOptions(memory_bytes=1 << 36, **options))


def test_context_parallelism_shares_out_what_never_dies_only() -> None:
    with pytest.raises(ConfigError, match=r"window 1,024 layers of .* can't be"):
        plan(EXAMPLES / "gemma-3-4b.json", PlanOptions(memory_bytes=1 << 36, prefill_context_parallel=2))
    chunked_and_eagle = {"speculative": f"eagle:{EXAMPLES / 'llama-3.1-8b.json'}:2"}
    with pytest.raises(ConfigError, match="chunked-local"):
        plan(EXAMPLES / "llama-4-scout.json", PlanOptions(memory_bytes=1 << 40, **chunked_and_eagle))  # type: ignore[arg-type]
