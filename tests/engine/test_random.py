"""Random lives: arrivals, shared prefixes, second turns, aborts and preemptions, everything checked at every step."""

from __future__ import annotations

import random

import pytest

from kvpager.engine import Completion, Engine, SamplingParams

from .harness import assert_same_as_generate, engine, smallest_pool, tokens

NUM_REQUESTS = 200
MAX_TOKENS = 16
LIMITS = {"max_num_batched_tokens": 24}


class Life:
    """Drives an engine by a random choice of what comes next."""

    def __init__(self, subject: Engine, rng: random.Random) -> None:
        self.engine = subject
        self.rng = rng
        self.live: list[str] = []
        self.done: list[Completion] = []
        self.num_added = 0

    def prompt(self) -> list[int]:
        """A stem cut anywhere and a new end, or the next turn of an earlier conversation, at most 70 tokens."""
        if self.done and self.rng.random() < 0.3:
            earlier = self.rng.choice(self.done)
            stem = [*earlier.prompt_token_ids, *earlier.token_ids]
        else:
            stem = tokens(45, seed=self.rng.randrange(3))[: self.rng.randrange(46)]
        return [*stem[:60], *tokens(self.rng.randrange(1, 11), seed=self.rng.randrange(10**6))]

    def step(self) -> None:
        while self.num_added < NUM_REQUESTS and (not self.live or self.rng.random() < 0.6):
            params = SamplingParams(max_tokens=self.rng.randrange(1, MAX_TOKENS + 1), keep_logits=True)
            self.live.append(self.engine.add(self.prompt(), params))
            self.num_added += 1
        if self.live and self.rng.random() < 0.03:
            victim = self.live.pop(self.rng.randrange(len(self.live)))
            self.done.append(self.engine.abort(victim))
        for delta in self.engine.step():
            if delta.completion is not None:
                self.live.remove(delta.request_id)
                self.done.append(delta.completion)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"], ids=["full", "window", "state"])
def test_two_hundred_random_requests(name: str) -> None:
    num_blocks = smallest_pool(name, 87, **LIMITS) * 3 // 2
    life = Life(engine(name, num_blocks=num_blocks, max_num_running=12, **LIMITS), random.Random(2024))
    while life.num_added < NUM_REQUESTS or life.live:
        life.step()
    assert len(life.done) == NUM_REQUESTS
    for completion in life.done:
        assert_same_as_generate(name, [completion], num_tokens=len(completion.token_ids) or 1)
    stats = life.engine.stats
    assert stats.num_cached_tokens > 500
    assert stats.num_preemptions > 5
    assert sum(completion.finish_reason == "abort" for completion in life.done) > 5
    assert life.engine.manager.block_pool.num_held == 0
