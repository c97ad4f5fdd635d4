"""What both managers should answer, from first principles: slow, and sharing no code with either.

When the two disagree, this says who is right, so that a named difference has a direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Index = Mapping[tuple[bytes, int], Sequence[int]]
"""(hash, group) to the blocks that carry it."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer not below the quotient."""
    return -(-numerator // denominator)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One group of layers, said in words that neither manager knows. Sizes in tokens."""

    name: str
    block: int = 4
    window: int = 0
    chunk: int = 0
    kept: int = 0
    """Decoded tokens that stay readable besides the whole prompt (reference window)."""
    states: int = 0
    """Speculative states (Mamba)."""
    eagle: bool = False

    @property
    def is_mamba(self) -> bool:
        """Whether a block holds a state instead of tokens."""
        return self.name.startswith("mamba")

    def dead_blocks(self, num_computed: int) -> int:
        """Leading blocks that no later token reads."""
        if self.window:
            return max(0, num_computed - self.window + 1) // self.block
        if self.chunk:
            return num_computed // self.chunk * self.chunk // self.block
        if self.is_mamba:
            return max(0, num_computed - 1) // self.block
        return 0

    def gap(self, num_computed: int, num_prompt: int) -> range:
        """Dead blocks between the prompt and the window over what was decoded."""
        first = ceil_div(num_prompt, self.block)
        return range(first, max(first, (num_computed - self.kept) // self.block)) if self.kept else range(0)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One allocation as the formulas see it: token counts and the blocks at hand, per group."""

    num_local: int
    """Tokens computed and hit here, before external ones."""
    num_external: int
    num_new: int
    num_lookahead: int
    max_model_len: int
    num_prompt: int
    num_request_tokens: int
    step: int
    """Tokens that one step computes at most."""
    tables: Sequence[Sequence[int]]
    """What the request holds, dead blocks already null."""
    hits: Sequence[Sequence[int]]
    refs: Sequence[int]
    has_running_state: Sequence[bool]
    """Per group: whether Mamba `align` has given the request a running state."""

    @property
    def num_total(self) -> int:
        """Computed tokens, hits and external ones included."""
        return min(self.num_local + self.num_external, self.max_model_len)

    @property
    def num_main(self) -> int:
        """Tokens after this step, without lookahead."""
        return self.num_local + self.num_external + self.num_new

    @property
    def num_slots(self) -> int:
        """Token slots that the request needs after this step."""
        return min(self.num_main + self.num_lookahead, self.max_model_len)


def longest_hit(kinds: Sequence[Kind], index: Index, hashes: Sequence[bytes], cap: int) -> int:
    """The longest aligned length up to ``cap`` that every group accepts, by trying them all."""
    alignment = math.lcm(*(kind.block for kind in kinds))
    unit = math.gcd(*(kind.block for kind in kinds))

    def holds(group: int, length: int) -> bool:
        kind = kinds[group]
        return all(
            (hashes[(i + 1) * kind.block // unit - 1], group) in index
            for i in range(kind.dead_blocks(length), length // kind.block)
        )

    def accepts(group: int, length: int) -> bool:
        kind = kinds[group]
        if not kind.eagle or kind.is_mamba:
            return holds(group, length)
        return length + kind.block <= cap and holds(group, length) and holds(group, length + kind.block)

    for length in range(cap // alignment * alignment, 0, -alignment):
        if all(accepts(group, length) for group in range(len(kinds))):
            return length
    return 0


def covers(kinds: Sequence[Kind], hits: Sequence[Sequence[int]], length: int) -> bool:
    """Whether every group's answer is about exactly ``length`` tokens."""
    return all(len(ids) * kind.block == length for kind, ids in zip(kinds, hits, strict=True))


def evictable(ids: Sequence[int], refs: Sequence[int]) -> int:
    """Blocks that would leave the free queue when they are taken."""
    return sum(block != 0 and refs[block] == 0 for block in ids)


def step_need(kinds: Sequence[Kind], ask: Ask) -> int:
    """Free blocks that this allocation really takes."""
    return sum(_step_need(kind, ask, group) for group, kind in enumerate(kinds))


def _step_need(kind: Kind, ask: Ask, group: int) -> int:
    dead = kind.dead_blocks(ask.num_total)
    table, hits = ask.tables[group], ask.hits[group]
    if table:
        length, taken = len(table), 0
    else:
        length = max(dead if hits or ask.num_external else 0, len(hits))
        taken = evictable(hits[dead:], ask.refs)
    if kind.name != "mamba-align":
        return taken + max(0, ceil_div(ask.num_slots, kind.block) + kind.states - max(length, 0))
    if ask.num_external:
        after = max(length, ceil_div(ask.num_total, kind.block))
        taken, length = taken + after - length, after
    return taken + _align_need(kind, ask, length, ask.has_running_state[group])


def _align_need(kind: Kind, ask: Ask, length: int, running: bool) -> int:
    """Fresh states for a step: the running one and the speculative ones move along, the rest is null."""
    positions = ceil_div(ask.num_main, kind.block) + kind.states
    if positions <= length:
        return 0
    skipped = positions - kind.states - 1
    moved = sum(i < skipped for i in range(length - kind.states, length)) if running else 0
    return positions - max(length, skipped) - moved


def gate_need(kinds: Sequence[Kind], ask: Ask, *, num_lookahead: int | None = None) -> int:
    """Free blocks that the whole sequence takes at most, computed in steps of at most ``ask.step`` tokens."""
    lookahead = ask.num_lookahead if num_lookahead is None else num_lookahead
    end = min(min(ask.num_request_tokens, ask.max_model_len) + lookahead, ask.max_model_len)
    return sum(_gate_need(kind, ask, group, end, ask.step + lookahead) for group, kind in enumerate(kinds))


def _gate_need(kind: Kind, ask: Ask, group: int, end: int, step: int) -> int:
    """``step``: token slots that one step needs at most, lookahead included."""
    if kind.name == "mamba-align":
        return _gate_need_of_states(kind, ask, group, end)
    last = max(ask.num_total, end - step)
    return max(0, *(_held_more(kind, ask, group, n, min(n + step, end)) for n in range(ask.num_total, last + 1)))


def _held_more(kind: Kind, ask: Ask, group: int, num_computed: int, num_slots: int) -> int:
    """Blocks fewer in the free queue than now, in a step from ``num_computed`` tokens to ``num_slots``."""
    dead = max(kind.dead_blocks(ask.num_total), kind.dead_blocks(num_computed - kind.states))
    end = ceil_div(num_slots, kind.block) + kind.states
    table, hits, gap = ask.tables[group], ask.hits[group], kind.gap(num_computed, ask.num_prompt)
    if table:
        gone = [*table[:dead], *table[gap.start : gap.stop]]
        given_back = sum(block != 0 and ask.refs[block] == 1 for block in gone)
        return max(0, end - max(len(table), dead)) - given_back
    return max(0, end - max(len(hits), dead)) - len(gap) + evictable(hits[dead:], ask.refs)


def _gate_need_of_states(kind: Kind, ask: Ask, group: int, end: int) -> int:
    """Mamba `align`: a first step takes the hit and a running state, a later one holds two states in turn.

    A loaded state is there already, or is one block more; it may itself be the last one.
    """
    table, hits, positions = ask.tables[group], ask.hits[group], ceil_div(end, kind.block)
    if table:
        return 1 + kind.states if positions > len(table) else 0
    if ask.num_external:
        return 1 + (1 + kind.states if positions > ceil_div(ask.num_total, kind.block) else 0)
    first = 1 + evictable(hits[kind.dead_blocks(ask.num_total) :], ask.refs)
    return max(first, min(2, positions - len(hits))) + kind.states


def whole_life(kinds: Sequence[Kind], num_prompt: int, num_slots: int, step: int) -> int:
    """Blocks that a sequence holds at most from nothing to ``num_slots``, ``step`` slots at a time."""
    nothing = Ask(
        num_local=0,
        num_external=0,
        num_new=0,
        num_lookahead=0,
        max_model_len=num_slots,
        num_prompt=num_prompt,
        num_request_tokens=num_slots,
        step=step,
        tables=[[] for _ in kinds],
        hits=[[] for _ in kinds],
        refs=[],
        has_running_state=[False for _ in kinds],
    )
    return gate_need(kinds, nothing)
