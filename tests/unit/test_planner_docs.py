"""Every command and every piece of code in docs/plan.md runs, and prints what it shows there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "plan.md").read_text()
COMMANDS = re.findall(r"^ *```console\n *\$ (.*?)\n(.*?) *```$", DOCUMENT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory from which the document's paths lead to the examples, and to no checked-in figure."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "docs").mkdir()
    return tmp_path


def test_the_document_has_commands() -> None:
    assert len(COMMANDS) == DOCUMENT.count("$ kvpager") >= 8


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_command(command: str, shown: str, place: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program == "kvpager"
    call = [sys.executable, "-c", "from kvpager.cli import main; main()", *arguments]
    done = subprocess.run(
        call, capture_output=True, text=True, check=False, cwd=place, env={**os.environ, "COLUMNS": "80"}
    )
    printed = "\n".join(line.rstrip() for line in (done.stdout + done.stderr).rstrip().splitlines())
    assert done.returncode == (2 if shown.startswith("error:") else 0), done.stderr
    if shown:
        assert printed == shown.rstrip()
    elif "--plot" in arguments:
        assert (place / arguments[arguments.index("--plot") + 1]).stat().st_size > 5000
    else:
        assert json.loads(done.stdout)


def test_the_figure_is_there() -> None:
    (figure,) = re.findall(r"!\[.*\]\((.*)\)", DOCUMENT)
    assert (ROOT / "docs" / figure).stat().st_size > 5000


def test_code(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["manager"].max_model_len == 32768  # type: ignore[attr-defined]
