"""Cross attention: an encoder's output, read by every decoder token of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import AttentionSpec, Content

__all__ = ["CrossAttention"]


@dataclass(frozen=True, kw_only=True)
class CrossAttention(AttentionSpec):
    """Blocks for the encoder tokens, allocated once and never shared.

    A cache with such a group never hits: its decoder blocks depend on the encoder's input too.
    """

    kind: ClassVar[str] = "cross_attention"
    holds_tokens: ClassVar[bool] = False
    can_hit: ClassVar[bool] = False

    @property
    def content(self) -> Content:
        return "encoder_tokens"
