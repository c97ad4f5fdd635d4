"""The caches that are measured, in words both managers are built from."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 16
"""Tokens in a block."""
LONG = 32_768
"""Tokens of a long prompt."""
STEP = 8_192
"""Tokens that one step computes at most."""
MAX_MODEL_LEN = 131_072


@dataclass(frozen=True)
class Shape:
    """Groups of one cache: ``window`` counts sliding-window groups of 1,024 tokens, ``mamba`` align groups."""

    name: str
    window: int = 0
    mamba: int = 0

    @property
    def num_groups(self) -> int:
        """Groups, the full-attention one included."""
        return 1 + self.window + self.mamba


FULL = Shape("full")
WINDOWS = Shape("full + 3 sliding windows", window=3)
MAMBA = Shape("full + Mamba align", mamba=1)
