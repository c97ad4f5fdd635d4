"""One group's attention kind in plain Python: the oracle of the compiled ``GroupRule``. Position by position."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from .pool import BlockList, BlockPool

UNBOUNDED = sys.maxsize


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    group: int
    block_size: int
    stride: int
    lag: int
    span: int
    release_delay: int
    alignment: int
    commit_margin: int
    hit_margin: int
    shareable: int
    interval: int
    grows: bool
    keeps_prompt: bool
    is_state: bool
    is_align: bool
    notes_new: bool

    # -- what is dead --------------------------------------------------------------------------

    def first_mortal(self, num_prompt_tokens: int) -> int:
        """The first position that can ever die."""
        return -(-num_prompt_tokens // self.block_size) if self.keeps_prompt else 0

    def dies_at(self, position: int) -> int:
        """The fewest computed tokens with which nobody reads it any more: ``lag`` tokens after its span is over."""
        return (position * self.block_size // self.span + 1) * self.span + self.lag

    def dead(self, num_computed_tokens: int, num_prompt_tokens: int) -> range:
        first = self.first_mortal(num_prompt_tokens)
        if self.lag < 0:
            return range(first, first)
        return range(first, next(p for p in count(first) if self.dies_at(p) > num_computed_tokens))

    def needed_for_hit(self, num_tokens: int) -> range:
        """What is not dead with that many tokens, all of them prompt, and EAGLE's block."""
        return range(len(self.dead(num_tokens, num_tokens)), (num_tokens + self.hit_margin) // self.block_size)

    # -- bounds --------------------------------------------------------------------------------

    def lowest_computed(self, table: BlockList, num_prompt_tokens: int) -> int:
        """The fewest tokens with which all that was released is dead."""
        released = range(self.first_mortal(num_prompt_tokens), table.num_released)
        return max((self.dies_at(position) for position in released if self.lag >= 0), default=0)

    def quiet_until(self, table: BlockList, num_prompt_tokens: int, commits: bool) -> int:
        """The least of: slots, the count before the next commit or boundary, the next death (seen a step later)."""
        slots = max(0, len(table) - self.release_delay) * self.block_size if self.grows else UNBOUNDED
        bounds = [slots]
        if commits:
            bounds.append(self.next_commit(table.num_committed, num_prompt_tokens) - 1)
        if commits and self.is_align:
            bounds.append(slots - 1)
        if self.lag >= 0:
            next_to_die = max(table.num_released, self.first_mortal(num_prompt_tokens))
            bounds.append(self.dies_at(next_to_die) + self.release_delay)
        return min(bounds)

    # -- the index -----------------------------------------------------------------------------

    def num_shareable(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """Without those whose K/V depends on where the prompt ended."""
        return num_tokens if self.shareable < 0 else min(num_tokens, num_prompt_tokens + self.shareable)

    def commit_stop(self, num_tokens: int, num_prompt_tokens: int) -> int:
        """How many leading positions the longest aligned hit can want, the margin included, if they are computed."""
        num_tokens = self.num_shareable(num_tokens, num_prompt_tokens)
        longest_hit = num_tokens // self.alignment * self.alignment
        return min(num_tokens, longest_hit + self.commit_margin) // self.block_size if longest_hit else 0

    def next_commit(self, position: int, num_prompt_tokens: int) -> int:
        """The fewest tokens with which the position is committed; more than there ever are if it never is."""
        for num_tokens in count((position + 1) * self.block_size):
            if self.num_shareable(num_tokens, num_prompt_tokens) < num_tokens:
                break
            if self.commit_stop(num_tokens, num_prompt_tokens) > position:
                return num_tokens
        return UNBOUNDED

    def worth_caching(self, start: int, stop: int, num_prompt_tokens: int, junction: int) -> list[int]:
        """The positions of [start, stop) that a hit of a length that is worth it needs."""
        if self.interval < 0:
            return list(range(start, stop))
        lengths = {junction}
        if self.interval != self.alignment:  # the longest hit that the same prompt could have
            lengths.add((num_prompt_tokens - 1) // self.alignment * self.alignment)
        if self.interval:  # longer ones need nothing before ``stop``
            lengths.update(range(self.interval, self.dies_at(stop) + self.interval, self.interval))
        needed = {position for length in lengths - {0} for position in self.needed_for_hit(length)}
        return sorted(needed & set(range(start, stop)))

    def step_ends(self, table: BlockList, num_tokens: int) -> None:
        """Of an align group's states, those at the end of a block can be hit."""
        if self.is_align and num_tokens % self.block_size == 0:
            table.step_ends.append(num_tokens // self.block_size - 1)

    def commit(
        self,
        pool: BlockPool,
        table: BlockList,
        hashes: Sequence[bytes],
        num_tokens: int,
        num_prompt_tokens: int,
        junction: int,
    ) -> list[range]:
        start, stop = table.num_committed, self.commit_stop(num_tokens, num_prompt_tokens)
        runs: list[range] = []
        for position in self.worth_caching(start, stop, num_prompt_tokens, junction):
            if self.is_align and position not in table.step_ends:
                continue
            if pool.commit(table, self.group, hashes, self.stride, position, position + 1):
                follows = bool(runs) and runs[-1].stop == position
                runs.append(range(runs.pop().start if follows else position, position + 1))
            if self.is_state:
                pool.compute(table.ids(position, position + 1))
        if start < stop:
            table.step_ends = [position for position in table.step_ends if position >= stop]
            table.num_committed = stop
        return runs
