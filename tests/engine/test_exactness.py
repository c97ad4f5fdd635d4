"""Packed, paged, chunked and cached, every architecture answers as plain ``generate`` does."""

from __future__ import annotations

import itertools

import pytest

from kvpager.engine import EngineOptions, SamplingParams
from kvpager.engine.engine import Engine
from kvpager.planner import PlanOptions, load_cache_config

from .harness import BLOCK_SIZE, TOLERANCE, ask, assert_same_as_generate, engine, layers, model, reference, tokens
from .tiny import ARCHITECTURES

ALL = list(ARCHITECTURES)
LONG = tokens(50, seed=1)
PROMPTS = [
    tokens(1, 2),
    tokens(3, 3),
    tokens(16, 4),
    tokens(33, 5),
    LONG,
    LONG[:33] + tokens(7, 6),
    LONG[:40] + LONG[:9],
]


@pytest.mark.parametrize("name", ALL)
def test_the_references_differ_from_each_other(name: str) -> None:
    """Otherwise equal logits would show nothing."""
    logits = [reference(name, tuple(prompt), 10)[1] for prompt in PROMPTS]
    for one, other in itertools.combinations(logits, 2):
        assert (one - other).abs().amax(dim=-1).min() > 100 * TOLERANCE


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("name", ALL)
def test_a_mixed_batch_answers_as_generate_does(name: str, caching: bool) -> None:
    subject = engine(name, enable_caching=caching)
    assert_same_as_generate(name, ask(subject, PROMPTS))
    again = ask(subject, PROMPTS)
    assert_same_as_generate(name, again)
    assert all((c.num_cached_tokens > 0) == (caching and len(c.prompt_token_ids) > BLOCK_SIZE) for c in again)


@pytest.mark.parametrize("budget", [1, 3, 7, 19])
@pytest.mark.parametrize("name", ALL)
def test_prompts_may_be_computed_in_pieces_of_any_size(name: str, budget: int) -> None:
    subject = engine(name, max_num_batched_tokens=budget, max_num_running=4)
    assert_same_as_generate(name, ask(subject, PROMPTS[2:], num_tokens=6), num_tokens=6)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "qwen3_next"])
def test_a_shared_prefix_may_end_anywhere(name: str) -> None:
    subject = engine(name)
    first = tokens(24, seed=7)
    assert_same_as_generate(name, ask(subject, [first], num_tokens=2), num_tokens=2)
    for shared in range(25):
        (completion,) = ask(subject, [[*first[:shared], *tokens(5, seed=100 + shared)]], num_tokens=4)
        assert_same_as_generate(name, [completion], num_tokens=4)
        assert completion.num_cached_tokens <= shared
        if name != "qwen3_next":  # it has states only where a step ended
            assert completion.num_cached_tokens == shared // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("name", ALL)
def test_the_whole_prompt_again_leaves_only_its_last_block_to_compute(name: str) -> None:
    subject = engine(name)
    for length in (16, 17, 19, 20):
        prompt = tokens(length, seed=length)
        ask(subject, [prompt], num_tokens=1)
        (again,) = ask(subject, [prompt], num_tokens=5)
        assert_same_as_generate(name, [again], num_tokens=5)
        assert again.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("name", ALL)
def test_prefill_and_decode_share_a_step(name: str) -> None:
    subject = engine(name, max_num_batched_tokens=9)
    early = subject.add(LONG[:12], SamplingParams(max_tokens=12, keep_logits=True))
    done = []
    for step in range(100):
        if step == 4:
            subject.add(LONG, SamplingParams(max_tokens=12, keep_logits=True), request_id="late")
        done += [delta.completion for delta in subject.step() if delta.completion]
        if not subject.has_unfinished:
            break
    assert [completion.request_id for completion in done] == [early, "late"]
    assert_same_as_generate(name, done, num_tokens=12)


@pytest.mark.parametrize("block_size", [1, 2, 8, 16])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "llama4", "deepseek_v3", "falcon_h1"])
def test_blocks_may_be_of_any_size(name: str, block_size: int) -> None:
    subject = engine(name, block_size=block_size, max_num_batched_tokens=21)
    assert_same_as_generate(name, ask(subject, PROMPTS))
    assert_same_as_generate(name, ask(subject, PROMPTS))


@pytest.mark.parametrize("name", ALL)
def test_a_planned_cache_serves_the_model(name: str) -> None:
    """``kvpager plan`` names the same layers, and may give each group another block size."""
    config_json = {**model(name).config.to_dict(), "architectures": [type(model(name)).__name__]}
    options = PlanOptions(memory_bytes=2 << 20, block_size=BLOCK_SIZE, max_model_len=128)
    config = load_cache_config(config_json, options)
    subject = Engine(model(name), None, config, EngineOptions(max_model_len=128, poison=True, check=True))
    assert {name for group in config.groups for name in group.layer_names} == {layer.name for layer in layers(name)}
    for _ in range(2):
        completions = ask(subject, [LONG])
        assert_same_as_generate(name, completions)
    assert completions[0].num_cached_tokens >= 32
