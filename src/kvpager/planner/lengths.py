"""The longest sequence a model is made for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .families import ModelLayers
from .model_config import ModelConfig

__all__ = ["longest_sequence"]

_LENGTH_IS_SCALED = ("default", "mrope", "longrope", "su", "llama3", "proportional")
"""Rotary scalings whose files give the scaled length, or that scale nothing."""


def longest_sequence(found: ModelLayers) -> int:
    """Tokens that the model takes at most: the file's length, stretched by its rotary scaling.

    YaRN stretches the length it was trained with, linear and dynamic scaling that of the file; llama3 and longrope
    files give the stretched length (vLLM 0.25.1, config/model.py, _get_and_verify_max_len). A stretched length is
    noted. Raises ``ConfigError``.
    """
    config = found.config
    length = config.optional_integer(*found.family.longest)
    if length is None and (assumed := found.family.assumed_length):
        config.notes.append(f"ASSUMED: longest sequence {assumed:,} tokens; the file names none: give --max-model-len")
        return assumed
    if length is None:
        raise config.error(found.family.longest[0], "is missing; add it or give --max-model-len")
    if not found.family.rope_scales_length:
        return length
    for rope in _scalings(config):
        kind, factor = str(rope.get("rope_type", rope.get("type", "default"))), rope.get("factor")
        if kind in _LENGTH_IS_SCALED or not isinstance(factor, (int, float)) or factor <= 0:
            continue
        base = rope.get("original_max_position_embeddings", length) if kind == "yarn" else length
        stretched = int(base * factor)
        if stretched != length:
            config.notes.append(f"longest sequence {stretched:,}: {kind} rotary scaling, {base:,} tokens x {factor:g}")
        return stretched
    return length


def _scalings(config: ModelConfig) -> Iterator[Mapping[str, Any]]:
    """Every scaling the file names: one for all layers, or one for each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        value = config.fields.get(name)
        if isinstance(value, Mapping):
            yield value
            yield from (each for each in value.values() if isinstance(each, Mapping))
