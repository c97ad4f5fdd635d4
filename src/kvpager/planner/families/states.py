"""States of recurrent layers: their shapes on one rank, and their dtypes.

A convolution keeps the last (kernel - 1) inputs of each channel, in the model's dtype, and as many more as a drafter
proposes. A recurrent state is kept in the dtype that the file names (``mamba_ssm_cache_dtype`` or
``mamba_ssm_dtype``), else the family's, else the model's. Shapes: vLLM 0.25.1, layers/mamba/mamba_utils.py.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..memory import Rank, StateMemory, StateTensor
from ..model_config import ModelConfig
from .keeps import Kept
from .numbers import HEADS, Number, field, head_size

__all__ = ["gated_delta_net", "kimi_delta", "lightning", "mamba1", "mamba2", "rwkv4", "short_conv"]


def mamba1(channels: Number, state_size: Number, kernel: Number) -> Kept:
    """Mamba 1: one state row for each channel; channels are split among ranks."""

    def keep(config: ModelConfig, rank: Rank) -> StateMemory:
        here = rank.share(channels(config), "Mamba channels")
        conv = StateTensor(name="conv", shape=(kernel(config) - 1, here), dtype=rank.model_dtype)
        return StateMemory(label="Mamba 1", tensors=(conv, _recurrent(config, rank, (here, state_size(config)))))

    return keep


def mamba2(
    *,
    channels: Number,
    heads: Number,
    head_dim: Number,
    groups: Number,
    state_size: Number,
    kernel: Number,
    dtype: str | None = None,
) -> Kept:
    """Mamba 2: a matrix for each head; the convolution also covers B and C of each group.

    Heads are split among ranks; with fewer groups than ranks, each rank keeps a copy of its group.
    """

    def keep(config: ModelConfig, rank: Rank) -> StateMemory:
        width, num_heads, size = channels(config), heads(config), head_dim(config)
        if num_heads * size != width:
            raise ConfigError(
                f"{config.source}: {num_heads} Mamba heads of size {size} don't make up the inner size {width}"
            )
        here, copies = rank.share(num_heads, "Mamba heads"), _groups(rank, groups(config))
        conv_channels = rank.share(width, "Mamba channels") + 2 * copies * state_size(config)
        return StateMemory(
            label="Mamba 2",
            tensors=(
                _conv(rank, conv_channels, kernel(config)),
                _recurrent(config, rank, (here, size, state_size(config)), dtype),
            ),
        )

    return keep


def gated_delta_net(config: ModelConfig, rank: Rank) -> StateMemory:
    """Gated delta net (Qwen3-Next): a matrix for each value head; the convolution covers queries, keys and values."""
    key_heads = rank.share(config.integer("linear_num_key_heads"), "linear key heads")
    value_heads = rank.share(config.integer("linear_num_value_heads"), "linear value heads")
    key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return StateMemory(
        label="delta net",
        tensors=(
            _conv(rank, channels, config.integer("linear_conv_kernel_dim")),
            _recurrent(config, rank, (value_heads, value_dim, key_dim)),
        ),
    )


def kimi_delta(heads: Number, size: Number, kernel: Number) -> Kept:
    """Kimi delta attention: like a delta net with as many key as value heads; its matrices are always float32."""

    def keep(config: ModelConfig, rank: Rank) -> StateMemory:
        here, dim = rank.share(heads(config), "linear heads"), size(config)
        matrix = StateTensor(name="recurrent", shape=(here, dim, dim), dtype="float32")
        return StateMemory(label="KDA", tensors=(_conv(rank, 3 * here * dim, kernel(config)), matrix))

    return keep


def lightning(config: ModelConfig, rank: Rank) -> StateMemory:
    """Lightning attention (MiniMax-Text-01): a matrix for each head, in the model's dtype."""
    here, size = rank.share(HEADS(config), "attention heads"), head_size()(config)
    matrix = StateTensor(name="recurrent", shape=(here, size, size), dtype=rank.state_dtype or rank.model_dtype)
    return StateMemory(label="lightning", tensors=(matrix,))


def short_conv(config: ModelConfig, rank: Rank) -> StateMemory:
    """A short convolution (LFM2): nothing recurrent."""
    channels = rank.share(config.integer("conv_dim", "hidden_size"), "channels")
    kernel = config.integer("conv_L_cache")
    conv = StateTensor(name="conv", shape=(kernel - 1, channels), dtype=rank.model_dtype)
    return StateMemory(label="short conv", tensors=(conv,))


def rwkv4(config: ModelConfig, rank: Rank) -> StateMemory:
    """RWKV 4: the last input of both mixers, and numerator, denominator and maximum in float32.

    transformers 5.24, models/rwkv/modeling_rwkv.py, RwkvModel.forward.
    """
    hidden = rank.share(field("hidden_size")(config), "hidden values")
    inner = rank.share(field("attention_hidden_size")(config), "attention values")
    return StateMemory(
        label="RWKV",
        tensors=(
            StateTensor(name="inputs", shape=(2, hidden), dtype=rank.model_dtype),
            StateTensor(name="recurrent", shape=(3, inner), dtype="float32"),
        ),
    )


def _groups(rank: Rank, num_groups: int) -> int:
    if num_groups % rank.tensor_parallel == 0:
        return num_groups // rank.tensor_parallel
    if rank.tensor_parallel % num_groups == 0:
        return 1
    raise ConfigError(f"tensor parallel size {rank.tensor_parallel} and {num_groups} Mamba groups don't go together")


def _conv(rank: Rank, channels: int, kernel: int) -> StateTensor:
    return StateTensor(name="conv", shape=(kernel - 1 + rank.num_drafted, channels), dtype=rank.model_dtype)


def _recurrent(config: ModelConfig, rank: Rank, shape: tuple[int, ...], default: str | None = None) -> StateTensor:
    named = next((config.fields[f] for f in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype") if config.has(f)), None)
    dtype = rank.state_dtype or named or default
    if dtype is None:
        dtype = rank.model_dtype
        config.notes.append(f"recurrent states counted in the model's {dtype}: the file names no other dtype for them")
    return StateTensor(name="recurrent", shape=shape, dtype=str(dtype).removeprefix("torch."))
