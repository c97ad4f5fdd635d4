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
from .base import UNBOUNDED, AttentionSpec, ceil_div

__all__ = ["Mamba", "MambaMode"]

MambaMode = Literal["none", "all", "align"]


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
    def lag(self) -> int | None:
        return None if self.mode == "none" else 1

    @property
    def release_delay(self) -> int:
        return self.num_speculative_states

    def num_positions(self, num_slots: int, num_encoder_tokens: int) -> int:
        states = 1 if self.mode == "none" else ceil_div(num_slots, self.block_size)
        return states + self.num_speculative_states

    def num_slots(self, num_positions: int) -> int:
        if self.mode == "none":
            return UNBOUNDED
        return max(0, num_positions - self.num_speculative_states) * self.block_size

    def most_held(self, num_slots: int, max_step: int, num_prompt_tokens: int, num_encoder_tokens: int = 0) -> int:
        if self.mode != "align":
            return super().most_held(num_slots, max_step, num_prompt_tokens, num_encoder_tokens)
        return min(self.most_states, ceil_div(num_slots, self.block_size)) + self.num_speculative_states

    @property
    def most_states(self) -> int:
        """Align: states that are held at once beside the speculative ones.

        The running one and the one before; and, since releasing trails by the speculative states, those
        before that which so many tokens can reach back to.
        """
        return 2 + ceil_div(self.num_speculative_states, self.block_size)
