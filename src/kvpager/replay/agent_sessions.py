"""Coding-agent sessions: nested JSON, a session at a time, every fault with its line."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from .faults import UNREADABLE, Fault, FaultList, lines_before
from .records import BlockIds, TraceRequest, run_lengths

__all__ = ["SessionParser"]

_MAX_SESSION_BLOCK_ID = 1 << 24

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Length = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_SESSION_BLOCK_ID)]


class _SessionHead(msgspec.Struct):
    block_size: _Length
    requests: list[msgspec.Raw]


class _SessionEntry(msgspec.Struct, rename={"num_in": "in", "num_out": "out"}):
    """A request, or a sub-agent with requests of its own."""

    t: _Time
    num_in: _Length | None = None
    num_out: _Count | None = None
    runs: list[tuple[_BlockId, _Length]] | None = None
    hash_ids: list[_BlockId] | None = None
    requests: list[msgspec.Raw] | None = None


class SessionParser:
    """One session: its requests by time, sub-agents' among them; notes every fault with its line."""

    _head = msgspec.json.Decoder(_SessionHead)
    _entry = msgspec.json.Decoder(_SessionEntry)

    def __init__(self, text: bytes, first_line: int, first_id: int, faults: FaultList) -> None:
        self._text = text
        self._line = first_line
        self._position = 0
        self._first_id = first_id
        self._faults = faults
        self._block_size = 0
        self.next_id = first_id

    def requests(self) -> list[TraceRequest]:
        """The requests by offset (seconds from the session's start)."""
        try:
            head = self._head.decode(self._text)
        except UNREADABLE as error:
            self._faults.add(self._line + lines_before(self._text, error), str(error))
            return []
        if not head.requests:
            self._faults.add(self._line, "a session without requests")
        self._block_size = head.block_size
        found: list[TraceRequest] = []
        self._walk(head.requests, 0.0, found)
        return sorted(found, key=lambda request: request.offset)

    def _walk(self, entries: list[msgspec.Raw], start: float, found: list[TraceRequest]) -> None:
        for raw in entries:
            self._advance_to(bytes(raw))
            try:
                entry = self._entry.decode(raw)
                if entry.requests is not None:
                    self._walk(entry.requests, start + entry.t, found)
                else:
                    found.append(self._request(entry, start))
            except (*UNREADABLE, Fault) as error:
                self._faults.add(self._line, str(error))

    def _advance_to(self, raw: bytes) -> None:
        """Move on to the line where ``raw``, an element of the text, starts."""
        position = self._text.index(raw, self._position)
        self._line += self._text.count(b"\n", self._position, position)
        self._position = position

    def _request(self, entry: _SessionEntry, start: float) -> TraceRequest:
        if entry.num_in is None or entry.num_out is None:
            raise Fault("a request needs in and out (tokens), a sub-agent needs requests")
        if (entry.runs is None) == (entry.hash_ids is None):
            raise Fault("a request needs its block ids either as runs or as hash_ids")
        runs = entry.runs if entry.runs is not None else run_lengths(np.array(entry.hash_ids, np.int64))
        num_ids = sum(count for _, count in runs)
        if not entry.num_in // self._block_size <= num_ids <= -(-entry.num_in // self._block_size):
            raise Fault(f"{num_ids} block ids for {entry.num_in} tokens; give one for each {self._block_size} tokens")
        last_id = max((first + count - 1 for first, count in runs), default=0)
        if last_id >= _MAX_SESSION_BLOCK_ID:
            raise Fault(f"block ids up to {last_id}; they must stay below {_MAX_SESSION_BLOCK_ID}")
        self.next_id = max(self.next_id, self._first_id + last_id + 1)
        moved = tuple((self._first_id + first, count) for first, count in runs)
        return TraceRequest(start + entry.t, entry.num_in, entry.num_out, BlockIds(self._block_size, moved))
