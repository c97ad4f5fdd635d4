"""What a trace says of its requests, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BlockIds", "PromptContent", "Session", "TokenContent", "TraceRequest"]


@dataclass(frozen=True, slots=True)
class BlockIds:
    """A prompt spelled in ids of ``block_size`` tokens each, run-length coded.

    ``runs`` are (first id, count) pairs; ids are small integers, unique in the whole trace. An id stands
    for the content of its block. The last id may stand for fewer tokens than a block; tokens behind
    the last id are content that no other prompt has.
    """

    block_size: int
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TokenContent:
    """A prompt spelled in token ids (0 to 2**32 - 1)."""

    token_ids: Sequence[int]


PromptContent = BlockIds | TokenContent | None
"""None: nothing is known of the content, so that no other prompt shares it."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: ``offset`` is in seconds from its session's start, lengths are in tokens."""

    offset: float
    num_prompt_tokens: int
    num_output_tokens: int
    content: PromptContent


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one user, by offset. ``start`` is in seconds from the trace's start."""

    start: float
    requests: Sequence[TraceRequest]
