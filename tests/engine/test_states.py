"""State layers: a conversation goes on from the state it left behind, and nothing else does."""

from __future__ import annotations

import pytest

from .harness import BLOCK_SIZE, ask, assert_same_as_generate, engine, tokens

STATE_MODELS = ["lfm2", "qwen3_next", "nemotron_h", "falcon_h1"]


@pytest.mark.parametrize("name", STATE_MODELS)
def test_a_second_turn_starts_from_the_cached_state(name: str) -> None:
    subject = engine(name)
    (first,) = ask(subject, [tokens(21, seed=1)])
    turn = [*first.prompt_token_ids, *first.token_ids, *tokens(6, seed=2)]
    (second,) = ask(subject, [turn])
    assert_same_as_generate(name, [first, second])
    # The answer's last token was never an input, so the last state is the one before it.
    computed = len(first.prompt_token_ids) + len(first.token_ids) - 1
    assert second.num_cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("name", STATE_MODELS)
def test_what_diverges_before_the_state_does_not_hit_it(name: str) -> None:
    subject = engine(name)
    prompt = tokens(24, seed=3)
    ask(subject, [prompt], num_tokens=1)
    for position in (0, 7, 18):  # before the states at 20 and 24
        other = list(prompt)
        other[position] = (other[position] + 1) % 199
        (completion,) = ask(subject, [other], num_tokens=6)
        assert_same_as_generate(name, [completion], num_tokens=6)
        assert completion.num_cached_tokens <= position


@pytest.mark.parametrize("name", STATE_MODELS)
def test_what_diverges_after_the_state_hits_it(name: str) -> None:
    subject = engine(name)
    prompt = tokens(24, seed=4)
    ask(subject, [prompt], num_tokens=1)
    (completion,) = ask(subject, [[*prompt[:22], *tokens(9, seed=5)]], num_tokens=6)
    assert_same_as_generate(name, [completion], num_tokens=6)
    assert completion.num_cached_tokens == 20


@pytest.mark.parametrize("name", STATE_MODELS)
def test_a_checkpoint_outlives_many_who_start_from_it(name: str) -> None:
    """Nobody writes into the block with the state that others start from."""
    subject = engine(name)
    prompt = tokens(17, seed=6)
    ask(subject, [prompt], num_tokens=1)
    for seed in range(5):
        prompts = [[*prompt[:16], *tokens(1 + seed, seed=10 * seed + i)] for i in range(3)]
        completions = ask(subject, prompts, num_tokens=7)
        assert_same_as_generate(name, completions, num_tokens=7)
        assert all(completion.num_cached_tokens == 16 for completion in completions)
