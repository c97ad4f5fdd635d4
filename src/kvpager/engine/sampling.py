"""From logits to the next token: greedy, or by temperature and top-p with a seed for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import InvalidRequestError

__all__ = ["SamplingParams", "sample"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen.

    At most ``max_tokens`` (None: as many as the model and the cache take); ``temperature`` 0 is greedy; only the
    most likely tokens whose probabilities add up to ``top_p`` are drawn from. With a ``seed`` the same request
    gives the same answer whatever runs beside it. A token of ``stop_token_ids`` ends the answer, and so does the
    tokenizer's own end token unless ``ignore_eos``. ``keep_logits`` puts the logits of every step into the
    completion. Raises ``InvalidRequestError``.
    """

    max_tokens: int | None = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(f"SamplingParams.max_tokens must be at least 1 or None, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise InvalidRequestError(f"SamplingParams.temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"SamplingParams.top_p must be in (0, 1], got {self.top_p}")

    def generator(self, device: torch.device | str) -> torch.Generator:
        """The request's own source of randomness; without a seed, a new one each time."""
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def sample(logits: torch.Tensor, choices: Sequence[tuple[SamplingParams, torch.Generator]]) -> list[int]:
    """One token for each row of ``logits`` [rows, vocabulary]. O(rows * vocabulary), more for top-p, which sorts."""
    tokens = logits.argmax(dim=-1)
    for row, (params, generator) in enumerate(choices):
        if params.temperature > 0:
            tokens[row] = _draw(logits[row], params, generator)
    return [int(token) for token in tokens.tolist()]


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> torch.Tensor:
    probabilities = torch.softmax(logits.float() / params.temperature, dim=-1)
    if params.top_p < 1:
        ranked, order = probabilities.sort(descending=True)
        before = ranked.cumsum(dim=-1) - ranked  # the most likely token has 0 before it and always stays
        ranked = ranked.masked_fill(before >= params.top_p, 0.0)
        return order[torch.multinomial(ranked, 1, generator=generator)][0]
    return torch.multinomial(probabilities, 1, generator=generator)[0]
