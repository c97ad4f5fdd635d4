"""The plug-in's entry point where there is no vLLM: it must do no harm, and say what it knows."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys

import pytest

from kvpager.integrations import vllm as plugin


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_said", set())
    monkeypatch.setattr(plugin, "_vllm_version", lambda: "0.99.0")


def test_off_it_does_not_even_look(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("KVPAGER_VLLM", raising=False)
    plugin.register()
    assert not caplog.records


def test_an_unknown_version_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("KVPAGER_VLLM", "1")
    caplog.set_level(logging.WARNING, logger="vllm.kvpager")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    plugin.register()
    (record,) = caplog.records
    assert "0.99.0" in record.getMessage() and all(known in record.getMessage() for known in plugin.VERSIONS)


def test_only_the_versions_own_modules_import_vllm() -> None:
    for module in ("manager", "views"):
        importlib.import_module(f"kvpager.integrations.vllm.{module}")
    if importlib.util.find_spec("vllm") is None:
        assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules)


def test_vllm_finds_the_entry_point() -> None:
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    (ours,) = [entry for entry in entries if entry.name == "kvpager"]
    assert ours.load() is plugin.register
