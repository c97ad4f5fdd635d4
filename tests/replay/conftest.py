"""Fixtures of the replay tests."""

from __future__ import annotations

import pytest

from .helpers import Command


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes up to a minute; leave out with -m 'not slow'")


@pytest.fixture
def kvpager(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, as a function of its arguments."""
    return Command(monkeypatch, capsys)
