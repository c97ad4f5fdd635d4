"""What all attention kinds share: one pure function, ``dead``, and what follows from it.

A kind is a frozen description of one group of layers. What sets kinds apart is when a
token is read for the last time, and that is two numbers:

- ``lag``: with n tokens computed, the last ``lag`` of them are still read by later tokens
  (``None``: all of them are);
- ``span``: tokens die in whole spans (a block, or a chunk of several).

Everything else (what may be released, what a hit needs, how many blocks a prefill holds
at most) is derived here, once, for all kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..errors import ConfigError

__all__ = ["UNBOUNDED", "AttentionSpec", "ceil_div"]

UNBOUNDED = sys.maxsize
"""More tokens than any sequence has."""


def ceil_div(numerator: int, denominator: int) -> int:
    """⌈numerator / denominator⌉ for integers."""
    return -(-numerator // denominator)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Base of the attention kinds.

    ``block_size`` is in tokens. ``page_bytes`` is the memory of one block of one layer on one
    rank, in bytes (0: unknown; only planners and engines look at it).
    """

    block_size: int
    page_bytes: int = 0

    kind: ClassVar[str] = ""
    """The field's name of the kind, as events carry it."""
    can_hit: ClassVar[bool] = True
    """Whether blocks of this kind can be reused by another request."""
    holds_tokens: ClassVar[bool] = True
    """Whether position i of a table holds the tokens of block i (states and encoder outputs do not)."""
    reads_whole_blocks: ClassVar[bool] = False
    """Whether kernels of this kind read whole blocks, so that new ones have to be zeroed."""
    caches_only_useful: ClassVar[bool] = False
    """Whether blocks that no aligned hit can use stay out of the index."""
    sparse_retention: ClassVar[bool] = False
    """Whether the retention interval makes this kind's checkpoints sparser."""
    needs_whole_prefix: ClassVar[bool] = False
    """Whether a hit needs every block before it, so that a shorter hit is always possible too."""
    shared_prefix: ClassVar[bool] = False
    """Whether a table's leading blocks are a prefix that kernels can share (cascade attention)."""

    def __post_init__(self) -> None:
        self._require("block_size", self.block_size, 1)
        self._require("page_bytes", self.page_bytes, 0)

    def _require(self, name: str, value: object, at_least: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ConfigError(f"{type(self).__name__}.{name} must be an integer of at least {at_least}, got {value!r}")

    # -- what sets the kinds apart ------------------------------------------------------------

    @property
    def lag(self) -> int | None:
        """How many of the last computed tokens later tokens still read; None: all of them."""
        return None

    @property
    def span(self) -> int:
        """In what pieces (tokens) a sequence dies; a multiple of the block size."""
        return self.block_size

    @property
    def release_delay(self) -> int:
        """Tokens by which releasing trails ``dead`` (speculative states that may be rolled back)."""
        return 0

    @property
    def sliding_window(self) -> int | None:
        """The window in tokens, for events; None for every other kind."""
        return None

    def first_mortal_block(self, num_prompt_tokens: int) -> int:
        """The first block that can ever die."""
        return 0

    @property
    def shareable_decoded(self) -> int | None:
        """How many decoded tokens can be hit (None: all): later ones' K/V depends on where the prompt ended."""
        return None

    def num_positions(self, num_slots: int, num_encoder_tokens: int) -> int:
        """Table length that ``num_slots`` token slots need. O(1)."""
        return ceil_div(num_slots, self.block_size)

    def num_slots(self, num_positions: int) -> int:
        """Token slots that a table of ``num_positions`` serves: what num_positions undoes. O(1)."""
        return num_positions * self.block_size

    # -- what follows from it -----------------------------------------------------------------

    def dead(self, num_computed_tokens: int, num_prompt_tokens: int) -> range:
        """Blocks that no later token reads once ``num_computed_tokens`` are computed. O(1)."""
        first = self.first_mortal_block(num_prompt_tokens)
        lag = self.lag
        if lag is None or num_computed_tokens <= lag:
            return range(first, first)
        stop = (num_computed_tokens - lag) // self.span * (self.span // self.block_size)
        return range(first, max(first, stop))

    def needed_for_hit(self, num_tokens: int) -> range:
        """Blocks that a hit of ``num_tokens`` (a multiple of the block size) reads. O(1)."""
        return range(len(self.dead(num_tokens, num_tokens)), num_tokens // self.block_size)

    def step_starts_to_check(self, first: int, last: int, num_prompt_tokens: int) -> Iterator[int]:
        """The computed counts in [first, last] among which a prefill holds the most blocks.

        A prefill that has n tokens computed holds what is not dead at n, plus its step. Every
        step moves both ends by the same tokens, so the most is held either at ``last`` or just
        before the latest release at or before it. O(log span).
        """
        yield last
        released = len(self.dead(last - self.release_delay, num_prompt_tokens))
        low, high = max(first, last - self.span), last
        if low >= high or len(self.dead(low - self.release_delay, num_prompt_tokens)) == released:
            return
        while high - low > 1:
            middle = (low + high) // 2
            if len(self.dead(middle - self.release_delay, num_prompt_tokens)) < released:
                low = middle
            else:
                high = middle
        yield low

    def most_held(self, num_slots: int, max_step: int, num_prompt_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Blocks that a sequence holds at most on its way to ``num_slots`` tokens in steps of up to ``max_step``,
        nothing of it being shared. O(log span)."""
        held = []
        for start in self.step_starts_to_check(0, max(0, num_slots - max_step), num_prompt_tokens):
            positions = self.num_positions(min(start + max_step, num_slots), num_encoder_tokens)
            dead = self.dead(start - self.release_delay, num_prompt_tokens)
            held.append(positions - len(range(dead.start, min(dead.stop, positions))))
        return max(held)
