"""Formats with one request a line: each a function from a line to a request of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Annotated

import msgspec
import numpy as np

from .faults import Fault
from .records import BlockIds, Session, TokenContent, TraceRequest, run_lengths

__all__ = ["LineParser", "azure", "mooncake", "tokens"]

LineParser = Callable[[bytes], "Session | None"]
"""None: a line that is no request. Raises ``Fault`` and what reading JSON or text raises."""

_MOONCAKE_BLOCK_TOKENS = 512

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Length = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class _MooncakeLine(msgspec.Struct):
    timestamp: _Milliseconds
    input_length: _Length
    output_length: _Count
    hash_ids: list[int]


class _TokenLine(msgspec.Struct):
    prompt_token_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]], msgspec.Meta(min_length=1)]
    output_length: _Count
    timestamp: _Milliseconds | None = None


def mooncake() -> LineParser:
    """Mooncake lines; block ids are numbered in the order in which they come up."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    numbers: dict[int, int] = {}
    clock = _Clock("timestamp")

    def parse(line: bytes) -> Session:
        record = decoder.decode(line)
        num_ids = len(record.hash_ids)
        if num_ids != -(-record.input_length // _MOONCAKE_BLOCK_TOKENS):
            raise Fault(
                f"{num_ids} hash_ids for an input_length of {record.input_length}; "
                f"give one for each started {_MOONCAKE_BLOCK_TOKENS} tokens"
            )
        start = clock.since_first(record.timestamp / 1e3)
        ids = np.array([numbers.setdefault(i, len(numbers)) for i in record.hash_ids], np.int64)
        content = BlockIds(_MOONCAKE_BLOCK_TOKENS, run_lengths(ids))
        return _lone_request(start, TraceRequest(0.0, record.input_length, record.output_length, content))

    return parse


def tokens() -> LineParser:
    """Token lines; one without a timestamp comes together with the one above."""
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


def azure() -> LineParser:
    """Azure's CSV, head line included."""
    clock = _Clock("TIMESTAMP")

    def parse(line: bytes) -> Session | None:
        fields = [field.strip() for field in line.decode().strip("\ufeff\r\n").split(",")]
        if fields[0] == _AZURE_COLUMNS[0]:
            if tuple(fields) != _AZURE_COLUMNS:
                raise Fault(f"columns {','.join(fields)}")
            return None
        if len(fields) != len(_AZURE_COLUMNS):
            raise Fault(f"{len(fields)} columns instead of {len(_AZURE_COLUMNS)}")
        start = clock.since_first(_azure_seconds(fields[0]))
        prompt, output = (_whole_number(name, text) for name, text in zip(_AZURE_COLUMNS[1:], fields[1:], strict=True))
        if not prompt:
            raise Fault("ContextTokens is 0; a request has at least one")
        return _lone_request(start, TraceRequest(0.0, prompt, output, None))

    return parse


def _azure_seconds(text: str) -> float:
    match = _AZURE_TIME.fullmatch(text)
    if match is None:
        raise Fault(f"TIMESTAMP {text!r} is not like 2023-11-16 18:15:46.6805900")
    try:
        seconds = datetime.fromisoformat(match[1]).replace(tzinfo=timezone.utc).timestamp()
    except ValueError as error:
        raise Fault(f"TIMESTAMP {text!r}: {error}") from error
    return seconds + float(match[2] or 0)


def _whole_number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise Fault(f"{name} {text!r} is not a whole number of tokens")
    return int(text)


class _Clock:
    """Seconds since the first request; time never runs backwards in a trace."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first: float | None = None
        self.last = 0.0

    def since_first(self, seconds: float) -> float:
        """Raises ``Fault`` for a time before the one of the line above."""
        if self._first is None:
            self._first = seconds
        if seconds - self._first < self.last:
            raise Fault(f"{self._name} is before the one of an earlier line; sort the lines by time")
        self.last = seconds - self._first
        return self.last


def _lone_request(start: float, request: TraceRequest) -> Session:
    return Session(start, (request,))
