"""What the engine keeps of a request that has not finished."""

from __future__ import annotations

from typing import Any

import torch

from ..request import Request, RequestStatus
from .results import Completion, FinishReason
from .sampling import SamplingParams

__all__ = ["LiveRequest"]

_REASONS: dict[RequestStatus, FinishReason] = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}
_UNFINISHED_CHARACTER = "\ufffd"


class LiveRequest:
    """A request with its sampling parameters, its randomness and what has been said so far."""

    def __init__(
        self, request: Request, params: SamplingParams, generator: torch.Generator, tokenizer: Any, added_at: float
    ) -> None:
        self.request = request
        self.params = params
        self.generator = generator
        self.num_cached_tokens: int | None = None
        self._tokenizer = tokenizer
        self._added_at = added_at
        self._first_token_at: float | None = None
        self._logits: list[torch.Tensor] = []
        self._num_characters_given = 0

    def is_stop(self, token_id: int) -> bool:
        """Whether this token ends the answer."""
        if token_id in self.params.stop_token_ids:
            return True
        return not self.params.ignore_eos and token_id == getattr(self._tokenizer, "eos_token_id", None)

    def admitted(self, num_cached_tokens: int) -> None:
        """Note what hit; the first admission counts, a return after preemption doesn't."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens

    def take(self, logits: torch.Tensor, now: float) -> None:
        """Note that a token came, with its logits [vocabulary]."""
        if self._first_token_at is None:
            self._first_token_at = now
        if self.params.keep_logits:
            self._logits.append(logits.clone())

    def new_text(self, *, is_last: bool) -> str:
        """Text that became certain since the last call. A character whose bytes aren't all there yet is held back."""
        text = self._text()
        if text.endswith(_UNFINISHED_CHARACTER) and not is_last:
            return ""
        new = text[self._num_characters_given :]
        self._num_characters_given = len(text)
        return new

    def completion(self, now: float) -> Completion:
        """The answer, once the request has finished."""
        request = self.request
        first = self._first_token_at
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.all_token_ids[: request.num_prompt_tokens]),
            token_ids=tuple(request.output_token_ids),
            text=self._text(),
            finish_reason=_REASONS[request.status],
            num_cached_tokens=self.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
            time_to_first_token=None if first is None else first - self._added_at,
            time_to_last_token=now - self._added_at,
            logits=torch.stack(self._logits) if self._logits else None,
        )

    def _text(self) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(self.request.output_token_ids, skip_special_tokens=True))
