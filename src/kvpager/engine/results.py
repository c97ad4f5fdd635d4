"""What an engine gives back: pieces of answers as they come, whole answers, and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Completion", "Delta", "EngineStats", "FinishReason"]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer.

    ``token_ids`` are the generated tokens, a stop token included; ``text`` leaves special tokens out.
    ``num_cached_tokens`` are the prompt tokens that were in the cache when the request was first admitted. Times are in
    seconds since the request was added. ``logits`` [tokens, vocabulary] is there if it was asked for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_cached_tokens: int
    num_preemptions: int
    time_to_first_token: float | None
    time_to_last_token: float
    logits: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Delta:
    """One step of one answer: a token (None if the answer ended without one) and the text that is certain now.

    The last one of an answer brings the ``completion``.
    """

    request_id: str
    token_id: int | None
    text: str
    completion: Completion | None = None


@dataclass(kw_only=True)
class EngineStats:
    """Counts since the engine was made.

    ``num_prefill_tokens`` are known tokens that were computed (prompts, and what preemption lost),
    ``num_decode_tokens`` the other computed ones. ``seconds`` is the time spent in steps. ``peak_usage`` is the highest
    fraction of blocks held.
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    peak_usage: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of step time; 0 before anything ran."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0
