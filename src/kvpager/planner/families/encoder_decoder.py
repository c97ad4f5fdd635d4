"""Encoder-decoder models: the decoder's own tokens, and the encoder's for cross attention."""

from __future__ import annotations

from ..memory import Layer, Rank
from ..model_config import ModelConfig
from .common import ModelLayers, attention

__all__ = ["whisper"]


def whisper(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Whisper: each decoder layer keeps its text tokens and keys and values of up to 1500 audio tokens.

    The encoder itself keeps nothing between steps.
    """
    num_layers, heads = config.num_layers("decoder_layers"), config.integer("decoder_attention_heads")
    width, audio = config.integer("d_model"), config.integer("max_source_positions")
    if width % heads:
        raise config.error("d_model", f"{width} is not a multiple of {heads} decoder_attention_heads")
    rank.share(heads, "attention heads")
    own = attention(rank, heads=heads, size=width // heads)
    cross = attention(rank, heads=heads, size=width // heads, kind="cross", extent=audio)
    layers = tuple(
        Layer(index=index, name=f"decoder.layers.{index}.{module}", memory=memory)
        for index in range(num_layers)
        for module, memory in (("self_attn", own), ("encoder_attn", cross))
    )
    return ModelLayers(
        num_layers=num_layers,
        layers=layers,
        max_model_len=config.integer("max_target_positions"),
        num_encoder_tokens=audio,
    )
