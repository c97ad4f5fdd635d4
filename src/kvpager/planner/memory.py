"""What one layer keeps on one rank: keys and values per token, or a state per request."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
    """How keys and values are stored. ``scale_bytes``: a scale for each vector (one head of one token)."""

    name: str
    value_bytes: int
    scale_bytes: int = 0


KV_DTYPES = {
    "fp16": KVDtype(name="fp16", value_bytes=2),
    "bf16": KVDtype(name="bf16", value_bytes=2),
    "fp8": KVDtype(name="fp8", value_bytes=1),  # one scale a tensor, kept with the weights
    "int8": KVDtype(name="int8", value_bytes=1, scale_bytes=4),
}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of a tensor-parallel group: how much of a layer it keeps, and in what dtypes."""

    tensor_parallel: int
    kv_dtype: KVDtype
    model_dtype: str
    state_dtype: str | None = None
    """What recurrent states are kept in when the user says so; None: what the model says."""

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

    ``num_heads`` KV heads on this rank; each stores ``num_vectors`` vectors (key and value; one for
    a latent) of ``head_size`` values. ``extent`` (tokens): the window, the chunk, or the encoder's length.
    """

    kind: AttentionKind
    num_heads: int
    head_size: int
    dtype: KVDtype
    num_vectors: int = 2
    extent: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        vector = self.head_size * self.dtype.value_bytes + self.dtype.scale_bytes
        return self.num_heads * self.num_vectors * vector

    @property
    def label(self) -> str:
        """The kind for people."""
        names = {
            "full": "full",
            "sliding": "window",
            "chunked": "chunked",
            "mla": "MLA",
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
    """A state of fixed size: ``label`` says of what (Mamba 1, Mamba 2, gated delta net, short convolution)."""

    label: str
    tensors: tuple[StateTensor, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def spec(self, block_size: int, page_bytes: int, mode: MambaMode) -> AttentionSpec:
        """The kind the manager works with; a block holds one state."""
        return Mamba(block_size=block_size, page_bytes=page_bytes, mode=mode)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One cache of the model: the layer's index in the model, a name, and what it keeps."""

    index: int
    name: str
    memory: AttentionMemory | StateMemory
