"""A vLLM plug-in of these tests: tells in the file that KVPAGER_VLLM_PROBE names what the manager did.

It is loaded in whatever process the engine core runs in, and writes after each step.
"""

from __future__ import annotations

import json
import os


def register() -> None:
    """What vLLM calls when it loads its plug-ins."""
    if os.environ.get("KVPAGER_VLLM_PROBE"):
        from kvpager_vllm_counts import count

        count(_write)


def _write() -> None:
    from kvpager_vllm_counts import counts

    path = os.environ["KVPAGER_VLLM_PROBE"]
    with open(path + ".new", "w") as file:
        json.dump(counts, file)
    os.replace(path + ".new", path)
