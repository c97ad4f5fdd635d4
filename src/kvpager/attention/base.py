"""What all attention kinds share: one pure function, ``dead``, and what follows from it.

A kind is a frozen description of one group of layers. What sets kinds apart is when a
token is read for the last time, and that is two numbers:

- ``lag``: with n tokens computed, the last ``lag`` of them are still read by later tokens
  (``None``: all of them are);
- ``span``: tokens die in whole spans (a block, or a chunk of several).

Everything else (what may be released, what a hit needs, how many blocks a prefill holds
at most) follows from these, once, for all kinds: in ``src/native/groups/kind.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from .._native import AttentionKind
from ..counts import as_count

__all__ = ["AttentionSpec", "Content", "ceil_div"]

Content = Literal["tokens", "encoder_tokens", "last_state", "every_state", "step_states"]
"""What a block holds: the tokens of its position; an encoder's output, allocated once; the one state of a request; the
state at its end; the state at its end if a step ended there, else nothing."""


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
    keeps_prompt: ClassVar[bool] = False
    """Whether only what was decoded dies."""
    shared_prefix: ClassVar[bool] = False
    """Whether a table's leading blocks are a prefix that kernels can share (cascade attention)."""

    def __post_init__(self) -> None:
        self._require("block_size", self.block_size, 1)
        self._require("page_bytes", self.page_bytes, 0)

    def _require(self, name: str, value: object, at_least: int) -> None:
        object.__setattr__(self, name, as_count(value, f"{type(self).__name__}.{name}", at_least))

    def __getstate__(self) -> dict[str, object]:  # to a process pool, say: the rule is made again there
        return {name: value for name, value in vars(self).items() if name != "rule"}

    # -- what sets the kinds apart ------------------------------------------------------------

    @property
    def content(self) -> Content:
        """What a block holds."""
        return "tokens"

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

    @property
    def shareable_decoded(self) -> int | None:
        """How many decoded tokens can be hit (None: all): later ones' K/V depends on where the prompt ended."""
        return None

    # -- what follows from it: the compiled rule says it, here and in the manager --------------

    @cached_property
    def rule(self) -> AttentionKind:
        """The kind as numbers, and all that follows from them."""
        return AttentionKind(
            content=self.content,
            block_size=self.block_size,
            lag=self.lag,
            span=self.span,
            num_speculative_states=self.release_delay,
            keeps_prompt=self.keeps_prompt,
            needs_whole_prefix=self.needs_whole_prefix,
        )

    def num_positions(self, num_slots: int, num_encoder_tokens: int) -> int:
        """Table length that ``num_slots`` token slots need. O(1)."""
        return self.rule.num_positions(num_slots, num_encoder_tokens)

    def num_slots(self, num_positions: int) -> int:
        """Token slots that a table of ``num_positions`` serves: what num_positions undoes. O(1)."""
        return self.rule.num_slots(num_positions)

    def dead(self, num_computed_tokens: int, num_prompt_tokens: int) -> range:
        """Blocks that no later token reads once ``num_computed_tokens`` are computed. O(1)."""
        return self.rule.dead(num_computed_tokens, num_prompt_tokens)

    def needed_for_hit(self, num_tokens: int) -> range:
        """Blocks that a hit of ``num_tokens`` (a multiple of the block size) reads: not dead at its end. O(1)."""
        return self.rule.needed_for_hit(num_tokens)

    def step_starts_to_check(self, first: int, last: int, num_prompt_tokens: int) -> list[int]:
        """The computed counts in [first, last] among which a prefill holds the most blocks. O(log span)."""
        return self.rule.step_starts_to_check(first, last, num_prompt_tokens)

    def most_held(self, num_slots: int, max_step: int, num_prompt_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Blocks that a sequence holds at most on its way to ``num_slots`` tokens in steps of up to ``max_step``,
        nothing of it being shared. O(log span)."""
        return self.rule.most_held(num_slots, max_step, num_prompt_tokens, num_encoder_tokens)
