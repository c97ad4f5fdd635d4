"""Where trace text comes from: a file, a directory's files or stdin, packed with gzip or not."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import TraceError

__all__ = ["STDIN", "FaultList", "list_files", "open_text"]

STDIN = "-"
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_LISTED = 10


class FaultList:
    """The faults of one file: collected, then raised together, the first ten with their lines."""

    def __init__(self, name: str, expected: str) -> None:
        self._name = name
        self._expected = expected
        self._faults: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._faults)

    def add(self, line: int, fault: str) -> None:
        """Note a fault; the eleventh ends the reading.

        Raises ``TraceError`` then.
        """
        if len(self._faults) == _MAX_LISTED:
            self.raise_if_any(more=True)
        self._faults.append(f"line {line}: {fault}")

    def raise_if_any(self, *, more: bool = False) -> None:
        """Raises ``TraceError`` with the faults listed so far."""
        if not self._faults:
            return
        if len(self._faults) == 1:
            raise TraceError(f"{self._name}, {self._faults[0]}; expected {self._expected}")
        count = f"more than {_MAX_LISTED}" if more else str(len(self._faults))
        listed = "".join(f"\n  {fault}" for fault in self._faults)
        raise TraceError(f"{self._name} has {count} faulty places; expected {self._expected}{listed}")


def list_files(source: str) -> list[str]:
    """``source`` itself, or the trace files of a directory (hidden ones left out) by name.

    Raises ``TraceError`` if there is nothing to read.
    """
    if source == STDIN:
        return [source]
    path = Path(source)
    if not path.exists():
        raise TraceError(f"{source}: no such file or directory; give a trace file, a directory of them, or - for stdin")
    if not path.is_dir():
        return [source]
    files = sorted(str(p) for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
    if not files:
        raise TraceError(f"{source}: the directory has no files; expected one session a file")
    return files


@contextmanager
def open_text(source: str) -> Iterator[BinaryIO]:
    """The bytes of ``source``, unpacked if they are gzip; closed at the end (stdin is left open).

    Raises ``TraceError`` where the file can't be opened or read, or its gzip data are damaged.
    """
    try:
        with _open_raw(source) as raw:
            packed = raw.peek(2)[:2] == _GZIP_MAGIC
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw) if packed else raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{source}: damaged gzip data ({error}); fetch the file again") from error
    except OSError as error:
        raise TraceError(f"{source}: {os.strerror(error.errno) if error.errno else error}") from error


@contextmanager
def _open_raw(source: str) -> Iterator[io.BufferedReader]:
    if source == STDIN:
        yield cast(io.BufferedReader, sys.stdin.buffer)
    else:
        with open(source, "rb") as file:
            yield file
