"""When requests arrive: by the trace's clock, or as soon as one of N before has finished."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..counts import as_count
from .records import Session, TraceRequest

__all__ = ["Arrival", "Arrivals", "ClosedLoop", "TraceClock"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has arrived at ``time`` (simulated seconds); ``slot`` says which one to tell when it is over."""

    time: float
    request: TraceRequest
    slot: int


class Arrivals(Protocol):
    """Where the simulation gets its requests from."""

    def poll(self, now: float) -> Iterator[Arrival]:
        """What has arrived by ``now`` and was not given out yet."""

    def finish(self, slot: int) -> None:
        """A request that came from here is over."""

    @property
    def next_time(self) -> float | None:
        """When the next request arrives, as far as it is known; None: not before another one is over, or never."""


class TraceClock:
    """Requests arrive when the trace says: at their session's start plus their offset.

    Holds the sessions under way, no others. ``limit``: only the first so many requests.
    """

    def __init__(self, sessions: Iterable[Session], limit: int | None = None) -> None:
        self._requests = itertools.islice(_by_time(sessions), _checked_limit(limit))
        self._next = next(self._requests, None)

    def poll(self, now: float) -> Iterator[Arrival]:
        """O(log sessions under way) for each arrival."""
        while self._next is not None and self._next.time <= now:
            yield self._next
            self._next = next(self._requests, None)

    def finish(self, slot: int) -> None:
        """Nothing waits for it."""

    @property
    def next_time(self) -> float | None:
        """None: no more."""
        return None if self._next is None else self._next.time


class ClosedLoop:
    """``num_slots`` sessions are in flight at any time, each with one request at a time.

    A session's next request arrives when the one before is over, without a pause; a new session
    starts when one ends. ``limit``: only the first so many requests.
    """

    def __init__(self, sessions: Iterable[Session], num_slots: int, limit: int | None = None) -> None:
        self._sessions = iter(sessions)
        self._left = _checked_limit(limit)
        num_slots = as_count(num_slots, "num_slots", 1)
        self._running: list[Iterator[TraceRequest]] = [iter(())] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    def poll(self, now: float) -> Iterator[Arrival]:
        """O(1) for each arrival."""
        while self._free and self._left != 0:
            slot = self._free.pop()
            request = self._next_of(slot)
            if request is None:
                continue  # no session is left to start: the slot stays empty
            if self._left is not None:
                self._left -= 1
            yield Arrival(now, request, slot)

    def _next_of(self, slot: int) -> TraceRequest | None:
        request = next(self._running[slot], None)
        while request is None:
            session = next(self._sessions, None)
            if session is None:
                return None
            self._running[slot] = iter(session.requests)
            request = next(self._running[slot], None)
        return request

    def finish(self, slot: int) -> None:
        """The slot is free for the session's next request."""
        self._free.append(slot)

    @property
    def next_time(self) -> float | None:
        """Always None: arrivals wait for requests under way."""
        return None


def _checked_limit(limit: int | None) -> int | None:
    return None if limit is None else as_count(limit, "limit")


def _by_time(sessions: Iterable[Session]) -> Iterator[Arrival]:
    """Merge sessions, which come by start, into arrivals by time; ties in the trace's order."""
    under_way: list[tuple[float, int, int, Session]] = []
    for number, session in enumerate(sessions):
        while under_way and under_way[0][0] < session.start:
            yield _advance(under_way)
        _push(under_way, number, 0, session)
    while under_way:
        yield _advance(under_way)


def _push(under_way: list[tuple[float, int, int, Session]], number: int, index: int, session: Session) -> None:
    if index < len(session.requests):
        heapq.heappush(under_way, (session.start + session.requests[index].offset, number, index, session))


def _advance(under_way: list[tuple[float, int, int, Session]]) -> Arrival:
    time, number, index, session = heapq.heappop(under_way)
    _push(under_way, number, index + 1, session)
    return Arrival(time, session.requests[index], 0)
