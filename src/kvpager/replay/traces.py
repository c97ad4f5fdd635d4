"""Readers of request traces. The format is told from the content, never from the file's name.

======================  ==============================================================================
Mooncake                JSON lines: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``
coding-agent sessions   ``{"block_size": b, "requests": [...]}``: one a line, one a file, or a directory
Azure                   CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``
tokens                  JSON lines: ``prompt_token_ids``, ``output_length``, perhaps ``timestamp`` (ms)
======================  ==============================================================================

Reading streams: a line, or one session, is held at a time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from typing import Annotated

import msgspec
import numpy as np

from ..errors import TraceError
from .records import BlockIds, Session, TokenContent, TraceRequest
from .sources import FaultList, list_files, open_text

__all__ = ["SESSION_INTERVAL_SECONDS", "count_requests", "read_trace"]

SESSION_INTERVAL_SECONDS = 30.0
"""Coding-agent sessions have no common clock: session k starts at k times this."""

_MOONCAKE_BLOCK_TOKENS = 512
_MAX_SESSION_BLOCK_ID = 1 << 24
_MAX_HEAD_LINES = 100

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Length = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_SESSION_BLOCK_ID)]
_Line = tuple[int, bytes]
_ABSENT = msgspec.Raw()
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_trace(source: str) -> Iterator[Session]:
    """The sessions of a trace, by start. ``source``: a file, a directory of sessions, ``-`` for stdin.

    A request without a session is one of its own. Raises ``TraceError`` with file, line numbers
    and what was expected; the first ten faults of a file are listed together.
    """
    reader = _Reader()
    files = list_files(source)
    for name in files:
        with open_text(name) as text:
            yield from reader.read(name, enumerate(text, 1), only_sessions=files != [source])


def count_requests(source: str, limit: int | None = None) -> int:
    """How many requests a trace has, at most ``limit``. Reads it once: faults come out before a replay."""
    total = 0
    for session in read_trace(source):
        total += len(session.requests)
        if limit is not None and total >= limit:
            return limit
    return total


class _Fault(Exception):
    """What is wrong with one line; the reader adds file and line number."""


class _Keys(msgspec.Struct):
    """The keys by which a line of JSON is told from another."""

    requests: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    input_length: msgspec.Raw = _ABSENT


class _MooncakeLine(msgspec.Struct):
    timestamp: _Time
    input_length: _Length
    output_length: _Count
    hash_ids: list[int]


class _TokenLine(msgspec.Struct):
    prompt_token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]], msgspec.Meta(min_length=1)]
    output_length: _Count
    timestamp: _Time | None = None


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


class _Reader:
    """Reads files one after another; block ids become small numbers, unique over all of them."""

    def __init__(self) -> None:
        self._next_id = 0
        self._num_sessions = 0

    def read(self, name: str, lines: Iterator[_Line], *, only_sessions: bool) -> Iterator[Session]:
        """The sessions of one file. Raises ``TraceError``."""
        head, kind = _recognise(lines)
        lines = itertools.chain(head, lines)
        if kind is None:
            text = b"".join(line for _, line in lines)
            kind, lines = _recognise_document(name, text), iter([(1, text)])
        if only_sessions and kind != "sessions":
            raise TraceError(f"{name}: in a directory every file must be coding-agent sessions, got {_EXPECTED[kind]}")
        if kind == "sessions":
            return self._read_sessions(name, lines)
        return _read_lines(name, lines, _EXPECTED[kind], self._line_parser(kind))

    def _line_parser(self, kind: str) -> Callable[[bytes], Session | None]:
        return {"mooncake": self._mooncake, "azure": _azure, "tokens": _tokens}[kind]()

    def _mooncake(self) -> Callable[[bytes], Session]:
        decoder = msgspec.json.Decoder(_MooncakeLine)
        numbers: dict[int, int] = {}
        clock = _Clock("timestamp")

        def parse(line: bytes) -> Session:
            record = decoder.decode(line)
            num_ids = len(record.hash_ids)
            if num_ids != -(-record.input_length // _MOONCAKE_BLOCK_TOKENS):
                raise _Fault(
                    f"{num_ids} hash_ids for an input_length of {record.input_length}; "
                    f"give one for each started {_MOONCAKE_BLOCK_TOKENS} tokens"
                )
            start = clock.since_first(record.timestamp / 1e3)
            ids = np.array([numbers.setdefault(i, len(numbers)) for i in record.hash_ids], np.int64)
            content = BlockIds(_MOONCAKE_BLOCK_TOKENS, _run_lengths(ids))
            return _lone_request(start, TraceRequest(0.0, record.input_length, record.output_length, content))

        return parse

    def _read_sessions(self, name: str, lines: Iterable[_Line]) -> Iterator[Session]:
        faults = FaultList(name, _EXPECTED["sessions"])
        for number, line in lines:
            if not line.strip():
                continue
            parsed = _SessionParser(line, number, self._next_id, faults)
            requests = parsed.requests()
            if faults:
                continue
            yield Session(self._num_sessions * SESSION_INTERVAL_SECONDS, requests)
            self._num_sessions += 1
            self._next_id = parsed.next_id
        faults.raise_if_any()


class _SessionParser:
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
        except _UNREADABLE as error:
            self._faults.add(self._line + _lines_before(self._text, error), str(error))
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
            except (*_UNREADABLE, _Fault) as error:
                self._faults.add(self._line, str(error))

    def _advance_to(self, raw: bytes) -> None:
        """Move on to the line where ``raw``, an element of the text, starts."""
        position = self._text.index(raw, self._position)
        self._line += self._text.count(b"\n", self._position, position)
        self._position = position

    def _request(self, entry: _SessionEntry, start: float) -> TraceRequest:
        if entry.num_in is None or entry.num_out is None:
            raise _Fault("a request needs in and out (tokens), a sub-agent needs requests")
        if (entry.runs is None) == (entry.hash_ids is None):
            raise _Fault("a request needs its block ids either as runs or as hash_ids")
        runs = entry.runs if entry.runs is not None else _run_lengths(np.array(entry.hash_ids, np.int64))
        num_ids = sum(count for _, count in runs)
        if not entry.num_in // self._block_size <= num_ids <= -(-entry.num_in // self._block_size):
            raise _Fault(f"{num_ids} block ids for {entry.num_in} tokens; give one for each {self._block_size} tokens")
        last_id = max((first + count - 1 for first, count in runs), default=0)
        if last_id >= _MAX_SESSION_BLOCK_ID:
            raise _Fault(f"block ids up to {last_id}; they must stay below {_MAX_SESSION_BLOCK_ID}")
        self.next_id = max(self.next_id, self._first_id + last_id + 1)
        moved = tuple((self._first_id + first, count) for first, count in runs)
        return TraceRequest(start + entry.t, entry.num_in, entry.num_out, BlockIds(self._block_size, moved))


def _tokens() -> Callable[[bytes], Session]:
    decoder = msgspec.json.Decoder(_TokenLine)
    clock = _Clock("timestamp")

    def parse(line: bytes) -> Session:
        record = decoder.decode(line)
        start = clock.last if record.timestamp is None else clock.since_first(record.timestamp / 1e3)
        tokens = record.prompt_token_ids
        return _lone_request(start, TraceRequest(0.0, len(tokens), record.output_length, TokenContent(tokens)))

    return parse


_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(?:Z|\+00:00)?")


def _azure() -> Callable[[bytes], Session | None]:
    clock = _Clock("TIMESTAMP")

    def parse(line: bytes) -> Session | None:
        fields = [field.strip() for field in line.decode().strip("\ufeff\r\n").split(",")]
        if fields[0] == _AZURE_COLUMNS[0]:
            if tuple(fields) != _AZURE_COLUMNS:
                raise _Fault(f"columns {','.join(fields)}")
            return None
        if len(fields) != len(_AZURE_COLUMNS):
            raise _Fault(f"{len(fields)} columns instead of {len(_AZURE_COLUMNS)}")
        start = clock.since_first(_azure_seconds(fields[0]))
        prompt, output = (_whole_number(name, text) for name, text in zip(_AZURE_COLUMNS[1:], fields[1:], strict=True))
        if not prompt:
            raise _Fault("ContextTokens is 0; a request has at least one")
        return _lone_request(start, TraceRequest(0.0, prompt, output, None))

    return parse


def _azure_seconds(text: str) -> float:
    match = _AZURE_TIME.fullmatch(text)
    if match is None:
        raise _Fault(f"TIMESTAMP {text!r} is not like 2023-11-16 18:15:46.6805900")
    try:
        seconds = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc).timestamp()
    except ValueError as error:
        raise _Fault(f"TIMESTAMP {text!r}: {error}") from error
    return seconds + float(match[2] or 0)


def _whole_number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise _Fault(f"{name} {text!r} is not a whole number of tokens")
    return int(text)


class _Clock:
    """Seconds since the first request; time never runs backwards in a trace."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: float | None = None
        self.last = 0.0

    def since_first(self, seconds: float) -> float:
        """Raises ``_Fault`` for a time before the one of the line above."""
        if self._first is None:
            self._first = seconds
        if seconds - self._first < self.last:
            raise _Fault(f"{self._name} is before the one of an earlier line; sort the lines by time")
        self.last = seconds - self._first
        return self.last


def _read_lines(
    name: str, lines: Iterable[_Line], expected: str, parse: Callable[[bytes], Session | None]
) -> Iterator[Session]:
    """Sessions until the first fault; then only more faults are looked for."""
    faults = FaultList(name, expected)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            session = parse(line)
        except (*_UNREADABLE, _Fault) as error:
            faults.add(number, str(error))
            continue
        if session is not None and not faults:
            yield session
    faults.raise_if_any()


def _lone_request(start: float, request: TraceRequest) -> Session:
    return Session(start, (request,))


def _run_lengths(ids: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(first, count) of each run of consecutive ids. O(ids)."""
    if not len(ids):
        return ()
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    counts = np.diff(np.append(starts, len(ids)))
    return tuple(zip(ids[starts].tolist(), counts.tolist(), strict=True))


_EXPECTED = {
    "mooncake": 'Mooncake lines: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [id, …]}',
    "sessions": (
        'coding-agent sessions: {"block_size": n, "requests": [{"t": s, "in": n, "out": n, '
        '"runs": [[first, count], …] or "hash_ids": [id, …]} or {"t": s, "requests": […]}, …]}'
    ),
    "azure": "Azure CSV: TIMESTAMP,ContextTokens,GeneratedTokens",
    "tokens": 'token lines: {"prompt_token_ids": [id, …], "output_length": n, "timestamp": ms (optional)}',
}


def _recognise(lines: Iterator[_Line]) -> tuple[list[_Line], str | None]:
    """The format of the first line that shows one, and the lines read on the way."""
    head: list[_Line] = []
    for line in itertools.islice(lines, _MAX_HEAD_LINES):
        head.append(line)
        kind = _kind_of(line[1])
        if kind is not None:
            return head, kind
    return head, None


def _kind_of(text: bytes) -> str | None:
    if text.lstrip(b"\xef\xbb\xbf").startswith(b"TIMESTAMP,"):
        return "azure"
    try:
        keys = msgspec.json.decode(text, type=_Keys)
    except _UNREADABLE:
        return None
    if keys.requests is not _ABSENT:
        return "sessions"
    if keys.prompt_token_ids is not _ABSENT:
        return "tokens"
    return "mooncake" if keys.input_length is not _ABSENT else None


def _recognise_document(name: str, text: bytes) -> str:
    if not text.strip():
        raise TraceError(f"{name}: empty; expected one of\n" + _formats())
    kind = _kind_of(text)
    if kind is None:
        raise TraceError(f"{name}: not a trace in a known format; expected one of\n" + _formats() + _syntax_error(text))
    return kind


def _formats() -> str:
    return "\n".join(f"  {expected}" for expected in _EXPECTED.values())


def _syntax_error(text: bytes) -> str:
    """Where the JSON of a document breaks off, if it is meant to be some."""
    if not text.lstrip().startswith(b"{"):
        return ""
    try:
        msgspec.json.decode(text)
    except _UNREADABLE as error:
        return f"\nline {1 + _lines_before(text, error)}: {error}"
    return "\nthe JSON object has none of the keys requests, prompt_token_ids, input_length"


def _lines_before(text: bytes, error: Exception) -> int:
    """Line breaks before the place that a JSON error names: a byte, the text's end, or none (then 0)."""
    if "truncated" in str(error):
        return text.rstrip().count(b"\n")
    place = re.search(r"byte (\d+)", str(error))
    return text.count(b"\n", 0, int(place[1])) if place else 0
