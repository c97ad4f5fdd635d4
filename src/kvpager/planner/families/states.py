"""States of recurrent layers: their shapes on one rank, and their dtypes.

A convolution keeps the last (kernel - 1) inputs of each channel, in the model's dtype. A recurrent
state is kept in the dtype that the file names (``mamba_ssm_cache_dtype`` or ``mamba_ssm_dtype``), else the
family's, else the model's.
"""

from __future__ import annotations

from ...errors import ConfigError
from ..memory import Rank, StateMemory, StateTensor
from ..model_config import ModelConfig

__all__ = ["gated_delta_net", "mamba1", "mamba2", "short_conv"]


def mamba1(config: ModelConfig, rank: Rank, *, channels: int, state_size: int, kernel: int) -> StateMemory:
    """Mamba 1: one state row for each channel; channels are split among ranks."""
    channels = rank.share(channels, "Mamba channels")
    return StateMemory(
        label="Mamba 1",
        tensors=(_conv(rank, channels, kernel), _recurrent(config, rank, (channels, state_size))),
    )


def mamba2(
    config: ModelConfig,
    rank: Rank,
    *,
    channels: int,
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    kernel: int,
    default_dtype: str | None = None,
) -> StateMemory:
    """Mamba 2: a matrix for each head; the convolution also covers B and C of each group.

    Heads are split among ranks; with fewer groups than ranks, each rank keeps a copy of its group.
    """
    if num_heads * head_dim != channels:
        raise ConfigError(
            f"{config.source}: {num_heads} Mamba heads of size {head_dim} don't make up the inner size {channels}"
        )
    heads, groups = rank.share(num_heads, "Mamba heads"), _groups(rank, num_groups)
    conv_channels = rank.share(channels, "Mamba channels") + 2 * groups * state_size
    return StateMemory(
        label="Mamba 2",
        tensors=(
            _conv(rank, conv_channels, kernel),
            _recurrent(config, rank, (heads, head_dim, state_size), default_dtype),
        ),
    )


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


def short_conv(rank: Rank, *, channels: int, kernel: int) -> StateMemory:
    """A short convolution (LFM2): nothing recurrent."""
    return StateMemory(label="short conv", tensors=(_conv(rank, rank.share(channels, "channels"), kernel),))


def _groups(rank: Rank, num_groups: int) -> int:
    if num_groups % rank.tensor_parallel == 0:
        return num_groups // rank.tensor_parallel
    if rank.tensor_parallel % num_groups == 0:
        return 1
    raise ConfigError(f"tensor parallel size {rank.tensor_parallel} and {num_groups} Mamba groups don't go together")


def _conv(rank: Rank, channels: int, kernel: int) -> StateTensor:
    return StateTensor(name="conv", shape=(kernel - 1, channels), dtype=rank.model_dtype)


def _recurrent(config: ModelConfig, rank: Rank, shape: tuple[int, ...], default: str | None = None) -> StateTensor:
    named = next((config.fields[f] for f in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype") if config.has(f)), None)
    dtype = rank.state_dtype or named or default
    if dtype is None:
        dtype = rank.model_dtype
        config.notes.append(f"recurrent states counted in the model's {dtype}: the file names no other dtype for them")
    return StateTensor(name="recurrent", shape=shape, dtype=str(dtype).removeprefix("torch."))
