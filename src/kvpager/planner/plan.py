"""The plan: how a model's cache is laid out, and how much of what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..attention import CrossAttention, Mamba
from ..attention.mamba import MambaMode
from ..config import CacheConfig
from ..errors import ConfigError
from .families import ModelLayers, model_layers
from .grouping import Group, Grouping, group_layers, pipeline_ranks
from .memory import KV_DTYPES, AttentionMemory, KVDtype, Layer, Rank
from .model_config import ModelConfig, load_model_config
from .units import format_bytes

__all__ = ["Plan", "PlanOptions", "load_cache_config", "plan"]

DEFAULT_LENGTHS = (1024, 8192, 131072)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user decides.

    ``memory_bytes`` is one rank's memory and ``weights_bytes`` what the weights and all the rest take of
    it. ``kv_dtype``: a name in ``KV_DTYPES``, or None for the model's. ``max_step`` is the most tokens of
    one request in a step (the manager's ``max_num_batched_tokens``). Raises ``ConfigError``.
    """

    memory_bytes: int
    weights_bytes: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_dtype: str | None = None
    state_dtype: str | None = None
    block_size: int = 16
    max_model_len: int | None = None
    max_step: int = 2048
    state_mode: MambaMode = "align"

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "tensor_parallel", "pipeline_parallel", "block_size", "max_step"):
            _require_positive(name, getattr(self, name))
        if self.max_model_len is not None:
            _require_positive("max_model_len", self.max_model_len)
        if self.weights_bytes < 0:
            raise ConfigError(f"weights_bytes must not be negative, got {self.weights_bytes}")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}")
        if self.state_mode not in ("none", "all", "align"):
            raise ConfigError(f"state_mode must be none, all or align, got {self.state_mode!r}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model's cache on the fullest rank. All bytes are of one rank."""

    model_type: str
    kv_dtype: KVDtype
    options: PlanOptions
    max_model_len: int
    num_encoder_tokens: int
    layers: tuple[Layer, ...]
    grouping: Grouping
    cache_config: CacheConfig
    notes: tuple[str, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool."""
        return self.grouping.block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block among them."""
        return self.cache_config.num_blocks

    @cached_property
    def growing(self) -> tuple[Group, ...]:
        """Groups that a request goes on filling at long context."""
        return tuple(group for group in self.grouping.groups if self._grows(group))

    @property
    def bytes_per_token(self) -> float:
        """What one more token costs at long context."""
        return self._per_token(self.growing)

    @property
    def bytes_per_first_token(self) -> float:
        """What one more token costs while everything is still inside the windows."""
        attention = (Mamba, CrossAttention)
        return self._per_token(tuple(g for g in self.grouping.groups if not isinstance(g.spec, attention)))

    @cached_property
    def fixed_bytes_per_request(self) -> int:
        """What a request holds at long context whatever its length: states, windows, encoder tokens."""
        return self.block_bytes * sum(
            self.blocks_of_group(group, self.max_model_len, max_step=1)
            for group in self.grouping.groups
            if group not in self.growing
        )

    @cached_property
    def longest_sequence(self) -> int:
        """The longest request that fits alone, at most ``max_model_len``; 0 if none does. O(log tokens)."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_while_prefilling(middle) < self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def concurrency(self, num_tokens: int) -> int:
        """Requests of ``num_tokens`` that fit at once: one that prefills, the others decoding. O(log tokens).

        0 for a length above ``max_model_len``. Raises ``ConfigError`` for a length below 1.
        """
        _require_positive("num_tokens", num_tokens)
        first = self.blocks_while_prefilling(num_tokens)
        usable = self.num_blocks - 1
        if num_tokens > self.max_model_len or first > usable:
            return 0
        return 1 + (usable - first) // self.blocks_while_decoding(num_tokens)

    def blocks_while_prefilling(self, num_tokens: int) -> int:
        """Blocks a request holds at most on its way to ``num_tokens`` tokens. O(log tokens)."""
        return self._blocks(num_tokens, self.options.max_step)

    def blocks_while_decoding(self, num_tokens: int) -> int:
        """Blocks a request holds at most while it decodes, up to ``num_tokens`` tokens. O(log tokens)."""
        return self._blocks(num_tokens, 1)

    def blocks_of_group(self, group: Group, num_tokens: int, *, max_step: int) -> int:
        """Blocks of one group that a request holds at most in steps of ``max_step``. O(log tokens)."""
        return group.spec.most_held(num_tokens, max_step, num_tokens, self.num_encoder_tokens)

    def _blocks(self, num_tokens: int, max_step: int) -> int:
        return sum(self.blocks_of_group(group, num_tokens, max_step=max_step) for group in self.grouping.groups)

    def _grows(self, group: Group) -> bool:
        fixed = isinstance(group.spec, (Mamba, CrossAttention))
        return not fixed and len(group.spec.dead(self.max_model_len, self.max_model_len)) == 0

    def _per_token(self, groups: tuple[Group, ...]) -> float:
        return sum(self.block_bytes / group.spec.block_size for group in groups)


def plan(config: str | Path | Mapping[str, Any], options: PlanOptions) -> Plan:
    """The plan for a ``config.json`` (a file, its directory, or its content).

    Raises ``ConfigError`` naming what can't be placed, what is missing, or how much memory is needed.
    """
    model = load_model_config(config)
    kv_dtype, model_dtype = _dtypes(model, options)
    rank = Rank(
        tensor_parallel=options.tensor_parallel,
        kv_dtype=kv_dtype,
        model_dtype=model_dtype,
        state_dtype=options.state_dtype,
    )
    found = model_layers(model, rank)
    max_model_len = _max_model_len(model, found, options)
    layers = tuple(_within(layer, max_model_len) for layer in found.layers)
    grouping = group_layers(
        layers,
        ranks=pipeline_ranks(found.num_layers, options.pipeline_parallel),
        block_size=options.block_size,
        state_mode=options.state_mode,
        max_model_len=max_model_len,
        max_step=options.max_step,
        num_encoder_tokens=found.num_encoder_tokens,
    )
    return Plan(
        model_type=model.model_type,
        kv_dtype=kv_dtype,
        options=options,
        max_model_len=max_model_len,
        num_encoder_tokens=found.num_encoder_tokens,
        layers=layers,
        grouping=grouping,
        cache_config=_cache_config(grouping, options),
        notes=tuple(dict.fromkeys(model.notes)),
    )


def load_cache_config(config: str | Path | Mapping[str, Any], options: PlanOptions) -> CacheConfig:
    """The ``CacheConfig`` of a model's ``config.json``, as the manager takes it. Raises ``ConfigError``."""
    return plan(config, options).cache_config


def _dtypes(model: ModelConfig, options: PlanOptions) -> tuple[KVDtype, str]:
    """How keys and values are stored, and the dtype the model runs in: 16 bit, as engines serve it."""
    known = {"float16": "fp16", "bfloat16": "bf16"}
    model_dtype = model.dtype if model.dtype in known else "bfloat16"
    if model.dtype not in known:
        said = f"says {model.dtype}" if model.dtype else "names no dtype"
        model.notes.append(f"the file {said}: counted as served in bf16")
    return KV_DTYPES[options.kv_dtype or known[str(model_dtype)]], str(model_dtype)


def _max_model_len(model: ModelConfig, found: ModelLayers, options: PlanOptions) -> int:
    length = options.max_model_len or found.max_model_len
    if length is None:
        raise model.error("max_position_embeddings", "is missing; add it or give --max-model-len")
    return length


def _within(layer: Layer, max_model_len: int) -> Layer:
    """A window or chunk that no sequence outgrows is full attention."""
    memory = layer.memory
    bounded = isinstance(memory, AttentionMemory) and memory.kind in ("sliding", "chunked")
    if not bounded or not isinstance(memory, AttentionMemory) or (memory.extent or 0) < max_model_len:
        return layer
    return replace(layer, memory=replace(memory, kind="full", extent=None))


def _cache_config(grouping: Grouping, options: PlanOptions) -> CacheConfig:
    free = options.memory_bytes - options.weights_bytes
    num_blocks = free // grouping.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"{format_bytes(max(free, 0))} are left for the cache, but the null block and one more take "
            f"{format_bytes(2 * grouping.block_bytes)} ({format_bytes(grouping.block_bytes)} each); give more memory, "
            f"more ranks, or a smaller block size"
        )
    return CacheConfig(num_blocks=num_blocks, groups=tuple(group.group_spec() for group in grouping.groups))


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, got {value!r}")
