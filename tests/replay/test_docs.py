"""docs/replay.md: every command in it works, in the order in which they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import kvpager
from kvpager.replay.traces import SESSION_INTERVAL_SECONDS

from .test_cli import KEYS

PAGE = (Path(__file__).parents[2] / "docs/replay.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    assert len(BLOCKS) >= 9
    command = tmp_path / "bin/kvpager"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvpager.cli "$@"\n')
    command.chmod(0o755)
    source = str(Path(kvpager.__file__).parents[1])
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": source}
    for block in BLOCKS:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=work, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert done.stderr == "", block
    for name in ("replay.png", "events.jsonl", "sweep.svg", "sweep.png"):
        assert (work / name).stat().st_size > 1000, name


def test_the_page_names_every_key_and_option() -> None:
    from kvpager.cli import _Common

    for key in KEYS:
        assert f"`{key}`" in PAGE
    assert re.search(rf"session k starts at k . {SESSION_INTERVAL_SECONDS:g} s", PAGE)
    switches = {"chunked_prefill": "--no-chunked-prefill", "full_sequence_must_fit": "--first-chunk"}
    for field in _Common.__dataclass_fields__:
        assert switches.get(field, "--" + field.replace("_", "-")) in PAGE
