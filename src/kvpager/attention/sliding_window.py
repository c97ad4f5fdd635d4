"""Sliding-window attention: a token reads itself and the ``window - 1`` tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import AttentionSpec

__all__ = ["SlidingWindow"]


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(AttentionSpec):
    """Attention over the last ``window`` tokens, the current one included."""

    window: int

    kind: ClassVar[str] = "sliding_window"
    caches_only_useful: ClassVar[bool] = True
    sparse_retention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("window", self.window, 1)

    @property
    def lag(self) -> int:
        return self.window - 1

    @property
    def sliding_window(self) -> int:
        return self.window
