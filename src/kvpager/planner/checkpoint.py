"""What a checkpoint says of its numbers: how weights are stored, and what K/V it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .model_config import ModelConfig

__all__ = ["kv_dtype_of", "quantizations"]

_KV_ALGORITHMS = {"fp8": "fp8", "nvfp4": "nvfp4"}
_SCHEMES = {("float", 8): "fp8", ("float", 4): "nvfp4"}


def quantizations(config: ModelConfig) -> Iterator[Mapping[str, Any]]:
    """What the file says of quantization, nearest first: its own section, the whole file's, hf_quant_config.json."""
    for where in (config.fields, config.outer, {"quantization_config": config.quantization}):
        section = where.get("quantization_config")
        if isinstance(section, Mapping) and section:
            inner = section.get("quantization")
            yield {**section, **(inner if isinstance(inner, Mapping) else {})}


def kv_dtype_of(config: ModelConfig) -> str | None:
    """The K/V dtype that the checkpoint names, or None.

    ``kv_cache_scheme`` (compressed-tensors, modelopt) or ``kv_cache_quant_algo`` (modelopt), as vLLM 0.25.1 reads
    them (utils/torch_utils.py 310-362, attention.py 282-287). One it doesn't know is noted: vLLM serves such a
    checkpoint in the model's dtype.
    """
    for section in quantizations(config):
        said = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
        if not said or (isinstance(said, str) and said.lower() in ("none", "auto")):
            continue
        name = _name(said)
        if name is None:
            config.notes.append(f"K/V counted in the model's dtype: its quantization names {said!r}, unknown here")
        return name
    return None


def _name(said: object) -> str | None:
    if isinstance(said, Mapping):
        return _SCHEMES.get((str(said.get("type")), int(said.get("num_bits") or 0)))
    return _KV_ALGORITHMS.get(str(said).lower())
