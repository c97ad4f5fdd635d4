"""For pytest (``-p kvpager_swap``): turns kvpager's plug-in on before vLLM's tests import the scheduler, and counts.

A run ends by saying how many managers of each kind were built, in the file that KVPAGER_VLLM_PROBE names as well.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["KVPAGER_VLLM"] = "1"

from kvpager_vllm_counts import count, counts

from kvpager.integrations.vllm import register

register()
count()


def pytest_terminal_summary(terminalreporter):  # type: ignore[no-untyped-def]
    terminalreporter.write_line(f"managers built: kvpager {counts['kvpager']}, vLLM {counts['vLLM']}")
    Path(os.environ["KVPAGER_VLLM_PROBE"]).write_text(json.dumps(counts))
