"""A decode batch in one compiled call does what ``allocate_slots`` does, request by request, in plain Python."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvpager import CacheConfig, GroupSpec, KVCacheManager, Request, RequestStatus, check_manager
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


def make_manager(specs: list[AttentionSpec], options: dict[str, Any]) -> KVCacheManager:
    given = {"enable_kv_cache_events": True, **options}
    interval = given.pop("retention_interval", None)
    groups = tuple(GroupSpec(layer_names=(f"{i}",), spec=spec) for i, spec in enumerate(specs))
    config = CacheConfig(num_blocks=10 + 12 * len(specs), groups=groups, retention_interval=interval)
    return KVCacheManager(config, max_model_len=60, max_num_batched_tokens=16, **given)


class Lives:
    """Requests that come, step together in one call, and leave."""

    def __init__(self, name: str, rng: Random) -> None:
        specs, options = LAYOUTS[name]
        self.rng = rng
        self.encoder_tokens = 6 if any(isinstance(spec, CrossAttention) for spec in specs) else 0
        self.most_drafts = min([2, *(s.num_speculative_states for s in specs if isinstance(s, Mamba))])
        self.manager = make_manager(specs, options)
        self.hasher = BlockHasher.for_config(self.manager.kv_cache_config)
        self.requests: list[Request] = []
        self.num_refused = self.num_grown = 0

    def admit(self, number: int) -> None:
        prompt = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 30))]
        scheduled = self.rng.random() < 0.5
        whole, lookahead = self.rng.random() < 0.5, self.rng.choice([0, 0, self.most_drafts])
        request = Request(f"r{number}", prompt, block_hasher=self.hasher)
        blocks, hit = self.manager.get_computed_blocks(request)
        new = min(16, request.num_tokens - hit)
        given = self.manager.allocate_slots(
            request,
            new,
            hit,
            blocks,
            lookahead,
            num_encoder_tokens=self.encoder_tokens,
            full_sequence_must_fit=whole,
            has_scheduled_reqs=scheduled,
        )
        if given is not None:
            request.num_computed_tokens = hit + new
            if hit + new == len(prompt):
                request.append_output_token_ids(1)
            self.requests.append(request)

    def step(self) -> None:
        count = len(self.requests)
        lookahead = self.rng.choice([0, 0, self.most_drafts])
        reserved = self.rng.choice([0, 0, 0, 2])
        drafts = [self.rng.choice([0, 0, self.most_drafts]) for _ in range(count)]
        self.manager.new_step_starts()
        num_new = [
            min(16, request.num_tokens - request.num_computed_tokens) + extra
            for request, extra in zip(self.requests, drafts, strict=True)
        ]
        given = num_new if any(n != 1 for n in num_new) or self.rng.random() < 0.3 else None
        answer = self.manager.allocate_decode_slots(self.requests, given, lookahead, reserved)
        self.num_grown += len(answer.changed())
        self.advance(count if answer.refused is None else answer.refused, num_new, drafts)
        if answer.refused is not None:
            self.num_refused += 1
            self.leave(self.rng.choice(self.requests))

    def advance(self, served: int, num_new: list[int], drafts: list[int]) -> None:
        token, accepted = self.rng.randrange(2), self.rng.random() < 0.5
        in_flight = self.rng.choice([0, 0, 1])
        for index, request in enumerate(self.requests[:served]):
            extra = drafts[index] if accepted and request.num_tokens < 50 else 0
            request.num_computed_tokens += num_new[index] - drafts[index] + extra
            request.num_in_flight_tokens = min(in_flight, request.num_computed_tokens)
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids([token] * (request.num_computed_tokens - request.num_tokens + 1))
            request.status = RequestStatus.RUNNING

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        request.num_in_flight_tokens = 0
        self.manager.free(request)


@pytest.mark.filterwarnings("ignore:prefix caching is on but can never hit")
@pytest.mark.parametrize("name", LAYOUTS)
def test_lockstep(name: str) -> None:
    refused = grown = 0
    for seed in range(6):
        lives = Lives(name, Random(f"{name} {seed}"))
        for step in range(60):
            if len(lives.requests) < 5 and lives.rng.random() < 0.4:
                lives.admit(step)
            for request in [r for r in lives.requests if r.num_tokens > 50]:
                lives.leave(request)
            if step == 30 and seed % 2:
                lives.manager.reset_prefix_cache(lazy=True)
            if lives.requests:
                lives.step()
            lives.manager.take_events()
            lives.manager.take_new_block_ids()
            check_manager(lives.manager)
        refused += lives.num_refused
        grown += lives.num_grown
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
