"""Mamba and other linear attention: only the state after the last token is read.

A block holds one state. Modes:

- ``none``: one state a request, overwritten in place; never a hit;
- ``all``: a state is kept at every block boundary;
- ``align``: states exist only where a step ended, so a table is null except for the previous
  state, the running one and the speculative ones. A block is worth caching only if a step
  ended exactly at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import ConfigError
from .base import AttentionSpec, Content

__all__ = ["Mamba", "MambaMode"]

MambaMode = Literal["none", "all", "align"]
_CONTENT: dict[MambaMode, Content] = {"none": "last_state", "all": "every_state", "align": "step_states"}


@dataclass(frozen=True, kw_only=True)
class Mamba(AttentionSpec):
    """State layers. ``num_speculative_states`` more states are held for drafts that may be rejected."""

    mode: MambaMode = "align"
    num_speculative_states: int = 0

    kind: ClassVar[str] = "mamba"
    holds_tokens: ClassVar[bool] = False
    sparse_retention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("num_speculative_states", self.num_speculative_states, 0)
        if self.mode not in ("none", "all", "align"):
            raise ConfigError(f"Mamba.mode must be 'none', 'all' or 'align', got {self.mode!r}")

    @property
    def can_hit(self) -> bool:  # type: ignore[override]
        return self.mode != "none"

    @property
    def content(self) -> Content:
        return _CONTENT[self.mode]

    @property
    def lag(self) -> int | None:
        return None if self.mode == "none" else 1

    @property
    def release_delay(self) -> int:
        return self.num_speculative_states
