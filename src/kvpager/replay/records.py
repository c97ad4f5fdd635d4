"""What a trace says of its requests, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BlockIds", "PromptContent", "Session", "TokenContent", "TraceRequest", "run_lengths"]


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


def run_lengths(ids: npt.NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """(first, count) of each run of consecutive ids. O(ids)."""
    if not len(ids):
        return ()
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    counts = np.diff(np.append(starts, len(ids)))
    return tuple(zip(ids[starts].tolist(), counts.tolist(), strict=True))
