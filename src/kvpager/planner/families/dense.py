"""Models all of whose layers are attention: full, sliding window, chunked local, or latent (MLA)."""

from __future__ import annotations

from collections.abc import Callable

from ..memory import AttentionMemory, Rank
from ..model_config import ModelConfig
from .common import Makers, ModelLayers, attention, head_size, kv_heads, layer_kinds, layers_of_kinds, stack

__all__ = ["deepseek", "gemma2", "gemma3", "gpt_oss", "llama", "llama4", "mistral", "mixtral", "phi3", "qwen"]

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def llama(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Llama 2 and 3: full attention everywhere; without KV heads in the file, every head has its own."""
    return _uniform(config, rank, kind=lambda _: FULL, heads=_heads_or_all(config))


def mistral(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Mistral: a window in every layer unless ``sliding_window`` is null.

    A file without the field would mean a window of 4096 to some loaders and none to others, so it is needed.
    """
    if "sliding_window" not in config.fields:
        raise config.error("sliding_window", "is missing; give the window in tokens, or null for full attention")
    return mixtral(config, rank)


def mixtral(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Mixtral: a window in every layer where the file names one."""
    return _uniform(config, rank, kind=lambda _: _windowed(config), heads=kv_heads(config))


def phi3(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Phi-3: a window in every layer where the file names one."""
    return _uniform(config, rank, kind=lambda _: _windowed(config), heads=_heads_or_all(config))


def qwen(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Qwen 2 and 3: full attention; with ``use_sliding_window``, windows from layer ``max_window_layers`` on."""

    def kind(index: int) -> str:
        return SLIDING if config.flag("use_sliding_window") and index >= config.integer("max_window_layers") else FULL

    return _uniform(config, rank, kind=kind, heads=kv_heads(config))


def gemma2(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Gemma 2: windows and full attention take turns, a window first."""
    return _uniform(config, rank, kind=_in_turn, heads=kv_heads(config), size=config.integer("head_dim"))


def gemma3(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Gemma 3: every sixth layer is full attention; its files leave out what the model type has by default."""

    def kind(index: int) -> str:
        every = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
        return SLIDING if (index + 1) % every else FULL

    layers = _uniform(
        config,
        rank,
        kind=kind,
        heads=kv_heads(config, default=4),
        size=config.integer("head_dim", default=256),
        query_heads=config.integer("num_attention_heads", default=8),
    )
    if layers.max_model_len is not None:
        return layers
    longest = config.integer("max_position_embeddings", default=131072)
    return ModelLayers(num_layers=layers.num_layers, layers=layers.layers, max_model_len=longest)


def gpt_oss(config: ModelConfig, rank: Rank) -> ModelLayers:
    """gpt-oss: windows and full attention take turns, a window first. Sinks are learned biases, not tokens."""
    return _uniform(config, rank, kind=_in_turn, heads=kv_heads(config), size=config.integer("head_dim"))


def llama4(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Llama 4: layers with rotary positions attend within chunks, those without to everything.

    ``no_rope_layers`` holds 0 for a layer without; an empty or missing list means every fourth
    (``no_rope_layer_interval``). Without ``attention_chunk_size`` every layer is full.
    """
    with_rope = config.integers("no_rope_layers") or ()
    num_layers = config.num_layers()
    if with_rope and len(with_rope) != num_layers:
        raise config.error("no_rope_layers", f"names {len(with_rope)} layers, but num_hidden_layers is {num_layers}")
    if "attention_chunk_size" not in config.fields:
        raise config.error("attention_chunk_size", "is missing; give the chunk in tokens, or null for full attention")

    def kind(index: int) -> str:
        chunked = with_rope[index] if with_rope else (index + 1) % config.integer("no_rope_layer_interval", default=4)
        return CHUNKED if chunked and config.has("attention_chunk_size") else FULL

    return _uniform(config, rank, kind=kind, heads=kv_heads(config))


def deepseek(config: ModelConfig, rank: Rank) -> ModelLayers:
    """DeepSeek V2 and V3: a latent vector and a rotary key a token, for all heads: every rank keeps them whole."""
    num_layers = config.num_layers()
    rank.share(config.integer("num_attention_heads"), "attention heads")
    latent = AttentionMemory(
        kind="mla",
        num_heads=1,
        head_size=config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim"),
        num_vectors=1,
        dtype=rank.kv_dtype,
    )
    return stack(
        config, num_layers, layers_of_kinds(config, [FULL] * num_layers, {FULL: ("self_attn", lambda: latent)})
    )


def _uniform(
    config: ModelConfig,
    rank: Rank,
    *,
    kind: Callable[[int], str],
    heads: int,
    size: int | None = None,
    query_heads: int | None = None,
) -> ModelLayers:
    """Attention layers that differ only in how far they look."""
    num_layers = config.num_layers()
    rank.share(query_heads or config.integer("num_attention_heads"), "attention heads")
    size = size or head_size(config)
    makers: Makers = {
        FULL: ("self_attn", lambda: attention(rank, heads=heads, size=size)),
        SLIDING: (
            "self_attn",
            lambda: attention(rank, heads=heads, size=size, kind="sliding", extent=config.integer("sliding_window")),
        ),
        CHUNKED: (
            "self_attn",
            lambda: attention(
                rank, heads=heads, size=size, kind="chunked", extent=config.integer("attention_chunk_size")
            ),
        ),
    }
    return stack(config, num_layers, layers_of_kinds(config, layer_kinds(config, num_layers, kind), makers))


def _heads_or_all(config: ModelConfig) -> int:
    """KV heads; in these model types a missing number means one for each attention head."""
    return kv_heads(config, default=config.integer("num_attention_heads"))


def _windowed(config: ModelConfig) -> str:
    return SLIDING if config.has("sliding_window") else FULL


def _in_turn(index: int) -> str:
    return FULL if index % 2 else SLIDING
