"""The built-in workload: chats over a shared system prompt, and agent loops. No files, no downloads."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from ..counts import as_integer
from .records import BlockIds, Session, TraceRequest

__all__ = ["NUM_WORKLOAD_REQUESTS", "builtin_workload"]

_NUM_CHATS = 48
_NUM_AGENTS = 10
_CHAT_TURNS = 5
_AGENT_STEPS = 16
NUM_WORKLOAD_REQUESTS = _NUM_CHATS * _CHAT_TURNS + _NUM_AGENTS * _AGENT_STEPS
"""How many requests `builtin_workload` has, whatever the seed."""

_CHAT_SYSTEM_TOKENS = 700
_AGENT_SYSTEM_TOKENS = 3000
_SECONDS_BETWEEN_SESSIONS = 1.0

_Runs = tuple[tuple[int, int], ...]


def builtin_workload(seed: int = 0) -> Iterator[Session]:
    """Sessions by start, always the same for the same ``seed``.

    A chat turn's prompt is all that was said so far and a new question. An agent's step adds a tool's
    answer, which is longer, after a shorter pause; now and then it rolls back some steps and goes
    another way. Every piece of text is made of token ids of its own (a block id stands for one token),
    so prompts share exactly what they have in common, at any block size.
    """
    rng = random.Random(as_integer(seed, "seed"))
    text = _Text()
    systems = {False: text.piece(_CHAT_SYSTEM_TOKENS), True: text.piece(_AGENT_SYSTEM_TOKENS)}
    kinds = [False] * _NUM_CHATS + [True] * _NUM_AGENTS
    rng.shuffle(kinds)
    start = 0.0
    for is_agent in kinds:
        yield Session(start, _agent(rng, text, systems[True]) if is_agent else _chat(rng, text, systems[False]))
        start += rng.expovariate(1 / _SECONDS_BETWEEN_SESSIONS)


class _Text:
    """Hands out pieces of text as runs of ids that nobody else has."""

    def __init__(self) -> None:
        self._next = 0

    def piece(self, num_tokens: int) -> _Runs:
        first = self._next
        self._next += num_tokens
        return ((first, num_tokens),)


def _chat(rng: random.Random, text: _Text, system: _Runs) -> list[TraceRequest]:
    said = system
    offset = 0.0
    turns = []
    for _ in range(_CHAT_TURNS):
        said += text.piece(_length(rng, 80))
        num_answer = _length(rng, 160)
        turns.append(_request(offset, said, num_answer))
        said += text.piece(num_answer)
        offset += rng.expovariate(1 / 20.0) + 0.03 * num_answer
    return turns


def _agent(rng: random.Random, text: _Text, system: _Runs) -> list[TraceRequest]:
    history = [system + text.piece(_length(rng, 400))]  # what was said up to each step
    offset = 0.0
    steps = []
    for _ in range(_AGENT_STEPS):
        num_answer = _length(rng, 60)
        steps.append(_request(offset, history[-1], num_answer))
        if len(history) > 4 and rng.random() < 0.1:
            del history[-rng.randint(1, 3) :]
        history.append(history[-1] + text.piece(num_answer) + text.piece(_length(rng, 500)))
        offset += rng.expovariate(1 / 3.0) + 0.03 * num_answer
    return steps


def _request(offset: float, said: _Runs, num_answer: int) -> TraceRequest:
    return TraceRequest(offset, sum(count for _, count in said), num_answer, BlockIds(1, _joined(said)))


def _joined(runs: _Runs) -> _Runs:
    """The same ids with neighbouring runs made one."""
    joined: list[tuple[int, int]] = []
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return tuple(joined)


def _length(rng: random.Random, median: int) -> int:
    """Tokens of a piece of text: log-normal, at most eight times the median."""
    return min(8 * median, max(1, round(median * math.exp(rng.gauss(0.0, 0.7)))))
