"""What one layer keeps on one rank: keys and values per token, or a state per request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    SlidingWindow,
)
from ..attention.mamba import MambaMode
from ..errors import ConfigError

__all__ = ["KV_DTYPES", "AttentionMemory", "KVDtype", "Layer", "Rank", "StateMemory", "StateTensor", "value_bytes"]

AttentionKind = Literal["full", "sliding", "chunked", "mla", "cross"]

_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def value_bytes(dtype: str) -> int:
    """Bytes of one value. Raises ``ConfigError`` for a dtype that states are not kept in."""
    if dtype not in _VALUE_BYTES:
        raise ConfigError(f"{dtype!r} is not a dtype of states; use one of {', '.join(_VALUE_BYTES)}")
    return _VALUE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class KVDtype:
    """How keys and values are stored.

    ``value_bits`` a value; ``scale_bytes`` for each vector (one head of one token), and with ``values_per_scale``
    that many bytes for each run of so many values instead. ``latent_bytes``: a fixed layout of one latent.
    """

    name: str
    value_bits: int
    scale_bytes: int = 0
    values_per_scale: int | None = None
    latent_bytes: Mapping[int, int] = field(default_factory=dict, hash=False)

    def vector_bytes(self, size: int) -> int:
        """Bytes of a vector of ``size`` values with its scales. Raises ``ConfigError`` where they don't pack."""
        if self.latent_bytes:
            raise ConfigError(f"{self.name} is a layout for latents (MLA), not for keys and values of heads")
        pack = math.lcm(self.values_per_scale or 1, 8 // math.gcd(8, self.value_bits))
        if size % pack:
            raise ConfigError(f"{self.name} packs {pack} values together; a head of {size} is not a multiple of that")
        return size * self.value_bits // 8 + self.scale_bytes * (size // (self.values_per_scale or size))

    def one_vector_bytes(self, size: int) -> int:
        """Bytes of a latent of ``size`` values: one vector for all heads. Raises ``ConfigError``."""
        if self.latent_bytes:
            if size not in self.latent_bytes:
                raise ConfigError(f"{self.name} is a layout for latents of {sorted(self.latent_bytes)}, not of {size}")
            return self.latent_bytes[size]
        if self.values_per_scale:
            raise ConfigError(f"{self.name} is kept for keys and values of heads, not for latents; choose fp8 or bf16")
        return self.vector_bytes(size)


# vLLM 0.25.1: config/cache.py CacheDType, v1/kv_cache_interface.py. fp8 has one scale a tensor, kept with the weights.
KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KVDtype(name="fp16", value_bits=16),
        KVDtype(name="bf16", value_bits=16),
        KVDtype(name="fp8", value_bits=8),
        KVDtype(name="fp8_e4m3", value_bits=8),
        KVDtype(name="fp8_e5m2", value_bits=8),
        KVDtype(name="int8", value_bits=8, scale_bytes=4),
        KVDtype(name="int8_per_token_head", value_bits=8, scale_bytes=4),
        KVDtype(name="fp8_per_token_head", value_bits=8, scale_bytes=4),
        KVDtype(name="int4_per_token_head", value_bits=4, scale_bytes=4),
        KVDtype(name="nvfp4", value_bits=4, scale_bytes=1, values_per_scale=16),
        # 512 fp8 values, 4 scales of 4 bytes, 64 rotary values of 2 bytes
        KVDtype(name="fp8_ds_mla", value_bits=8, latent_bytes={576: 656}),
    )
}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a tensor-parallel group: how much of a layer it keeps, and in what dtypes."""

    tensor_parallel: int
    kv_dtype: KVDtype
    model_dtype: str
    state_dtype: str | None = None
    """What recurrent states are kept in when the user says so; None: what the model says."""
    num_drafted: int = 0
    """Tokens that a drafter proposes: convolutions keep as many inputs more, to take them back."""

    def kv_heads(self, num_heads: int) -> int:
        """KV heads on this rank: an even share, or one copy where there are fewer heads than ranks.

        Raises ``ConfigError`` when neither divides the other.
        """
        if num_heads % self.tensor_parallel == 0:
            return num_heads // self.tensor_parallel
        if self.tensor_parallel % num_heads == 0:
            return 1
        raise ConfigError(
            f"tensor parallel size {self.tensor_parallel} and {num_heads} key/value heads don't go together: "
            f"one must divide the other"
        )

    def share(self, count: int, what: str) -> int:
        """An even share of ``count``. Raises ``ConfigError`` when it doesn't divide."""
        if count % self.tensor_parallel:
            raise ConfigError(f"tensor parallel size {self.tensor_parallel} does not divide {count} {what}")
        return count // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class AttentionMemory:
    """Keys and values of each token.

    ``num_heads`` KV heads on this rank, each with a key of ``head_size`` values and a value of ``value_size``
    (default: as large). Kind ``mla`` stores one latent of ``head_size`` instead, and ``index_bytes`` beside it where
    a sparse model's indexer keeps keys of its own. ``extent`` (tokens): the window, the chunk, or the encoder's length.
    """

    kind: AttentionKind
    num_heads: int
    head_size: int
    dtype: KVDtype
    value_size: int | None = None
    index_bytes: int = 0
    extent: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        if self.kind == "mla":
            return self.dtype.one_vector_bytes(self.head_size) + self.index_bytes
        value_size = self.head_size if self.value_size is None else self.value_size
        return self.num_heads * (self.dtype.vector_bytes(self.head_size) + self.dtype.vector_bytes(value_size))

    @property
    def label(self) -> str:
        """The kind for people."""
        names = {
            "full": "full",
            "sliding": "window",
            "chunked": "chunked",
            "mla": "MLA + index" if self.index_bytes else "MLA",
            "cross": "cross",
        }
        return f"{names[self.kind]} {self.extent:,}" if self.extent else names[self.kind]

    def spec(self, block_size: int, page_bytes: int) -> AttentionSpec:
        """The kind the manager works with."""
        extent = self.extent or 0
        match self.kind:
            case "full":
                return FullAttention(block_size=block_size, page_bytes=page_bytes)
            case "mla":
                return MLAAttention(block_size=block_size, page_bytes=page_bytes)
            case "sliding":
                return SlidingWindow(block_size=block_size, page_bytes=page_bytes, window=extent)
            case "chunked":
                return ChunkedLocalAttention(block_size=block_size, page_bytes=page_bytes, chunk_size=extent)
            case "cross":
                return CrossAttention(block_size=block_size, page_bytes=page_bytes)


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor of a state: its shape on one rank and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * value_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class StateMemory:
    """A state of fixed size: ``label`` says of what (Mamba 1, Mamba 2, gated delta net, short convolution, …)."""

    label: str
    tensors: tuple[StateTensor, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def spec(self, block_size: int, page_bytes: int, mode: MambaMode, num_drafted: int) -> AttentionSpec:
        """The kind the manager works with; a block holds one state, and each drafted token needs one of its own."""
        return Mamba(block_size=block_size, page_bytes=page_bytes, mode=mode, num_speculative_states=num_drafted)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One cache of the model: the layer's index in the model, a name, and what it keeps."""

    index: int
    name: str
    memory: AttentionMemory | StateMemory
    drafts: bool = False
    """Whether the layer belongs to a drafter (EAGLE, MTP) that needs the last hidden state."""
