"""Reference-window attention: the whole prompt and a window over what was decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import AttentionSpec

__all__ = ["ReferenceWindow"]


@dataclass(frozen=True, kw_only=True)
class ReferenceWindow(AttentionSpec):
    """A token reads the prompt and the last ``window`` tokens; the gap between them dies."""

    window: int

    kind: ClassVar[str] = "reference_window"
    needs_whole_prefix: ClassVar[bool] = True
    keeps_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("window", self.window, 1)

    @property
    def lag(self) -> int:
        return self.window

    @property
    def shareable_decoded(self) -> int:
        # The token this many behind the prompt is the last that still reads all before it. Who has a longer prompt
        # would read more at later ones.
        return self.window + 1
