"""Memory of a big pool, each manager in a process of its own. Run as a module by ``compare``."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

from .cases import fill
from .peers import Kvpager, Peer, load_vllm
from .shapes import FULL


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(peer: Peer, num_blocks: int) -> dict[str, float]:
    """Bytes a block of a pool, empty and with every block cached."""
    hasher = peer.hasher()
    fill(peer, peer.manager(FULL, 1000), FULL, 1000, hasher)
    gc.collect()
    before = resident_bytes()
    manager = peer.manager(FULL, num_blocks)
    gc.collect()
    empty = resident_bytes()
    fill(peer, manager, FULL, num_blocks, hasher)
    gc.collect()
    return {"empty": (empty - before) / num_blocks, "cached": (resident_bytes() - before) / num_blocks}


def in_child(name: str, num_blocks: int) -> dict[str, float] | None:
    """The measurement in a fresh process; None where it fails."""
    command = [sys.executable, "-m", "benchmarks.memory", name, str(num_blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return None
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """``python -m benchmarks.memory kvpager|vLLM BLOCKS``: one JSON object."""
    peer: Peer | None = Kvpager() if sys.argv[1] == "kvpager" else load_vllm()[0]
    assert peer is not None
    print(json.dumps(measure(peer, int(sys.argv[2]))))


if __name__ == "__main__":
    main()
