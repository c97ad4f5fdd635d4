"""A pool so small that requests are preempted and blocks are reused: the answers stay the same."""

from __future__ import annotations

import pytest

from .harness import ask, assert_same_as_generate, engine, smallest_pool, tokens
from .tiny import ARCHITECTURES


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_preempted_requests_go_on_where_they_were(name: str, caching: bool) -> None:
    """Short prompts get in side by side; then their answers grow until the pool is full."""
    limits = {"max_num_batched_tokens": 16}
    num_blocks = smallest_pool(name, 14 + 24, **limits) * 5 // 4
    subject = engine(name, num_blocks=num_blocks, enable_caching=caching, max_num_running=8, **limits)
    shared = tokens(4, seed=1)
    prompts = [[*shared, *tokens(1 + i, seed=10 + i)] for i in range(10)]
    for _ in range(2):
        assert_same_as_generate(name, ask(subject, prompts, num_tokens=24), num_tokens=24)
    assert subject.stats.num_preemptions > 9
    assert subject.manager.block_pool.num_held == 0


def test_blocks_are_handed_on_from_request_to_request() -> None:
    subject = engine("llama", num_blocks=30)
    for seed in range(12):
        assert_same_as_generate("llama", ask(subject, [tokens(60, seed)], num_tokens=4), num_tokens=4)
    (again,) = ask(subject, [tokens(60, 0)], num_tokens=4)
    assert again.num_cached_tokens == 0, "twelve requests of 16 blocks went through 29"
