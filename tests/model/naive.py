"""A naive model of the whole manager: dicts and lists, every rule spelled out by brute force.

Written from the contract alone. It shares nothing with ``kvpager`` but the numbers in a
``CacheConfig`` (block sizes, windows, ...) and the attributes of a request, and not even the
block hashes: a prefix is a node of a trie of tokens (``Prefixes``), so that a wrong hash chain
shows up as well. Nothing here is fast and nothing is clever; where the manager searches, the
model tries every length from the top, and where the manager has a formula, the model counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Books", "Group", "NaiveManager", "Plan", "Prefixes", "Refusal"]

NULL = 0
FULL_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
KINDS_OF_WHOLE_BLOCK_KERNELS = ("full_attention", "mla_attention")


class Prefixes:
    """A trie of tokens: equal prefixes (and salts) are equal nodes, different ones never are."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, Any], int] = {}
        self.parent: dict[int, int] = {}
        self._of_request: dict[int, list[int]] = {}
        self._requests: list[Any] = []  # keeps the ids above from being reused
        self.salts: dict[str, str] = {}  # of the requests that have one

    def child(self, node: int, token: Any) -> int:
        child = self._children.get((node, token))
        if child is None:
            child = self._children[node, token] = len(self._children) + 1
            self.parent[child] = node
        return child

    def root(self, request_id: str) -> int:
        return self.child(0, ("salt", self.salts.get(request_id)))

    def of(self, request: Any) -> list[int]:
        """Node after p tokens of the request, for every p up to its length."""
        nodes = self._of_request.get(id(request))
        if nodes is None:
            self._requests.append(request)
            nodes = self._of_request[id(request)] = [self.root(request.request_id)]
        for token in request.all_token_ids[len(nodes) - 1 :]:
            nodes.append(self.child(nodes[-1], token))
        return nodes


@dataclass(frozen=True)
class Group:
    """One group: the numbers of its attention kind, and what the contract's table says of it."""

    index: int
    kind: str
    mode: str  # Mamba's; "" for the others
    size: int  # tokens a block covers, context parallelism included
    window: int
    chunk: int
    num_speculative: int
    flagged: bool

    def dead_tokens(self, n: int, num_prompt_tokens: int) -> range:
        """Tokens that no later one reads once n are computed."""
        if self.kind == "sliding_window":
            return range(0, max(0, n - self.window + 1))
        if self.kind == "chunked_local_attention":
            return range(0, n // self.chunk * self.chunk)
        if self.kind == "mamba" and self.mode != "none":
            return range(0, max(0, n - 1))
        if self.kind == "reference_window":
            return range(num_prompt_tokens, max(num_prompt_tokens, n - self.window))
        return range(0)

    def is_dead(self, block: int, n: int, num_prompt_tokens: int) -> bool:
        """Whether every token of a table position is dead."""
        tokens = range(block * self.size, (block + 1) * self.size)
        dead = self.dead_tokens(n, num_prompt_tokens)
        return len(dead) > 0 and dead.start <= tokens.start and tokens.stop <= dead.stop

    def is_shareable(self, token: int, num_prompt_tokens: int) -> bool:
        """Whether the token reads all before it, whatever is prompt and whatever was decoded."""
        return self.kind != "reference_window" or not self.dead_tokens(token, num_prompt_tokens)

    def is_released(self, block: int, n: int, num_prompt_tokens: int) -> bool:
        """Dead even if the speculative states were rolled back."""
        return self.is_dead(block, max(0, n - self.num_speculative), num_prompt_tokens)

    def needed(self, length: int) -> list[int]:
        """Positions that a hit of ``length`` reads; a reference window needs them all, as full does."""
        return [j for j in range(length // self.size) if not self.is_dead(j, length, length)]

    def length(self, num_slots: int, num_tokens: int, num_encoder_tokens: int) -> int:
        """Table positions for that many slots, of which ``num_tokens`` are not lookahead."""
        if self.kind == "cross_attention":
            return ceil_div(num_encoder_tokens, self.size)
        if self.kind == "mamba" and self.mode == "none":
            return 1 + self.num_speculative
        if self.kind == "mamba" and self.mode == "align":
            return ceil_div(num_tokens, self.size) + self.num_speculative
        return ceil_div(num_slots, self.size) + self.num_speculative

    @property
    def shares(self) -> bool:
        """Whether blocks of this kind may serve another request."""
        return self.kind != "cross_attention" and self.mode != "none"


@dataclass
class Books:
    """What the model knows of one request that holds blocks."""

    request: Any
    tables: list[list[int]]
    looked_at: list[int]  # per group: positions that were committed or passed over
    ends: set[int] = field(default_factory=set)  # where a step (or a load) ended
    junction: int = 0
    loading: range = range(0)  # tokens of a load under way: neither they nor later ones are committed
    stale: bool = False  # holds blocks from before a lazy reset


@dataclass
class Plan:
    """What one group's table becomes: "new" is a block to allocate, ("move", j) a state that moves."""

    prefix: list[Any]
    growth: list[Any]

    @property
    def num_new(self) -> int:
        return sum(entry == "new" for entry in self.prefix + self.growth)

    @property
    def hits(self) -> list[int]:
        return [entry for entry in self.prefix if entry != "new" and entry != NULL]


class _Nobody:
    """A request that holds nothing."""

    request_id = ""


class Refusal(Exception):
    """Why the model would not allocate: ``args[0]`` is "never", "next step" or "not now"."""


class NaiveManager:
    """The manager's public behaviour, block ids and free order included."""

    def __init__(
        self,
        config: Any,
        *,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        watermark: float = 0.0,
        eviction_order: str = "dead_first",
        prefixes: Prefixes | None = None,
    ) -> None:
        self.groups = list(groups_of(config, use_eagle))
        self.prefixes = prefixes or Prefixes()
        self.alignment = math.lcm(*(g.size for g in self.groups))
        # What a hit must leave to an EAGLE group beyond itself.
        self.one_more = max((g.size for g in self.groups if g.flagged and g.kind != "mamba"), default=0)
        self.interval: int | None = config.retention_interval
        self.max_model_len = max_model_len
        self.batch = max_num_batched_tokens or max_model_len
        self.dead_first = eviction_order == "dead_first"
        self.num_blocks: int = config.num_blocks
        self.watermark = int(watermark * self.num_blocks)
        self.caching_is_on = enable_caching
        self.caching = enable_caching and all(g.shares for g in self.groups) and bool(self.groups)

        sinks = [getattr(g.spec, "num_sink_blocks", 0) for g in config.groups]
        ids = iter(range(1, self.num_blocks))
        self.sinks = [[next(ids) for _ in range(n)] for n in sinks]
        self.never_cached = list(ids)  # the free queue is these three, one after the other
        self.dead: list[int] = []
        self.recent: list[int] = []
        self.count = dict.fromkeys(range(1, self.num_blocks), 0)
        self.key: dict[int, tuple[int, int]] = {}  # block -> (prefix node, group)
        self.index: dict[tuple[int, int], list[int]] = {}
        self.was_hit: set[int] = set()
        self.this_step: set[int] = set()  # Mamba states that were committed in this step
        self.books: dict[str, Books] = {}
        self.log: list[tuple[str, int, int]] = []  # stored / removed / cleared, in order
        self.fresh: list[int] = []  # blocks to be zeroed
        self.num_evictions = 0
        self.last_need = 0  # blocks the last allocation had to find free

    # -- questions ----------------------------------------------------------------------------

    @property
    def queue(self) -> list[int]:
        return self.never_cached + self.dead + self.recent

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1 - sum(len(s) for s in self.sinks)

    def hit(self, request: Any) -> tuple[list[list[int]], int, int]:
        """(blocks per group, tokens hit, junction): every aligned length is tried from the top."""
        nothing: tuple[list[list[int]], int, int] = ([[] for _ in self.groups], 0, 0)
        if not self.caching or request.skip_reading_prefix_cache:
            return nothing
        nodes = self.prefixes.of(request)
        cap = min(request.num_tokens - 1, self.num_shareable(request))
        lengths = range(cap // self.alignment * self.alignment, 0, -self.alignment)
        length = next((n for n in lengths if all(self._accepts(g, n, cap, nodes) for g in self.groups)), 0)
        full = [g for g in self.groups if g.kind in (*FULL_KINDS, "reference_window")]
        shared = (n for n in lengths if n > length and all(self._accepts(g, n, cap, nodes) for g in full))
        junction = next(shared, 0) if full else 0
        tables = []
        for group in self.groups:
            needed = group.needed(length)
            row = [self._cached(group, j, nodes) if j in needed else NULL for j in range(length // group.size)]
            tables.append([NULL if block is None else block for block in row])
        return tables, length, junction

    def num_shareable(self, request: Any) -> int:
        """Leading tokens whose K/V, in whatever layer, does not depend on where the prompt ended."""
        prompt = request.num_prompt_tokens
        tokens = range(self.max_model_len + 1)
        return next((p for p in tokens if not all(g.is_shareable(p, prompt) for g in self.groups)), tokens.stop)

    def _cached(self, group: Group, position: int, nodes: list[int]) -> int | None:
        end = (position + 1) * group.size
        blocks = self.index.get((nodes[end], group.index)) if end < len(nodes) else None
        return blocks[0] if blocks else None

    def _accepts(self, group: Group, length: int, cap: int, nodes: list[int]) -> bool:
        lengths = [length]
        if group.flagged and group.kind != "mamba":
            lengths.append(length + group.size)
        return lengths[-1] <= cap and all(
            self._cached(group, j, nodes) is not None for n in lengths for j in group.needed(n)
        )

    def common_prefix(self, request_id: str) -> list[int]:
        """Leading blocks that every request holds, full attention only."""
        counts = []
        for group in self.groups:
            rows = [b.tables[group.index] for b in self.books.values()]
            mine = self.books[request_id].tables[group.index]
            same = 0
            while same < len(mine) and all(len(r) > same and r[same] == mine[same] for r in rows):
                same += 1
            counts.append(same if group.kind in FULL_KINDS else 0)
        return counts

    def prefill_step(self, request: Any, computed: int, new: int, junction: int) -> int:
        """Tokens of a prefill step that leaves align states where they can be hit."""
        aligned = self.caching_is_on and any(g.mode == "align" for g in self.groups)
        if not aligned or computed >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return new
        ends = range(computed + 1, computed + new + 1)
        replay = max(0, request.num_tokens - 1 - self.one_more) // self.alignment * self.alignment
        for end in ends[:-1]:
            if end in (junction, replay):
                return end - computed
        boundaries = [end for end in ends if end % self.alignment == 0]
        return (boundaries[-1] if boundaries and ends[-1] < replay else ends[-1]) - computed

    # -- what an allocation needs ---------------------------------------------------------------

    def plans(
        self, request: Any, hits: Sequence[Sequence[int]], total: int, main: int, slots: int, encoder: int
    ) -> list[Plan]:
        """What every group's table becomes, on top of what is in it now."""
        return [self._plan(g, request, hits[g.index], total, main, slots, encoder) for g in self.groups]

    def _plan(
        self, group: Group, request: Any, hits: Sequence[int], total: int, main: int, slots: int, encoder: int
    ) -> Plan:
        books = self.books.get(request.request_id)
        prefix: list[Any] = []
        if books is None:
            external = total > len(hits) * group.size
            length = group.length(total, total, encoder) - group.num_speculative if external else len(hits)
            for j in range(length):
                if group.is_dead(j, min(total, request.num_tokens - 1), request.num_prompt_tokens):
                    prefix.append(NULL)  # a whole prompt that is loaded still computes its last token
                else:
                    prefix.append(hits[j] if j < len(hits) else "new")
        table = books.tables[group.index] if books else prefix
        length = group.length(slots, main, encoder)
        if group.mode == "align":
            return Plan(prefix, self._grow_states(group, table, length, first=books is None))
        return Plan(prefix, ["new"] * max(0, length - len(table)))

    @staticmethod
    def _grow_states(group: Group, table: list[Any], length: int, first: bool) -> list[Any]:
        """Running state last but the speculative ones; skipped positions null; spare states move along."""
        if length <= len(table):
            return []
        running = length - 1 - group.num_speculative
        growth: list[Any] = [NULL] * max(0, running - len(table))
        if not first:
            spare = range(len(table) - group.num_speculative, len(table))
            growth += [("move", j) for j in spare if j < running]
        return growth + ["new"] * (length - len(table) - len(growth))

    def need_of_sequence(
        self,
        request: Any,
        hits: Sequence[Sequence[int]],
        total: int,
        end: int,
        lookahead: int,
        encoder: int,
        num_prompt_tokens: int | None = None,
    ) -> int:
        """Most blocks that [total, end), computed in steps of at most ``batch`` tokens, takes from the supply:
        every step there can be is tried, group by group."""
        prompt = request.num_prompt_tokens if num_prompt_tokens is None else num_prompt_tokens
        need = 0
        for group in self.groups:
            most = 0
            for n in range(total, max(total + 1, end)):
                m = min(n + self.batch, end)
                slots = min(m + lookahead, self.max_model_len)
                length = group.length(slots, m, encoder)
                most = max(most, self._taken(group, request, hits[group.index], n, total, m, length, prompt))
            need += most
        return need

    def _taken(
        self, group: Group, request: Any, hits: Sequence[int], n: int, total: int, m: int, length: int, prompt: int
    ) -> int:
        """Blocks taken from the supply while [n, m) is computed: what is held then and was free before."""
        books = self.books.get(request.request_id)
        if books is not None:
            return self._taken_more(group, books.tables[group.index], n, m, length, prompt)
        # What is dead at `total` is null from the start; only later does releasing trail.
        shared = [b != NULL and self.count[b] > 0 for b in hits]
        if group.mode == "align":
            oldest = max(0, total - 1, n - 1 - group.num_speculative) // group.size
            states = set(range(max(oldest, len(hits) - 1), ceil_div(n, group.size))) | {(m - 1) // group.size}
            return len(states) - sum(shared[j] for j in states if j < len(hits)) + group.num_speculative
        alive = [j for j in range(length) if not (group.is_dead(j, total, prompt) or group.is_released(j, n, prompt))]
        return sum(j >= len(hits) or not shared[j] for j in alive)

    def _taken_more(self, group: Group, table: Sequence[int], n: int, m: int, length: int, prompt: int) -> int:
        """The same for a request that holds blocks: what it gives back on the way counts for it."""
        held = [j for j, block in enumerate(table) if block != NULL]
        if group.mode == "align":
            held = [j for j in held if j < len(table) - group.num_speculative]
            oldest = max(0, n - 1 - group.num_speculative) // group.size
            kept = {j for j in held if j >= oldest}
            later = range(max(oldest, len(table) - group.num_speculative), ceil_div(n, group.size))
            states = kept | set(later) | {(m - 1) // group.size}
            return len(states) - len(kept) - sum(self.count[table[j]] == 1 for j in held if j < oldest)
        given_back = [j for j in held if group.is_released(j, n, prompt) and self.count[table[j]] == 1]
        more = [j for j in range(len(table), length) if not group.is_released(j, n, prompt)]
        return len(more) - len(given_back)

    def never_fits(self, request: Any, lookahead: int, encoder: int) -> bool:
        end = min(self.final_length(request), self.max_model_len)
        return self.need_from_nothing(request, end, lookahead, encoder) > self.capacity

    def need_from_nothing(self, request: Any, end: int, lookahead: int, encoder: int) -> int:
        """Blocks a sequence of ``end`` tokens takes at most when it has the cache for itself."""
        nobody, nothing = _Nobody(), [[] for _ in self.groups]  # type: ignore[var-annotated]
        prompt = min(request.num_prompt_tokens, end)
        return self.need_of_sequence(nobody, nothing, 0, end, lookahead, encoder, prompt)

    @staticmethod
    def final_length(request: Any) -> int:
        if request.max_tokens is None:
            return int(request.num_tokens)
        return max(request.num_tokens, request.num_prompt_tokens + request.max_tokens)

    # -- allocation -----------------------------------------------------------------------------

    def allocate(
        self,
        request: Any,
        num_new_tokens: int,
        hit: tuple[list[list[int]], int, int] | None = None,
        *,
        lookahead: int = 0,
        external: int = 0,
        delay: bool = False,
        encoder: int = 0,
        full_sequence: bool = False,
        reserved: int = 0,
        others_run: bool = True,
    ) -> list[list[int]]:
        """The positions appended for new and lookahead tokens; raises ``Refusal``."""
        hits, num_hit, junction = hit or ([[] for _ in self.groups], 0, 0)
        total = min(request.num_computed_tokens + num_hit + external, self.max_model_len)
        main = min(total + num_new_tokens, self.max_model_len)
        slots = min(total + num_new_tokens + lookahead, self.max_model_len)
        self._check_step(request, hits, total, lookahead, encoder)
        if request.request_id in self.books:  # a load that did not arrive left no state
            books = self.books[request.request_id]
            books.ends = {n for n in books.ends if n <= request.num_computed_tokens}
        newcomer = request.status.name in ("WAITING", "PREEMPTED")
        spare = self.watermark if newcomer and others_run else 0
        self.release_dead(
            request.request_id,
            request.num_computed_tokens - request.num_in_flight_tokens,
            request.num_prompt_tokens,
        )
        self.last_need = 0
        if full_sequence:
            end = min(request.num_tokens, self.max_model_len)
            self.last_need = self.need_of_sequence(request, hits, total, end, lookahead, encoder)
        plans = self.plans(request, hits, total, main, slots, encoder)
        self.last_need = max(self.last_need, self.need(plans))
        self._require(self.last_need + spare + reserved)
        grown = self._apply(request, plans, num_hit, junction)
        books = self.books[request.request_id]
        if external:
            books.ends.add(total)
        if num_new_tokens and total + num_new_tokens <= request.num_tokens:
            books.ends.add(total + num_new_tokens)  # else it may be rolled back
        if books.loading and not delay and request.num_computed_tokens <= books.loading.start:
            books.loading = range(0)  # the host computes itself what the load did not bring
        if delay:
            books.loading = range(min(total - external, *books.loading[:1] or (total,)), total)
        self._commit(books, min(total + num_new_tokens, request.num_tokens))
        return grown

    def _require(self, num_blocks: int) -> None:
        if num_blocks > len(self.queue):
            raise Refusal("not now", num_blocks - len(self.queue))

    def _check_step(
        self, request: Any, hits: Sequence[Sequence[int]], total: int, lookahead: int, encoder: int
    ) -> None:
        if request.request_id not in self.books and self.never_fits(request, lookahead, encoder):
            raise Refusal("never")
        for group in self.groups:
            if group.kind == "mamba" and any(b in self.this_step for b in hits[group.index] if b != NULL):
                raise Refusal("next step")

    def need(self, plans: Iterable[Plan]) -> int:
        """Blocks a step takes from the free queue: allocated ones, and hits that wait there."""
        return sum(p.num_new + sum(self.count[b] == 0 for b in p.hits) for p in plans)

    def _apply(self, request: Any, plans: list[Plan], num_hit: int, junction: int) -> list[list[int]]:
        books = self.books.get(request.request_id)
        if books is None:
            looked_at = [num_hit // g.size for g in self.groups]
            books = Books(request, [[] for _ in self.groups], looked_at, junction=junction)
            self.books[request.request_id] = books
        for plan in plans:  # every group's hits first: no allocation may evict them
            for block in plan.hits:
                self.touch(block)
                self.was_hit.add(block)
        for group, plan in zip(self.groups, plans, strict=True):
            table = books.tables[group.index]
            table += [self._take(group) if entry == "new" else entry for entry in plan.prefix]
        grown = []
        for group, plan in zip(self.groups, plans, strict=True):
            table = books.tables[group.index]
            start = len(table)
            for entry in plan.growth:
                if entry == "new":
                    table.append(self._take(group))
                elif entry == NULL:
                    table.append(NULL)
                else:
                    table.append(table[entry[1]])
                    table[entry[1]] = NULL
            grown.append(table[start:])
        return grown

    def touch(self, block: int) -> None:
        if self.count[block] == 0:
            for part in (self.never_cached, self.dead, self.recent):
                if block in part:
                    part.remove(block)
        self.count[block] += 1

    def _take(self, group: Group) -> int:
        (block,) = self.take(1)
        if group.kind in KINDS_OF_WHOLE_BLOCK_KERNELS:
            self.fresh.append(block)
        return block

    def take(self, n: int) -> list[int]:
        """n blocks from the front of the free queue; cached ones leave the index."""
        blocks = self.queue[:n]
        for block in blocks:
            for part in (self.never_cached, self.dead, self.recent):
                if block in part:
                    part.remove(block)
            self.num_evictions += block in self.key
            self._forget(block)
            self.count[block] = 1
        return blocks

    # -- the index ------------------------------------------------------------------------------

    def _forget(self, block: int) -> None:
        key = self.key.pop(block, None)
        self.was_hit.discard(block)
        self.this_step.discard(block)
        if key is None:
            return
        self.index[key].remove(block)
        if not self.index[key]:
            del self.index[key]
            self.log.append(("removed", key[1], key[0]))

    def commit(self, request: Any, num_tokens: int) -> None:
        """``cache_blocks``: also what ends a delay."""
        books = self.books[request.request_id]
        books.loading = range(max(num_tokens, books.loading.start), books.loading.stop)
        self._commit(books, min(num_tokens, request.num_tokens))

    def _commit(self, books: Books, limit: int) -> None:
        if not self.caching or books.stale:
            return
        if books.loading:
            limit = min(limit, books.loading.start)
        limit = min(limit, self.num_shareable(books.request))
        nodes = self.prefixes.of(books.request)
        aligned = limit // self.alignment * self.alignment
        for group in self.groups:
            end = min(limit, aligned + group.size) if group.flagged and aligned else aligned
            stop = end // group.size
            for j in range(books.looked_at[group.index], stop):
                block = books.tables[group.index][j]
                if block != NULL and block not in self.key and self._worth(group, j, books):
                    self._insert(block, (nodes[(j + 1) * group.size], group.index), group)
            books.looked_at[group.index] = max(books.looked_at[group.index], stop)

    def _insert(self, block: int, key: tuple[int, int], group: Group) -> None:
        self.key[block] = key
        copies = self.index.setdefault(key, [])
        copies.append(block)
        if len(copies) == 1:
            self.log.append(("stored", group.index, key[0]))
        if group.kind == "mamba":
            self.this_step.add(block)

    def _worth(self, group: Group, position: int, books: Books) -> bool:
        end = (position + 1) * group.size
        if group.mode == "align" and end not in books.ends:
            return False
        if group.kind == "mamba":
            return self.interval is None or end in self._checkpoints(books, end)
        if group.kind == "sliding_window":
            far = end + group.window + self.alignment
            return any(position in self._positions_for(group, n) for n in self._checkpoints(books, far))
        return True

    def _positions_for(self, group: Group, length: int) -> list[int]:
        one_more = group.flagged and group.kind != "mamba"
        return group.needed(length) + (group.needed(length + group.size) if one_more else [])

    def _checkpoints(self, books: Books, upto: int) -> set[int]:
        """Lengths (0 < n <= upto) at which a window or state is worth keeping."""
        step = self.alignment if self.interval is None else self.interval
        lengths = set(range(step, upto + 1, step)) if step else set()
        if self.interval is not None:
            lengths.add((books.request.num_prompt_tokens - 1) // self.alignment * self.alignment)
            lengths.add(books.junction)
        return {n for n in lengths if 0 < n <= upto}

    def evict(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            was_cached = block in self.key
            self._forget(block)
            if was_cached and self.count[block] == 0 and self.dead_first:
                for part in (self.dead, self.recent):
                    if block in part:
                        part.remove(block)
                self.never_cached.insert(0, block)

    def reset(self, lazy: bool = False) -> bool:
        if not lazy and any(self.count.values()):
            return False
        for block in list(self.key):
            self.key.pop(block)
        self.index.clear()
        self.was_hit.clear()
        self.this_step.clear()
        self.log.append(("cleared", -1, -1))
        if self.dead_first:
            self.never_cached, self.dead, self.recent = self.queue, [], []
        for books in self.books.values():
            books.stale = True
        return True

    def invalidate(self, blocks: Iterable[int]) -> dict[str, int]:
        """Garbage spreads: to later positions of a holder, from there to whoever holds those."""
        bad = set(blocks)
        first: dict[str, int] = {}
        while True:
            before = len(bad)
            for name, books in self.books.items():
                starts = [start for start, _, block in self._positions(books) if block in bad]
                if starts:
                    first[name] = min(starts)
                    bad |= {block for _, end, block in self._positions(books) if end > first[name]}
            if len(bad) == before:
                break
        self.evict(sorted(bad))
        for name, start in first.items():
            books = self.books[name]
            books.loading = range(0)
            books.ends = {n for n in books.ends if n <= start}
            books.looked_at = [min(n, start // g.size) for n, g in zip(books.looked_at, self.groups, strict=True)]
            if not self.can_go_on_from(name, start):
                first[name] = 0
        return first

    def can_go_on_from(self, request_id: str, n: int) -> bool:
        """Whether everything that token n and later ones read, or are written to, is in the request's tables."""
        books = self.books[request_id]
        for group in self.groups:
            table = books.tables[group.index]
            if group.mode == "none" and n:
                return False  # its one state has been overwritten
            if group.kind == "mamba" and group.mode != "none":
                before, after = table[: ceil_div(n, group.size)], table[n // group.size :]
                known = n == 0 or (before[-1] != NULL and (group.mode == "all" or before[-1] in self.key))
                if n % group.size or not known or NULL in after:
                    return False
                continue
            prompt = books.request.num_prompt_tokens
            if any(block == NULL and not group.is_dead(j, n, prompt) for j, block in enumerate(table)):
                return False
        return True

    def _positions(self, books: Books) -> Iterator[tuple[int, int, int]]:
        """(first token, end token, block) of every real position."""
        for group in self.groups:
            for j, block in enumerate(books.tables[group.index]):
                if block != NULL:
                    yield j * group.size, (j + 1) * group.size, block

    # -- giving back ----------------------------------------------------------------------------

    def release_dead(self, request_id: str, n: int, num_prompt_tokens: int) -> None:
        """Dead positions become null, their blocks go to the queue, group after group."""
        books = self.books.get(request_id)
        if books is None:
            return
        for group in self.groups:
            table = books.tables[group.index]
            entries = []
            for j, block in enumerate(table):
                if block != NULL and group.is_released(j, n, num_prompt_tokens):
                    entries.append((group, j, block, self._useless(group, j, block, books)))
                    table[j] = NULL
            self._give_back(entries)

    def free(self, request: Any) -> None:
        books = self.books.pop(request.request_id, None)
        if books is None:
            return
        # What the longest hit left behind needs is not dead: the next turn of a session starts there.
        n = min(request.num_computed_tokens - request.num_in_flight_tokens, self.num_shareable(request))
        n = max(0, n - self.one_more)
        n = n // self.alignment * self.alignment
        entries = []
        for group in self.groups:
            for j, block in enumerate(books.tables[group.index]):
                if block != NULL:
                    dead = group.is_dead(j, n, request.num_prompt_tokens)
                    entries.append((group, j, block, dead and self._useless(group, j, block, books)))
        self._give_back(entries)

    def _useless(self, group: Group, position: int, block: int, books: Books) -> bool:
        """A dead block that nobody hit and that no hit at the request's junction needs."""
        if block in self.was_hit:
            return False
        return not (books.junction and position in self._positions_for(group, books.junction))

    def pop(self, request: Any) -> list[int]:
        """The request's real blocks, in the order of which the reverse frees tail first."""
        books = self.books.pop(request.request_id, None)
        if books is None:
            return []
        if not self.dead_first:  # as vLLM does
            return [block for table in books.tables for block in table if block != NULL]
        entries = [(g, j, b, False) for g in self.groups for j, b in enumerate(books.tables[g.index]) if b != NULL]
        return [block for call in self._in_order(entries) for _, _, block, _ in call][::-1]

    def free_ids(self, blocks: Iterable[int]) -> None:
        self._free([(block, False) for block in blocks])

    def _give_back(self, entries: list[tuple[Group, int, int, bool]]) -> None:
        for call in self._in_order(entries):
            self._free([(block, dead) for _, _, block, dead in call])

    def _in_order(self, entries: list[tuple[Group, int, int, bool]]) -> list[list[tuple[Group, int, int, bool]]]:
        """The calls to the pool, tail first: all groups by end position, or group by group."""
        if self.dead_first:
            return [sorted(entries, key=lambda e: (-(e[1] + 1) * e[0].size, e[0].index))]
        return [sorted((e for e in entries if e[0] is group), key=lambda e: -e[1]) for group in self.groups]

    def _free(self, blocks: list[tuple[int, bool]]) -> None:
        front = []
        for block, dead in blocks:
            self.count[block] -= 1
            if self.count[block]:
                continue
            if block not in self.key:
                front.append(block)
            elif dead and self.dead_first:
                self.dead.append(block)
            else:
                self.recent.append(block)
        self.never_cached = front + self.never_cached

    def new_step(self) -> None:
        self.this_step.clear()


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def groups_of(config: Any, use_eagle: bool) -> Iterator[Group]:
    """The groups' numbers; with EAGLE on and no group flagged, all are."""
    world = config.dcp_world_size * config.pcp_world_size
    everybody = use_eagle and not any(g.is_eagle for g in config.groups)
    for index, group in enumerate(config.groups):
        spec = group.spec
        yield Group(
            index=index,
            kind=spec.kind,
            mode=getattr(spec, "mode", ""),
            size=spec.block_size * world,
            window=getattr(spec, "window", 0),
            chunk=getattr(spec, "chunk_size", 0),
            num_speculative=getattr(spec, "num_speculative_states", 0),
            flagged=group.is_eagle or everybody,
        )
