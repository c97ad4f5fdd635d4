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
from collections.abc import Callable, Iterable, Iterator

import msgspec

from ..counts import as_count
from ..errors import TraceError
from .agent_sessions import SessionParser
from .faults import UNREADABLE, Fault, FaultList, lines_before
from .line_formats import LineParser, azure, mooncake, tokens
from .records import Session
from .sources import list_files, open_text

__all__ = ["SESSION_INTERVAL_SECONDS", "count_requests", "read_trace"]

SESSION_INTERVAL_SECONDS = 30.0
"""Coding-agent sessions have no common clock: session k starts at k times this."""

_MAX_HEAD_LINES = 100

_Line = tuple[int, bytes]
_ABSENT = msgspec.Raw()


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
    limit = None if limit is None else as_count(limit, "limit")
    total = 0
    for session in read_trace(source):
        total += len(session.requests)
        if limit is not None and total >= limit:
            return limit
    return total


class _Keys(msgspec.Struct):
    """The keys by which a line of JSON is told from another."""

    requests: msgspec.Raw = _ABSENT
    prompt_token_ids: msgspec.Raw = _ABSENT
    input_length: msgspec.Raw = _ABSENT


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
        return _read_lines(name, lines, _EXPECTED[kind], _LINE_PARSERS[kind]())

    def _read_sessions(self, name: str, lines: Iterable[_Line]) -> Iterator[Session]:
        faults = FaultList(name, _EXPECTED["sessions"])
        for number, line in lines:
            if not line.strip():
                continue
            parsed = SessionParser(line, number, self._next_id, faults)
            requests = parsed.requests()
            if faults:
                continue
            yield Session(self._num_sessions * SESSION_INTERVAL_SECONDS, requests)
            self._num_sessions += 1
            self._next_id = parsed.next_id
        faults.raise_if_any()


def _read_lines(name: str, lines: Iterable[_Line], expected: str, parse: LineParser) -> Iterator[Session]:
    """Sessions until the first fault; then only more faults are looked for."""
    faults = FaultList(name, expected)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            session = parse(line)
        except (*UNREADABLE, Fault) as error:
            faults.add(number, str(error))
            continue
        if session is not None and not faults:
            yield session
    faults.raise_if_any()


_LINE_PARSERS: dict[str, Callable[[], LineParser]] = {"mooncake": mooncake, "azure": azure, "tokens": tokens}

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
    except UNREADABLE:
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
    except UNREADABLE as error:
        return f"\nline {1 + lines_before(text, error)}: {error}"
    return "\nthe JSON object has none of the keys requests, prompt_token_ids, input_length"
