"""What the families share: heads, head size, and which layer is of which kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..memory import AttentionKind, AttentionMemory, Layer, Rank, StateMemory
from ..model_config import ModelConfig

__all__ = [
    "Family",
    "Maker",
    "Makers",
    "ModelLayers",
    "attention",
    "head_size",
    "kv_heads",
    "layer_kinds",
    "layers_of_kinds",
    "stack",
]


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """A model's caches. ``num_layers`` counts all its layers, also those that keep nothing."""

    num_layers: int
    layers: tuple[Layer, ...]
    max_model_len: int | None
    """The longest sequence the model is made for, in tokens; None where the file doesn't say."""
    num_encoder_tokens: int = 0
    """Encoder tokens of one request at most (encoder-decoder models)."""


Family = Callable[[ModelConfig, Rank], ModelLayers]
Maker = tuple[str, Callable[[], "AttentionMemory | StateMemory"]]
"""A module that keeps something, and a function that says what."""
Makers = Mapping[str, Maker]
"""Kind of layer -> what its module keeps."""


def kv_heads(config: ModelConfig, *, default: int | None = None) -> int:
    """KV heads of the whole model."""
    return config.integer("num_key_value_heads", default=default)


def head_size(config: ModelConfig) -> int:
    """``head_dim``; where it is missing, the hidden size shared out among the heads. Raises ``ConfigError``."""
    if config.has("head_dim"):
        return config.integer("head_dim")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise config.error("head_dim", f"is missing, and hidden_size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def attention(
    rank: Rank, *, heads: int, size: int, kind: AttentionKind = "full", extent: int | None = None
) -> AttentionMemory:
    """Ordinary attention: a key and a value for each KV head. Raises ``ConfigError`` if the ranks can't share them."""
    return AttentionMemory(
        kind=kind, num_heads=rank.kv_heads(heads), head_size=size, dtype=rank.kv_dtype, extent=extent
    )


def layer_kinds(config: ModelConfig, num_layers: int, fallback: Callable[[int], str] | None) -> tuple[str, ...]:
    """The kind of each layer: the file's list, else the model type's rule, else an error."""
    kinds = config.strings("layer_types", "layers_block_type")
    if kinds is None:
        if fallback is None:
            raise config.error("layer_types", "is missing; it says which layer keeps what, add it")
        return tuple(fallback(index) for index in range(num_layers))
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    return kinds


def layers_of_kinds(config: ModelConfig, kinds: Sequence[str], makers: Makers) -> tuple[Layer, ...]:
    """A layer for each of ``kinds``.

    What a kind keeps is worked out once, and only if a layer is of it: fields of kinds that the
    model doesn't use may be missing. Raises ``ConfigError`` naming a kind that is not in ``makers``.
    """
    kept: dict[str, AttentionMemory | StateMemory] = {}
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in makers:
            known = ", ".join(sorted(makers))
            problem = f"is of kind {kind!r}, which can't be placed in a {config.model_type} model; known: {known}"
            raise config.error(f"layer {index}", problem)
        module, make = makers[kind]
        if kind not in kept:
            kept[kind] = make()
        layers.append(Layer(index=index, name=f"layers.{index}.{module}", memory=kept[kind]))
    return tuple(layers)


def stack(config: ModelConfig, num_layers: int, layers: tuple[Layer, ...]) -> ModelLayers:
    """A decoder-only model of these layers."""
    return ModelLayers(
        num_layers=num_layers, layers=layers, max_model_len=config.optional_integer("max_position_embeddings")
    )
