"""The floor of hashing: libcrypto's SHA-256 over the same bytes, in a bare C loop."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MESSAGE_BYTES = 104
"""Bytes that the hash of a plain 16-token block covers (docs/hashing.md)."""
SOURCE = Path(__file__).with_name("bare_sha256.c")


def bare_loop(num_blocks: int) -> Callable[[], float] | str:
    """A sampler of nanoseconds a block, or why there is none."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "no C compiler: the bare libcrypto loop is left out"
    folder = tempfile.mkdtemp(prefix="kvpager-bench-")
    library = Path(folder) / "bare_sha256.so"
    command = [compiler, "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-lcrypto"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        return f"the bare libcrypto loop does not compile here: {made.stderr.strip().splitlines()[-1]}"
    chain = ctypes.CDLL(str(library)).chain
    chain.argtypes = [ctypes.c_long, ctypes.c_ulong, ctypes.c_char_p]
    digest = ctypes.create_string_buffer(32)

    def sample() -> float:
        start = time.perf_counter_ns()
        chain(num_blocks, MESSAGE_BYTES, digest)
        return (time.perf_counter_ns() - start) / num_blocks

    return sample
