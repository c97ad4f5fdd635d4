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

__all__ = ["STDIN", "list_files", "open_text"]

STDIN = "-"
_GZIP_MAGIC = b"\x1f\x8b"


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
