"""What a model's weights take: an estimate from its configuration.

Counted are the matrices of embeddings, attention, feed-forward layers, experts and state layers, not norms and biases
(less than half a percent together). Vision and audio towers are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError
from .checkpoint import quantizations
from .families import ModelLayers
from .memory import AttentionMemory, StateMemory
from .model_config import ModelConfig

__all__ = ["Weights", "estimate_weights"]

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_SCALED_BITS = {"fp8": 8.0, "nvfp4": 4.5, "mxfp4": 4.25, "w4a16": 4.25, "int4": 4.25, "int8": 8.0}
"""Bits of a weight with its scales: 16 values share a byte in NVFP4, 32 in MXFP4, 128 two bytes and a zero in int4."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Bytes of one rank's weights, None where they are not known, and where that comes from."""

    num_bytes: int | None
    why: str
    is_estimate: bool = False

    @classmethod
    def given(cls, num_bytes: int) -> Weights:
        """What the user says that weights and the rest take."""
        return cls(num_bytes=num_bytes, why="as given")


@dataclass(frozen=True, kw_only=True)
class _Parameters:
    """How many there are of what: experts are often the only ones that are quantized, embeddings never."""

    embeddings: int
    experts: int
    others: int

    @property
    def total(self) -> int:
        return self.embeddings + self.experts + self.others


def estimate_weights(found: ModelLayers, num_ranks: int) -> Weights:
    """One of ``num_ranks`` equal shares, in the dtype or quantization that the checkpoint names. Never raises.

    ``found``: the model on one rank. What is looked up for this alone leaves no notes.
    """
    found = replace(found, config=replace(found.config, notes=[]))
    try:
        parameters = _count(found)
        bits, name = _quantization(found.config)
    except ConfigError as unknown:
        return Weights(num_bytes=None, why=f"n/a, and nothing is taken off for them; {unknown}; give --weights-memory")
    others = 16.0 if name == "mxfp4" else bits
    total = (parameters.embeddings * 16 + parameters.experts * bits + parameters.others * others) / 8
    share = round(total / num_ranks)
    why = f"an estimate: {parameters.total / 1e9:.1f} billion parameters in {name}; activations come on top"
    return Weights(num_bytes=share, why=why, is_estimate=True)


def _count(found: ModelLayers) -> _Parameters:
    """Parameters of the text model. Raises ``ConfigError`` naming what is missing or not known."""
    config, family = found.config, found.family
    if found.num_encoder_tokens:
        raise config.error("model_type", f"{config.model_type}: the encoder's weights can't be estimated")
    hidden = config.integer(*family.hidden)
    ties = config.known("tie_word_embeddings")
    embeddings = _in_file(config, "vocab_size", "padded_vocab_size") * hidden * (1 if ties else 2)
    dense, sparse = _feed_forwards(found, hidden)
    mixers = sum(_mixer(found.config, layer.memory, hidden) for layer in found.layers)
    return _Parameters(embeddings=embeddings, experts=sparse, others=mixers + dense)


def _mixer(config: ModelConfig, memory: AttentionMemory | StateMemory, hidden: int) -> int:
    """Parameters of the module that keeps ``memory``."""
    if isinstance(memory, StateMemory):
        return _state_mixer(config, memory, hidden)
    if memory.kind == "mla":
        return _latent_mixer(config, hidden)
    heads = config.integer("num_attention_heads", "n_head", "n_heads")
    value_size = memory.value_size or memory.head_size
    queries, keys = heads * memory.head_size, memory.num_heads * memory.head_size
    return hidden * (queries + keys + memory.num_heads * value_size + heads * value_size)


def _latent_mixer(config: ModelConfig, hidden: int) -> int:
    heads, rope = config.integer("num_attention_heads"), config.integer("qk_rope_head_dim")
    lora, plain, value = (config.integer(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
    query, query_lora = heads * (plain + rope), config.optional_integer("q_lora_rank")
    queries = hidden * query if query_lora is None else query_lora * (hidden + query)
    return queries + hidden * (lora + rope) + lora * heads * (plain + value) + heads * value * hidden


def _state_mixer(config: ModelConfig, memory: StateMemory, hidden: int) -> int:
    conv, state = memory.tensors[0].shape, memory.tensors[-1].shape
    if memory.label == "Mamba 2":  # in: gate, channels, B, C, and a step a head; out: channels
        inner = state[0] * state[1]
        return hidden * (inner + conv[1] + state[0]) + inner * hidden
    if memory.label == "delta net":  # in: queries, keys, values, gate, and two numbers a head; out: values
        inner = state[0] * state[1]
        return hidden * (conv[1] + inner + 2 * state[0]) + inner * hidden
    if memory.label == "Mamba 1":  # in: channels and gate; step, B and C; out: channels
        inner, size = state
        return hidden * inner * 3 + inner * (2 * ((hidden + 15) // 16) + 2 * size)
    raise config.error(
        "model_type", f"{config.model_type}: the weights of its {memory.label} layers can't be estimated"
    )


def _feed_forwards(found: ModelLayers, hidden: int) -> tuple[int, int]:
    """Parameters of the dense feed-forward layers (shared experts and routers too), and of the routed experts."""
    config, family, matrices = found.config, found.family, found.family.mlp_matrices
    if not matrices:
        raise config.error("model_type", f"{config.model_type}: its feed-forward layers can't be estimated")
    num_dense, num_sparse = _dense_and_sparse(found)
    dense = num_dense * matrices * hidden * _in_file(config, *family.mlp_size) if num_dense else 0
    if not num_sparse:
        return dense, 0
    experts, size = _num_experts(found), _in_file(config, *family.expert_size)
    width = config.count("moe_latent_size") or hidden
    to_width = 2 * hidden * width if width != hidden else 0
    beside = hidden * experts + matrices * hidden * _shared_size(config, size) + to_width
    return dense + num_sparse * beside, num_sparse * experts * matrices * width * size


def _dense_and_sparse(found: ModelLayers) -> tuple[int, int]:
    """How many feed-forward layers are dense, and how many route among experts."""
    kinds = found.kinds
    if not found.family.mlp_size:
        return 0, 0
    if set(kinds) & {"mlp", "moe"}:  # layers that are nothing but a feed-forward one
        return kinds.count("mlp"), kinds.count("moe")
    num_sparse = sum(_is_sparse(found.config, index) for index in range(len(kinds))) if _num_experts(found) > 1 else 0
    return len(kinds) - num_sparse, num_sparse


def _is_sparse(config: ModelConfig, index: int) -> bool:
    """Whether a layer of a model with experts has them."""
    if index < config.count("first_k_dense_replace", "moe_layer_start_index"):
        return False
    if index in (config.integers("mlp_only_layers") or ()):
        return False
    if step := config.count("expert_layer_period"):
        return index % step == config.count("expert_layer_offset")
    return (index + 1) % (config.count("decoder_sparse_step", "interleave_moe_layer_step") or 1) == 0


def _num_experts(found: ModelLayers) -> int:
    """Routed experts of a layer; 0 in a dense family. Raises ``ConfigError`` where the file doesn't say."""
    if not found.family.expert_size:
        return 0
    if not any(found.config.says(name) for name in _EXPERTS):
        raise found.config.error(" or ".join(_EXPERTS), "is not in the file")
    return found.config.count(*_EXPERTS)


def _in_file(config: ModelConfig, *names: str) -> int:
    """A size that must be the file's own: models of a family differ in it. Raises ``ConfigError``."""
    if not any(config.has(name) for name in names):
        raise config.error(" or ".join(names), "is not in the file")
    return config.integer(*names)


def _shared_size(config: ModelConfig, expert_size: int) -> int:
    """Inner size of all shared experts of a layer together."""
    given = config.count(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    count = config.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return given or count * expert_size


def _quantization(config: ModelConfig) -> tuple[float, str]:
    """Bits of a weight, scales included, and the name of the format. Raises ``ConfigError`` for one not known."""
    for section in quantizations(config):
        method = str(section.get("quant_method", "")).lower()
        named = str(section.get("quant_algo") or section.get("format") or method).lower()
        for name, bits in _SCALED_BITS.items():
            if name in (method, named) or named.startswith(name):
                return bits, name
        bits_given = section.get("bits") or _bits_of_groups(section)
        if isinstance(bits_given, int):
            return bits_given + 0.25 * (bits_given < 8), f"{bits_given} bits ({method or named})"
        raise config.error("quantization_config", f"is {method or named!r}, whose weights can't be estimated")
    return 16.0, "16 bits"


def _bits_of_groups(section: Mapping[str, Any]) -> int | None:
    """compressed-tensors: the bits of the first group of weights."""
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return int(weights["num_bits"])
    return 8 if section.get("format") in ("float-quantized", "int-quantized") else None
