"""Models in which some layers keep states: Mamba 1 and 2, gated delta nets, short convolutions."""

from __future__ import annotations

from ..memory import AttentionMemory, Layer, Rank, StateMemory
from ..model_config import ModelConfig
from . import states
from .common import Maker, Makers, ModelLayers, attention, head_size, kv_heads, layer_kinds, layers_of_kinds, stack

__all__ = ["bamba", "falcon_h1", "granite_hybrid", "jamba", "lfm2", "nemotron_h", "qwen3_next"]


def qwen3_next(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Qwen3-Next: gated delta nets, full attention in every ``full_attention_interval``-th layer."""
    num_layers = config.num_layers()

    def kind(index: int) -> str:
        return "linear_attention" if (index + 1) % config.integer("full_attention_interval") else "full_attention"

    makers: Makers = {
        "full_attention": ("self_attn", lambda: _attention(config, rank, size=config.integer("head_dim"))),
        "linear_attention": ("linear_attn", lambda: states.gated_delta_net(config, rank)),
    }
    return stack(config, num_layers, layers_of_kinds(config, layer_kinds(config, num_layers, kind), makers))


def jamba(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Jamba: Mamba 1, attention at ``attn_layer_offset`` in every ``attn_layer_period`` layers."""
    num_layers = config.num_layers()

    def kind(index: int) -> str:
        offset = config.fields.get("attn_layer_offset")
        if not isinstance(offset, int):
            raise config.error("attn_layer_offset", f"must be an integer, got {offset!r}")
        return "attention" if index % config.integer("attn_layer_period") == offset else "mamba"

    def mamba() -> StateMemory:
        return states.mamba1(
            config,
            rank,
            channels=config.integer("mamba_expand") * config.integer("hidden_size"),
            state_size=config.integer("mamba_d_state"),
            kernel=config.integer("mamba_d_conv"),
        )

    makers = _states_and_attention(("mamba", mamba), ("self_attn", lambda: _attention(config, rank)))
    return stack(config, num_layers, layers_of_kinds(config, layer_kinds(config, num_layers, kind), makers))


def bamba(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Bamba: Mamba 2, attention in the layers that ``attn_layer_indices`` names."""
    where = config.integers("attn_layer_indices")
    if where is None and not config.has("layer_types") and not config.has("layers_block_type"):
        raise config.error("attn_layer_indices", "is missing; it says which layers are attention, add it")
    return _mamba2_or_attention(config, rank, set(where or ()))


def granite_hybrid(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Granite 4 hybrid: Mamba 2 and attention as ``layer_types`` says."""
    return _mamba2_or_attention(config, rank, None)


def nemotron_h(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Nemotron-H: a character a layer: ``M`` Mamba 2, ``*`` attention; ``-`` and ``E`` (MLP, experts) keep nothing."""
    pattern = config.fields.get("hybrid_override_pattern")
    listed = config.strings("layers_block_type", "layer_types")
    if listed is None and not isinstance(pattern, str):
        raise config.error("hybrid_override_pattern", f"must be a string such as 'M-M*', got {pattern!r}")
    kinds = listed or tuple(str(pattern))
    num_layers = config.optional_integer("num_hidden_layers") or len(kinds)
    if len(kinds) != num_layers:
        raise config.error("hybrid_override_pattern", f"has {len(kinds)} layers, but num_hidden_layers is {num_layers}")

    def mamba() -> StateMemory:
        num_heads, head_dim = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
        return states.mamba2(
            config,
            rank,
            channels=num_heads * head_dim,
            num_heads=num_heads,
            head_dim=head_dim,
            num_groups=config.integer("n_groups", "mamba_n_groups"),
            state_size=config.integer("ssm_state_size"),
            kernel=config.integer("conv_kernel", "mamba_d_conv"),
            default_dtype="float32",  # what the model type keeps its states in
        )

    def full() -> AttentionMemory:
        return _attention(config, rank, size=config.integer("head_dim", "attention_head_dim"))

    makers = {**_states_and_attention(("mixer", mamba), ("mixer", full)), "M": ("mixer", mamba), "*": ("mixer", full)}
    keeping = [(index, kind) for index, kind in enumerate(kinds) if kind not in ("-", "E", "mlp", "moe")]
    layers = layers_of_kinds(config, [kind for _, kind in keeping], makers)
    placed = (
        Layer(index=index, name=f"layers.{index}.mixer", memory=layer.memory)
        for (index, _), layer in zip(keeping, layers, strict=True)
    )
    return stack(config, num_layers, tuple(placed))


def falcon_h1(config: ModelConfig, rank: Rank) -> ModelLayers:
    """Falcon-H1: every layer has attention and Mamba 2 side by side."""
    num_layers = config.num_layers()
    channels = config.optional_integer("mamba_d_ssm") or config.integer("mamba_expand") * config.integer("hidden_size")
    keeps = (("self_attn", _attention(config, rank)), ("mamba", _named_mamba2(config, rank, channels)))
    layers = tuple(
        Layer(index=index, name=f"layers.{index}.{module}", memory=memory)
        for index in range(num_layers)
        for module, memory in keeps
    )
    return stack(config, num_layers, layers)


def lfm2(config: ModelConfig, rank: Rank) -> ModelLayers:
    """LFM2: short convolutions, attention where ``layer_types`` or ``full_attn_idxs`` says."""
    num_layers, where = config.num_layers(), config.integers("full_attn_idxs")

    def kind(index: int) -> str:
        if where is None:
            raise config.error("layer_types or full_attn_idxs", "is missing; add it, it says which layer is what")
        return "full_attention" if index in where else "conv"

    def conv() -> StateMemory:
        channels = config.integer("conv_dim", "hidden_size")
        return states.short_conv(rank, channels=channels, kernel=config.integer("conv_L_cache"))

    makers: Makers = {"full_attention": ("self_attn", lambda: _attention(config, rank)), "conv": ("conv", conv)}
    return stack(config, num_layers, layers_of_kinds(config, layer_kinds(config, num_layers, kind), makers))


def _states_and_attention(state: Maker, full: Maker) -> Makers:
    """Both under all the names that files give them: transformers renamed them in version 5."""
    return {"mamba": state, "linear_attention": state, "attention": full, "full_attention": full}


def _attention(config: ModelConfig, rank: Rank, *, size: int | None = None) -> AttentionMemory:
    rank.share(config.integer("num_attention_heads"), "attention heads")
    return attention(rank, heads=kv_heads(config), size=size or head_size(config))


def _mamba2_or_attention(config: ModelConfig, rank: Rank, where: set[int] | None) -> ModelLayers:
    num_layers = config.num_layers()
    fallback = None if where is None else lambda index: "attention" if index in where else "mamba"

    def mamba() -> StateMemory:
        return _named_mamba2(config, rank, config.integer("mamba_expand") * config.integer("hidden_size"))

    makers = _states_and_attention(("mamba", mamba), ("self_attn", lambda: _attention(config, rank)))
    return stack(config, num_layers, layers_of_kinds(config, layer_kinds(config, num_layers, fallback), makers))


def _named_mamba2(config: ModelConfig, rank: Rank, channels: int) -> StateMemory:
    """Mamba 2 under the names that Bamba, Granite and Falcon-H1 share; head size ``"auto"``: an even share."""
    num_heads = config.integer("mamba_n_heads")
    shared_out = config.fields.get("mamba_d_head") == "auto"
    return states.mamba2(
        config,
        rank,
        channels=channels,
        num_heads=num_heads,
        head_dim=channels // num_heads if shared_out else config.integer("mamba_d_head"),
        num_groups=config.integer("mamba_n_groups"),
        state_size=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv"),
    )
