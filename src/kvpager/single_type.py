"""SingleTypeKVCacheManager: one group's block tables, driven by its attention kind.

It decides nothing about admission; the coordinator asks every group the same questions and then
tells all of them to act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ._native import GroupRule
from .attention import AttentionSpec, Mamba, SinkAttention, ceil_div
from .attention.base import UNBOUNDED
from .events import MEDIUM_GPU, BlockStored
from .pool import NULL_BLOCK, BlockList, BlockPool
from .request import EventSource, RequestLike

__all__ = ["SingleTypeKVCacheManager", "TokenRanges"]


class TokenRanges(NamedTuple):
    """The tokens that one allocation speaks of, as ends of half-open ranges::

        computed | new hits | external | new | lookahead
                            ^          ^     ^           ^
                  num_local |          |     |           | num_slots (≤ max_model_len)
                          num_computed |     | num_main

    ``num_start`` is where computing goes on: at ``num_computed``, but at the sequence's last token at the latest,
    since its logits are wanted. What is dead is dead as seen from there. ``num_processed`` are the computed tokens
    whose step's result is known: what is dead as seen from there is released before anything is taken.
    """

    num_local: int
    num_computed: int
    num_start: int
    num_main: int
    num_slots: int
    num_prompt_tokens: int
    num_encoder_tokens: int = 0
    num_processed: int = 0


class SingleTypeKVCacheManager:
    """The tables of one group.

    ``stride`` is how many hash blocks one of its blocks spans; ``alignment`` (tokens) is what hits
    of the whole cache are multiples of; ``is_eagle`` groups accept a hit only if one block more
    would hit too; ``shareable_decoded`` is the cache's least (see `AttentionSpec`).
    """

    def __init__(
        self,
        group_id: int,
        spec: AttentionSpec,
        pool: BlockPool,
        *,
        stride: int,
        alignment: int,
        is_eagle: bool,
        shareable_decoded: int | None,
        retention_interval: int | None,
        event_source: Callable[[RequestLike], EventSource],
    ) -> None:
        self.group_id = group_id
        self.spec = spec
        self.block_size = spec.block_size
        self.tables: dict[str, BlockList] = {}
        self.is_align = isinstance(spec, Mamba) and spec.mode == "align"
        # A state is all that a Mamba group needs at L, drafts or not.
        self.hit_margin = spec.block_size if is_eagle and not isinstance(spec, Mamba) else 0
        self.sink_blocks = pool.reserve(spec.num_sink_blocks) if isinstance(spec, SinkAttention) else []
        self.stride = stride
        self._pool = pool
        self._alignment = alignment
        self._event_source = event_source
        self._shareable_decoded = shareable_decoded
        self._commit_margin = spec.block_size if is_eagle else 0
        self._checkpoint_interval = self._interval(retention_interval)
        self.rule = self._as_numbers()

    def _as_numbers(self) -> GroupRule:
        """The kind as the compiled part knows it, which serves running requests."""
        spec = self.spec
        return GroupRule(
            group=self.group_id,
            block_size=self.block_size,
            stride=self.stride,
            lag=-1 if spec.lag is None else spec.lag,
            span=spec.span,
            release_delay=spec.release_delay,
            alignment=self._alignment,
            commit_margin=self._commit_margin,
            hit_margin=self.hit_margin,
            shareable=-1 if self._shareable_decoded is None else self._shareable_decoded,
            interval=-1 if self._checkpoint_interval is None else self._checkpoint_interval,
            grows=spec.num_slots(1) != UNBOUNDED,
            keeps_prompt=spec.first_mortal_block(1) > 0,
            is_state=isinstance(spec, Mamba),
            is_align=self.is_align,
            notes_new=spec.reads_whole_blocks,
        )

    def _interval(self, retention_interval: int | None) -> int | None:
        """Tokens between two hit lengths whose blocks are worth caching; None: all blocks are."""
        spec = self.spec
        if retention_interval is not None and spec.sparse_retention:
            interval = retention_interval
        elif spec.caches_only_useful:
            interval = self._alignment
        else:
            return None
        far = self._alignment * (ceil_div(spec.lag or 0, self._alignment) + 2)
        needed = self.needed_for_hit(far)
        return None if 0 < interval <= len(needed) * spec.block_size else interval

    # -- questions about hits ------------------------------------------------------------------

    def needed_for_hit(self, num_tokens: int) -> range:
        """Positions that must be cached for a hit of ``num_tokens``, the EAGLE block included. O(1)."""
        needed = self.spec.needed_for_hit(num_tokens)
        return range(needed.start, (num_tokens + self.hit_margin) // self.block_size)

    def lookup(self, hashes: Sequence[bytes], num_tokens: int) -> BlockList:
        """The blocks of a hit that ``needed_for_hit`` has been found for; dead positions are null. O(hit)."""
        needed = self.spec.needed_for_hit(num_tokens)
        return self._pool.lookup(self.group_id, hashes, self.stride, needed.start, needed.stop)

    def serves(self, hits: BlockList, hashes: Sequence[bytes]) -> bool:
        """Whether a hit looked up earlier can still be taken. O(hit)."""
        return self._pool.serves(hits, self.group_id, hashes, self.stride)

    def is_computed(self, hits: BlockList) -> bool:
        """False if the state to start from is only computed in this very step. O(1)."""
        return not (isinstance(self.spec, Mamba) and len(hits)) or not self._pool.is_computing(hits[len(hits) - 1])

    # -- the plan: what an allocation takes from the free blocks -------------------------------

    def need(self, request_id: str, hits: BlockList, tokens: TokenRanges) -> int:
        """Free blocks that ``adopt`` and the two ``extend`` will take. O(hits) at admission, else O(1)."""
        table = self.tables.get(request_id)
        length = len(hits) if table is None else len(table)
        dead = self.spec.dead(tokens.num_start, tokens.num_prompt_tokens)
        need = self._evictable(hits, dead) if table is None else 0
        if tokens.num_computed > tokens.num_local:
            loaded = self._growth(length, tokens.num_computed, tokens.num_encoder_tokens, dead, 0, False)
            need += loaded.num_new
            length += loaded.num_positions
        return need + self._growth_to_slots(request_id, length, tokens, dead).num_new

    def need_of_sequence(self, request_id: str, hits: BlockList, tokens: TokenRanges, max_step: int) -> int:
        """Free blocks that the sequence takes at most on its way from ``num_start`` to ``num_slots``
        tokens in steps of up to ``max_step``. O(hits) at admission.

        Over the token counts n at which a step may start: blocks held during that step, less the hits
        that others hold now, less what the request holds itself.
        """
        table = self.tables.get(request_id)
        length = len(hits) if table is None else len(table)
        if self.is_align:
            return self._need_of_states(table, hits, tokens)
        needs = []
        last = max(tokens.num_start, tokens.num_slots - max_step)
        for start in self.spec.step_starts_to_check(tokens.num_start, last, tokens.num_prompt_tokens):
            dead = self.spec.dead(start - self.spec.release_delay, tokens.num_prompt_tokens)
            if table is None:  # what is dead where it starts is null at once; only later does releasing trail
                dead = max(dead, self.spec.dead(tokens.num_start, tokens.num_prompt_tokens), key=len)
            slots = min(start + max_step, tokens.num_slots)
            need = self._growth(length, slots, tokens.num_encoder_tokens, dead, self.spec.release_delay, False).num_new
            if table is None:
                need += self._evictable(hits, dead)
            else:
                need -= self._pool.count_exclusive(table, max(dead.start, self._still_held(table, tokens)), dead.stop)
            needs.append(need)
        return max(0, *needs)

    def most_held(self, tokens: TokenRanges, max_step: int) -> int:
        """Blocks that a sequence of ``num_slots`` holds at most, nothing of it being shared. O(log span)."""
        return self.spec.most_held(self._goal(tokens), max_step, tokens.num_prompt_tokens, tokens.num_encoder_tokens)

    def _need_of_states(self, table: BlockList | None, hits: BlockList, tokens: TokenRanges) -> int:
        """Of an align group's states, those from before, the running one and the speculative ones. O(held)."""
        assert isinstance(self.spec, Mamba)
        speculative, most = self.spec.release_delay, self.spec.most_states
        goal = ceil_div(self._goal(tokens), self.block_size)
        if table is None:
            evictable = self._evictable(hits, self.spec.dead(tokens.num_start, tokens.num_prompt_tokens))
            start = evictable + (tokens.num_computed > tokens.num_local)  # the hit's state, or a loaded one
            ahead = goal - ceil_div(tokens.num_computed, self.block_size)
            return min(most, start + ahead) + speculative
        held = self._pool.count_exclusive(table, self._still_held(table, tokens), len(table))
        ahead = goal - (len(table) - speculative)
        return max(0, min(ahead, most + speculative - held))

    def _still_held(self, table: BlockList, tokens: TokenRanges) -> int:
        """The first position that is not dead once what ``num_processed`` allows is released. O(1)."""
        dead = self.spec.dead(tokens.num_processed - self.spec.release_delay, tokens.num_prompt_tokens)
        return max(table.num_released, dead.stop)

    def releasable(self, request_id: str, num_processed: int, num_prompt_tokens: int) -> int:
        """Blocks that ``release`` would add to the free ones. O(newly dead)."""
        table = self.tables.get(request_id)
        if table is None:
            return 0
        dead = self.spec.dead(num_processed - self.spec.release_delay, num_prompt_tokens)
        return self._pool.count_exclusive(table, max(dead.start, table.num_released), dead.stop)

    def _evictable(self, hits: BlockList, dead: range) -> int:
        count = self._pool.count_evictable
        return count(hits, 0, min(dead.start, len(hits))) + count(hits, dead.stop, len(hits))

    def _growth(
        self, length: int, num_tokens: int, num_encoder_tokens: int, dead: range, speculative: int, running: bool
    ) -> _Growth:
        """How a table of ``length`` positions grows to serve ``num_tokens``. O(1)."""
        positions = self.spec.num_positions(num_tokens, num_encoder_tokens)
        goal = positions - self.spec.release_delay + speculative
        if goal <= length:
            return _NO_GROWTH
        if self.is_align:
            # Only the running state and the speculative ones get memory. The speculative blocks
            # of the last step move along; what lies between is nobody's state.
            first = goal - speculative - 1
            nulls = max(0, first - length)
            moved = max(0, min(length, first) - (length - speculative)) if running else 0
            return _Growth(0, nulls, moved, goal - length - nulls - moved)
        null_start = min(max(dead.start, length), goal)
        null_stop = min(max(dead.stop, null_start), goal)
        return _Growth(null_start - length, null_stop - null_start, 0, goal - null_stop)

    def _growth_to_slots(self, request_id: str, length: int, tokens: TokenRanges, dead: range) -> _Growth:
        table, speculative = self.tables.get(request_id), self.spec.release_delay
        running = table is not None and table.is_running
        return self._growth(length, self._goal(tokens), tokens.num_encoder_tokens, dead, speculative, running)

    def _goal(self, tokens: TokenRanges) -> int:
        """The token count to grow to. Drafts have no state layers: lookahead slots are not for align groups."""
        return tokens.num_main if self.is_align else tokens.num_slots

    # -- the deed: cannot fail once the plan has been found to fit -----------------------------

    def adopt(self, request_id: str, hits: BlockList, tokens: TokenRanges) -> None:
        """Start the request's table with a hit; what is dead at ``num_start`` becomes null. O(hits)."""
        table = self.tables[request_id] = BlockList()
        dead = self.spec.dead(tokens.num_start, tokens.num_prompt_tokens)
        null_start, null_stop = min(dead.start, len(hits)), min(dead.stop, len(hits))
        self._pool.adopt(table, hits, 0, null_start)
        self._pool.extend_null(table, null_stop - null_start)
        self._pool.adopt(table, hits, null_stop, len(hits))
        table.num_committed = len(hits)
        table.num_released = dead.stop

    def extend_loaded(self, request_id: str, tokens: TokenRanges) -> None:
        """Append blocks for the external tokens. O(blocks)."""
        table = self.tables[request_id]
        dead = self.spec.dead(tokens.num_start, tokens.num_prompt_tokens)
        self._grow(table, self._growth(len(table), tokens.num_computed, tokens.num_encoder_tokens, dead, 0, False))

    def extend(self, request_id: str, tokens: TokenRanges) -> BlockList:
        """Append blocks for the new and lookahead tokens; gives the positions appended. O(blocks)."""
        table = self.tables[request_id]
        length = len(table)
        dead = self.spec.dead(tokens.num_start, tokens.num_prompt_tokens)
        self._grow(table, self._growth_to_slots(request_id, length, tokens, dead))
        table.is_running = self.is_align
        return table.slice(length, len(table))

    def _grow(self, table: BlockList, growth: _Growth) -> None:
        note = self.spec.reads_whole_blocks
        if growth.before:
            self._pool.extend(table, growth.before, note)
        if growth.nulls:
            self._pool.extend_null(table, growth.nulls)
        first_moved = len(table) - growth.nulls - self.spec.release_delay
        for position in range(first_moved, first_moved + growth.moved):
            self._pool.move(table, position)
        if growth.after:
            self._pool.extend(table, growth.after, note)

    def release(self, request_id: str, num_processed: int, num_prompt_tokens: int, junction: int) -> None:
        """Give back what no later token reads. O(newly dead)."""
        table = self.tables.get(request_id)
        if table is None:
            return
        dead = self.spec.dead(num_processed - self.spec.release_delay, num_prompt_tokens)
        start, stop = max(dead.start, table.num_released), min(dead.stop, len(table))
        if start < stop:
            self._pool.release(table, start, stop, self.useful_at(junction))
            table.num_released = stop

    def useful_at(self, junction: int) -> range:
        """Positions that a hit at the junction will need. O(1)."""
        return self.needed_for_hit(junction) if junction else range(0)

    def pop_table(self, request_id: str) -> BlockList:
        """Forget the request; its blocks are the caller's to give back. O(1)."""
        return self.tables.pop(request_id, None) or BlockList()

    def whole_table(self, request_id: str) -> BlockList:
        """A copy of the request's table, static sinks first; empty for an unknown request. O(blocks)."""
        table = self.tables.get(request_id)
        if table is None:
            return BlockList()
        return BlockList(self.sink_blocks + table.ids()) if self.sink_blocks else table.slice(0, len(table))

    # -- the index -----------------------------------------------------------------------------

    def step_ends(self, request_id: str, num_tokens: int) -> None:
        """Note that a step (or a load) ends with the state after ``num_tokens``. O(1)."""
        self.rule.step_ends(self.tables[request_id], num_tokens)

    def commit(self, request: RequestLike, num_tokens: int, junction: int) -> None:
        """Offer the blocks up to ``num_tokens`` to the index. O(newly full blocks)."""
        table = self.tables[request.request_id]
        runs = self.rule.commit(
            self._pool, table, request.block_hashes, num_tokens, request.num_prompt_tokens, junction
        )
        if self._pool.logs_events:
            for run in runs:
                self.log_stored(request, run)

    def log_stored(self, request: RequestLike, run: range) -> None:
        """Tell that the blocks of these positions are in the index now. O(tokens of the run)."""
        hashes, size, stride = request.block_hashes, self.block_size, self.stride
        start, stop = run.start * size, run.stop * size
        source = self._event_source(request)
        has_keys = source.extra_keys(start, stop) is not None  # nearly never
        self._pool.log(
            BlockStored(
                block_hashes=list(hashes[(run.start + 1) * stride - 1 : run.stop * stride : stride]),
                parent_block_hash=hashes[run.start * stride - 1] if run.start else None,
                token_ids=list(request.all_token_ids[start:stop]),
                block_size=size,
                lora_id=source.lora_id,
                medium=MEDIUM_GPU,
                lora_name=source.lora_name,
                extra_keys=[source.extra_keys(p * size, (p + 1) * size) if has_keys else None for p in run],
                group_idx=self.group_id,
            )
        )

    def first_token(self, position: int) -> int:
        """The first token that a table's position has to do with. O(1)."""
        return position * self.block_size if self.spec.can_hit else 0

    def can_resume(self, request_id: str, token: int, num_prompt_tokens: int) -> bool:
        """Whether what tokens from ``token`` on read is there, and so is what they write. O(blocks)."""
        table = self.tables[request_id]
        if isinstance(self.spec, Mamba) and not self.spec.can_hit:  # one state, overwritten in place
            return not token
        if self.is_align:  # the state after exactly ``token`` tokens, and a block for each that follows
            first = token // self.block_size
            starts = not token or (token % self.block_size == 0 and self._pool.block_hash(table[first - 1]) is not None)
            return starts and NULL_BLOCK not in table.ids(first)
        dead = self.spec.dead(token, num_prompt_tokens)
        return NULL_BLOCK not in table.ids(0, dead.start) + table.ids(dead.stop)

    def uncommit(self, request_id: str, position: int) -> None:
        """Everything from ``position`` on has to be computed and committed again. O(1)."""
        table = self.tables[request_id]
        table.num_committed = min(table.num_committed, position)
        table.step_ends = [ended for ended in table.step_ends if ended < position]


class _Growth(NamedTuple):
    """What is appended to a table, in this order."""

    before: int
    nulls: int
    moved: int
    after: int

    @property
    def num_new(self) -> int:
        return self.before + self.after

    @property
    def num_positions(self) -> int:
        return self.before + self.nulls + self.moved + self.after


_NO_GROWTH = _Growth(0, 0, 0, 0)
