"""Fixtures of the replay tests."""

from __future__ import annotations

import pytest

from .helpers import Command


@pytest.fixture
def kvpager(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, as a function of its arguments."""
    return Command(monkeypatch, capsys)
