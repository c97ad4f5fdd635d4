"""Engines on small models, and the answers they must give: those of transformers' own ``generate``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpager.engine import (
    CachedLayer,
    Completion,
    Engine,
    EngineOptions,
    SamplingParams,
    cache_config_for,
    cached_layers,
)
from kvpager.manager import Fit, KVCacheManager
from kvpager.request import Request

from . import tiny

BLOCK_SIZE = 4
TOLERANCE = 1e-4
ROUNDING = 2e-6


@functools.cache
def model(name: str) -> PreTrainedModel:
    return tiny.build(name)


@functools.cache
def layers(name: str) -> tuple[CachedLayer, ...]:
    return cached_layers(model(name))


def engine(name: str, *, num_blocks: int = 1000, block_size: int = BLOCK_SIZE, **options: Any) -> Engine:
    """An engine that checks everything it can."""
    config = cache_config_for(layers(name), num_blocks=num_blocks, block_size=block_size)
    defaults: dict[str, Any] = {"max_model_len": 160, "poison": True, "check": True}
    return Engine(model(name), None, config, EngineOptions(**(defaults | options)))


@functools.cache
def reference(name: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """The greedy answer of plain ``generate`` and its logits, [tokens, vocabulary].

    It ends before the first token that rounding decides (the two best logits are closer than `ROUNDING`).
    """
    out = model(name).generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(out.logits)[:, 0]
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    num_certain = int((best - second > ROUNDING).long().cumprod(0).sum())
    return tuple(out.sequences[0, len(prompt) :][:num_certain].tolist()), logits[:num_certain]


def smallest_pool(name: str, num_tokens: int, *, max_num_batched_tokens: int) -> int:
    """The fewest blocks in which one request of ``num_tokens`` fits, the null block included."""
    request = Request("r", [0] * num_tokens, max_tokens=1)
    for num_blocks in itertools.count(2):
        config = cache_config_for(layers(name), num_blocks=num_blocks, block_size=BLOCK_SIZE)
        manager = KVCacheManager(config, max_model_len=160, max_num_batched_tokens=max_num_batched_tokens)
        if manager.probe(request).fit is not Fit.NEVER:
            return num_blocks
    raise AssertionError


def tokens(length: int, seed: int) -> list[int]:
    """A prompt of random tokens."""
    return torch.randint(0, tiny.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int = 10) -> list[Completion]:
    """Greedy answers with their logits."""
    return engine.generate(prompts, SamplingParams(max_tokens=num_tokens, keep_logits=True))


def assert_same_as_generate(name: str, completions: Iterable[Completion], num_tokens: int = 10) -> None:
    """Token for token, and logits within `TOLERANCE`. An aborted answer is the beginning of the right one."""
    for completion in completions:
        token_ids, logits = reference(name, completion.prompt_token_ids, num_tokens)
        assert completion.finish_reason == "abort" or len(completion.token_ids) == num_tokens, completion
        length = min(len(completion.token_ids), len(token_ids))
        assert completion.token_ids[:length] == token_ids[:length], completion.request_id
        if completion.logits is not None:
            assert torch.allclose(completion.logits[:length], logits[:length], rtol=0, atol=TOLERANCE), (
                completion.request_id
            )
