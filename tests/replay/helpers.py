"""What the replay tests share."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpager.cli import main
from kvpager.replay import ReplayOptions, ReplayReport, Session, cache_config, replay

SHARED_TRACES = Path(__file__).parents[3] / "shared" / "traces"

_MEASURED = ("manager_cpu_seconds", "wall_seconds", "peak_rss_bytes")


def shared_trace(name: str) -> str:
    """The path of a real trace; skips the test where they are not at hand."""
    path = SHARED_TRACES / name
    if not path.exists():
        pytest.skip(f"real traces are not part of the project: {path} is absent")
    return str(path)


def run(
    sessions: Iterable[Session], *, num_blocks: int, block_size: int = 16, groups: str = "full", **options: Any
) -> ReplayReport:
    """The report of a replay."""
    config = cache_config(groups, block_size, num_blocks=num_blocks)
    return replay(sessions, ReplayOptions(config=config, **options)).report


def exact_figures(report: ReplayReport) -> dict[str, object]:
    """What is not measured and so must come out the same each time."""
    return {name: value for name, value in msgspec.structs.asdict(report).items() if name not in _MEASURED}


def with_short_outputs(sessions: Iterable[Session]) -> Iterator[Session]:
    """The same prompts, one generated token each: no hit depends on what is generated."""
    for session in sessions:
        requests = [dataclasses.replace(request, num_output_tokens=1) for request in session.requests]
        yield dataclasses.replace(session, requests=requests)


class Command:
    """Runs ``kvpager`` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._monkeypatch.setattr(sys, "argv", ["kvpager", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = self._capsys.readouterr()
        return int(exit_info.value.code or 0), out, err
