"""Chunked local attention: a token reads the earlier tokens of its own chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigError
from .base import AttentionSpec

__all__ = ["ChunkedLocalAttention"]


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttention(AttentionSpec):
    """Attention within chunks of ``chunk_size`` tokens (a multiple of the block size)."""

    chunk_size: int

    kind: ClassVar[str] = "chunked_local_attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("chunk_size", self.chunk_size, 1)
        if self.chunk_size % self.block_size:
            raise ConfigError(
                f"ChunkedLocalAttention.chunk_size must be a multiple of the block size (with context "
                f"parallelism: of block size x world size, {self.block_size}), got {self.chunk_size}; "
                f"choose a block size that divides the chunk"
            )

    @property
    def lag(self) -> int:
        return 0

    @property
    def span(self) -> int:
        return self.chunk_size
