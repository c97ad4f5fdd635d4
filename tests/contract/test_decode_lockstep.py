"""A decode batch in one compiled call does what ``allocate_slots`` does, request by request, the long way in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from kvpager import CacheConfig, DecodeSlots, GroupSpec, KVCacheManager, Request, RequestStatus, check_manager
from kvpager.attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    Mamba,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)
from kvpager.hashing import BlockHasher

FULL, WINDOW = FullAttention(block_size=4), SlidingWindow(block_size=4, window=9)
LAYOUTS: dict[str, tuple[list[AttentionSpec], dict[str, Any]]] = {
    "full": ([FULL], {}),
    "full, watermark, no events": ([FULL], {"watermark": 0.2, "enable_kv_cache_events": False}),
    "full, no caching": ([FULL], {"enable_caching": False}),
    "full + windows": ([FULL, WINDOW, WINDOW, SlidingWindow(block_size=2, window=5)], {}),
    "full + windows, recency": ([FULL, WINDOW], {"eviction_order": "recency"}),
    "full + window, EAGLE": ([FULL, WINDOW], {"use_eagle": True}),
    "chunk + full": ([ChunkedLocalAttention(block_size=4, chunk_size=8), FULL], {}),
    "reference window": ([ReferenceWindow(block_size=4, window=6)], {}),
    "sink": ([SinkAttention(block_size=4, sink_len=8)], {}),
    "full + Mamba align": ([FULL, Mamba(block_size=4)], {}),
    "full + Mamba align, speculative": ([FULL, Mamba(block_size=8, num_speculative_states=2)], {}),
    "full + Mamba align of smaller blocks": ([FullAttention(block_size=8), Mamba(block_size=4)], {}),
    "Mamba align, EAGLE": ([FULL, Mamba(block_size=4, num_speculative_states=1)], {"use_eagle": True}),
    "Mamba all, speculative": ([Mamba(block_size=4, mode="all", num_speculative_states=1), FULL], {}),
    "Mamba none": ([FULL, Mamba(block_size=4, mode="none")], {}),
    "cross": ([CrossAttention(block_size=4), FULL], {}),
    "sparse checkpoints": ([FULL, Mamba(block_size=4), WINDOW], {"retention_interval": 16}),
}


class LongWay:
    """A stepper that leaves every request to Python."""

    def __init__(self, stepper: Any) -> None:
        self.find_bounds = stepper.find_bounds
        self.free = stepper.free

    def admit(self, *_: Any) -> Any:
        return NotImplemented

    def step(self, *_: Any) -> Any:
        return NotImplemented

    def step_all(self, requests: Any, *others: Any) -> int:
        start: int = others[-2]
        return start


@dataclass
class Side:
    manager: KVCacheManager
    requests: list[Request] = field(default_factory=list)


def make_manager(specs: list[AttentionSpec], options: dict[str, Any]) -> KVCacheManager:
    given = {"enable_kv_cache_events": True, **options}
    interval = given.pop("retention_interval", None)
    groups = tuple(GroupSpec(layer_names=(f"{i}",), spec=spec) for i, spec in enumerate(specs))
    config = CacheConfig(num_blocks=10 + 12 * len(specs), groups=groups, retention_interval=interval)
    return KVCacheManager(config, max_model_len=60, max_num_batched_tokens=16, **given)


def everything(manager: KVCacheManager) -> Any:
    pool = manager.block_pool
    ids = [request.request_id for request in manager.live_requests()]
    tables = {
        (name, group.group_id): (table.ids(), table.num_committed, table.num_released, table.step_ends)
        for group in manager.coordinator.single_type_managers
        for name, table in group.tables.items()
    }
    holdings = {name: manager._holdings.get(name) for name in ids}
    bounds = {name: (holding.lowest, holding.quiet_until) for name, holding in holdings.items() if holding}
    return tables, bounds, pool.free_queue(), pool.index(), manager.take_events(), manager.take_new_block_ids()


class Twins:
    """The same life on both sides: one call a batch here, the long way for each request there."""

    def __init__(self, name: str, rng: Random) -> None:
        specs, options = LAYOUTS[name]
        self.rng = rng
        self.encoder_tokens = 6 if any(isinstance(spec, CrossAttention) for spec in specs) else 0
        self.most_drafts = min([2, *(s.num_speculative_states for s in specs if isinstance(s, Mamba))])
        self.batched, self.long_way = Side(make_manager(specs, options)), Side(make_manager(specs, options))
        self.long_way.manager._stepper = LongWay(self.long_way.manager._stepper)  # type: ignore[assignment]
        self.sides = (self.batched, self.long_way)
        self.num_refused = self.num_grown = 0

    def admit(self, number: int) -> None:
        prompt = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 30))]
        scheduled = self.rng.random() < 0.5
        whole, lookahead = self.rng.random() < 0.5, self.rng.choice([0, 0, self.most_drafts])
        lifetimes = []
        for side in self.sides:
            hasher = BlockHasher.for_config(side.manager.kv_cache_config)
            request = Request(f"r{number}", prompt, block_hasher=hasher)
            blocks, hit = side.manager.get_computed_blocks(request)
            new = min(16, request.num_tokens - hit)
            given = side.manager.allocate_slots(
                request,
                new,
                hit,
                blocks,
                lookahead,
                num_encoder_tokens=self.encoder_tokens,
                full_sequence_must_fit=whole,
                has_scheduled_reqs=scheduled,
            )
            lifetimes.append(None if given is None else given.get_block_ids())
            if given is not None:
                request.num_computed_tokens = hit + new
                if hit + new == len(prompt):
                    request.append_output_token_ids(1)
                side.requests.append(request)
        assert lifetimes[0] == lifetimes[1]

    def step(self) -> None:
        count = len(self.batched.requests)
        lookahead = self.rng.choice([0, 0, self.most_drafts])
        reserved = self.rng.choice([0, 0, 0, 2])
        drafts = [self.rng.choice([0, 0, self.most_drafts]) for _ in range(count)]
        for side in self.sides:
            side.manager.new_step_starts()
        num_new = [
            min(16, request.num_tokens - request.num_computed_tokens) + extra
            for request, extra in zip(self.batched.requests, drafts, strict=True)
        ]
        given = num_new if any(n != 1 for n in num_new) or self.rng.random() < 0.3 else None
        answer = self.batched.manager.allocate_decode_slots(self.batched.requests, given, lookahead, reserved)
        self.compare(answer, num_new, lookahead, reserved)
        served = count if answer.refused is None else answer.refused
        self.advance(served, num_new, drafts)
        if answer.refused is not None:
            self.num_refused += 1
            self.leave(self.rng.randrange(count))

    def compare(self, answer: DecodeSlots, num_new: list[int], lookahead: int, reserved: int) -> None:
        changed = []
        for index, request in enumerate(self.long_way.requests):
            blocks = self.long_way.manager.allocate_slots(
                request, num_new[index], num_lookahead_tokens=lookahead, reserved_blocks=reserved
            )
            assert (blocks is None) == (answer.refused == index)
            if blocks is None:
                break
            ids = blocks.get_block_ids(allow_none=True)
            assert answer.block_ids(index) == (ids or ())
            changed += [index] if ids else []
        assert answer.changed() == changed
        self.num_grown += len(changed)

    def advance(self, served: int, num_new: list[int], drafts: list[int]) -> None:
        token, accepted = self.rng.randrange(2), self.rng.random() < 0.5
        in_flight = self.rng.choice([0, 0, 1])
        for side in self.sides:
            for index, request in enumerate(side.requests[:served]):
                extra = drafts[index] if accepted and request.num_tokens < 50 else 0
                request.num_computed_tokens += num_new[index] - drafts[index] + extra
                request.num_in_flight_tokens = min(in_flight, request.num_computed_tokens)
                if request.num_computed_tokens >= request.num_tokens:
                    request.append_output_token_ids([token] * (request.num_computed_tokens - request.num_tokens + 1))
                request.status = RequestStatus.RUNNING

    def leave(self, index: int) -> None:
        for side in self.sides:
            request = side.requests.pop(index)
            request.num_in_flight_tokens = 0
            side.manager.free(request)

    def check(self) -> None:
        assert everything(self.batched.manager) == everything(self.long_way.manager)
        check_manager(self.batched.manager)


@pytest.mark.filterwarnings("ignore:prefix caching is on but can never hit")
@pytest.mark.parametrize("name", LAYOUTS)
def test_lockstep(name: str) -> None:
    refused = grown = 0
    for seed in range(6):
        twins = Twins(name, Random(f"{name} {seed}"))
        for step in range(60):
            if len(twins.batched.requests) < 5 and twins.rng.random() < 0.4:
                twins.admit(step)
            for request in [r for r in twins.batched.requests if r.num_tokens > 50]:
                twins.leave(twins.batched.requests.index(request))
            if step == 30 and seed % 2:
                for side in twins.sides:
                    side.manager.reset_prefix_cache(lazy=True)
            if twins.batched.requests:
                twins.step()
            twins.check()
        refused += twins.num_refused
        grown += twins.num_grown
    assert grown > 20
    assert refused > 0 or name in ("Mamba none", "cross")


def test_whatever_is_out_of_the_ordinary_takes_the_long_way() -> None:
    """Newcomers in the batch are admitted, bad counts raise; who stands before has its slots."""
    manager = make_manager([FULL], {})
    running, newcomer = Request("a", [1] * 6), Request("b", [2] * 5)
    assert manager.allocate_slots(running, 6) is not None
    running.num_computed_tokens = 6
    running.append_output_token_ids([1, 1, 1])
    answer = manager.allocate_decode_slots([running, newcomer], [3, 5])
    assert (answer.refused, answer.changed()) == (None, [0, 1])
    assert [len(ids) for ids in answer.block_ids(1)] == [2]
    with pytest.raises(ValueError, match="num_new_tokens"):
        manager.allocate_decode_slots([running, newcomer], [3, 0])
    with pytest.raises(ValueError, match="give one each"):
        manager.allocate_decode_slots([running], [1, 1])
    with pytest.raises(ValueError, match="in use by another"):
        manager.allocate_decode_slots([running, Request("b", [3])])
    with pytest.raises(ValueError, match="num_lookahead_tokens"):
        manager.allocate_decode_slots([running], num_lookahead_tokens=-1)
    assert answer.block_ids(7) == ()
