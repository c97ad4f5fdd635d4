"""From a model's configuration to its layers' caches: one function for each family of models."""

from __future__ import annotations

from ..memory import Rank
from ..model_config import ModelConfig
from . import dense, encoder_decoder, hybrid
from .common import Family, ModelLayers

__all__ = ["FAMILIES", "ModelLayers", "model_layers"]

FAMILIES: dict[str, Family] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "mixtral": dense.mixtral,
    "qwen2": dense.qwen,
    "qwen2_moe": dense.qwen,
    "qwen2_vl": dense.qwen,
    "qwen2_vl_text": dense.qwen,
    "qwen2_5_vl": dense.qwen,
    "qwen2_5_vl_text": dense.qwen,
    "qwen3": dense.qwen,
    "qwen3_moe": dense.qwen,
    "qwen3_vl_text": dense.qwen,
    "qwen3_vl_moe_text": dense.qwen,
    "qwen3_next": hybrid.qwen3_next,
    "qwen3_5_text": hybrid.qwen3_next,
    "qwen3_5_moe_text": hybrid.qwen3_next,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gpt_oss": dense.gpt_oss,
    "llama4_text": dense.llama4,
    "deepseek_v2": dense.deepseek,
    "deepseek_v3": dense.deepseek,
    "phi3": dense.phi3,
    "jamba": hybrid.jamba,
    "bamba": hybrid.bamba,
    "granitemoehybrid": hybrid.granite_hybrid,
    "nemotron_h": hybrid.nemotron_h,
    "falcon_h1": hybrid.falcon_h1,
    "lfm2": hybrid.lfm2,
    "lfm2_moe": hybrid.lfm2,
    "whisper": encoder_decoder.whisper,
}


def model_layers(config: ModelConfig, rank: Rank) -> ModelLayers:
    """The caches of the model's layers on one rank. Raises ``ConfigError`` naming what can't be placed. O(layers)."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise config.error("model_type", f"{config.model_type!r} is not a family that can be placed; known: {known}")
    found = family(config, rank)
    if not found.layers:
        raise config.error("layers", f"none of the {found.num_layers} keeps anything: there is no cache to plan")
    return found
