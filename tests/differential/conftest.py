"""The oracle: vLLM 0.25.1 in an environment of its own. Without it these tests are skipped, with a reason."""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path

import pytest

SEED = "7"
"""Both sides' block hashes start from it."""
os.environ["PYTHONHASHSEED"] = SEED
os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

ORACLE = Path(os.environ.get("KVPAGER_ORACLE", "~/.cache/kvpager/oracle")).expanduser()
REPORT: list[str] = []


def _missing() -> str | None:
    """Why vLLM can't be imported here, if so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("vllm.v1.core.kv_cache_manager")
            version = importlib.import_module("vllm").__version__
        except ImportError as error:
            return f"vLLM 0.25.1 does not import here ({error}); `make test-oracle` runs these tests in {ORACLE}"
    return None if version == "0.25.1" else f"the oracle is vLLM 0.25.1, this is {version}"


MISSING = _missing()
collect_ignore_glob = ["test_random_*.py", "test_named_*.py"] if MISSING else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seeds and counts, one line a configuration; or why nothing ran."""
    if MISSING:
        terminalreporter.write_line(f"tests/differential skipped: {MISSING}")
    for line in REPORT:
        terminalreporter.write_line(line)
