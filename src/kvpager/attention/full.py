"""Full attention: every later token reads every earlier one, so nothing dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import AttentionSpec

__all__ = ["FullAttention", "MLAAttention"]


@dataclass(frozen=True, kw_only=True)
class FullAttention(AttentionSpec):
    """Full causal attention, also with attention sinks that the layer keeps itself."""

    kind: ClassVar[str] = "full_attention"
    needs_whole_prefix: ClassVar[bool] = True
    reads_whole_blocks: ClassVar[bool] = True
    shared_prefix: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class MLAAttention(FullAttention):
    """Multi-head latent attention: full attention's life, a latent vector's bytes."""

    kind: ClassVar[str] = "mla_attention"
