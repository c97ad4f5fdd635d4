"""The compiled pool and the plain one (tests/model/pool.py) do the same thing, call after call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import model.pool
from kvpager import _native
from kvpager.errors import KVPagerError
from kvpager.stats import ResidencySampler

NUM_GROUPS = 3
BLOCK_SIZES = (2, 2, 4)
STRIDES = (1, 1, 2)
# Contents that share prefixes, so that several blocks carry one hash.
CONTENTS = [
    [sha256(bytes([i, content * (i >= fork)])).digest() for i in range(12)] for content, fork in enumerate([0, 4, 4, 8])
]

positions = st.integers(-1, 14)
groups = st.integers(0, NUM_GROUPS - 1)
contents = st.integers(0, len(CONTENTS) - 1)
ids = st.lists(st.integers(-1, 40), max_size=4)
anything = st.one_of(positions, st.just(2**70))


class Pair:
    """The same list or pool on both sides."""

    def __init__(self, native: Any, plain: Any) -> None:
        self.native, self.plain = native, plain


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return _plain(call())
    except KVPagerError as error:
        return type(error)


def _plain(value: Any) -> Any:
    if isinstance(value, (_native.BlockList, model.pool.BlockList)):
        return value.ids()
    return [_plain(item) for item in value] if isinstance(value, list) else value


class Lockstep(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 40),
        order=st.sampled_from(["dead_first", "recency"]),
        events=st.booleans(),
        sampled=st.booleans(),
    )
    def start(self, num_blocks: int, order: str, events: bool, sampled: bool) -> None:
        def sampler() -> ResidencySampler | None:
            return ResidencySampler(0.7, clock=itertools.count().__next__) if sampled else None

        self.samplers = Pair(sampler(), sampler())
        options: dict[str, Any] = {"eviction_order": order, "enable_events": events}
        self.pool = Pair(
            _native.BlockPool(num_blocks, NUM_GROUPS, **options, residency=self.samplers.native),
            model.pool.BlockPool(num_blocks, NUM_GROUPS, **options, residency=self.samplers.plain),
        )
        self.tables: list[Pair] = []
        self.outside: list[int] = []

    # -- helpers -------------------------------------------------------------------------------

    def both(self, verb: str, *arguments: Any) -> Any:
        """The verb on both pools; pairs are given their side. Both answer or refuse alike."""
        sides = []
        for side in ("native", "plain"):

            def of(argument: Any, side: str = side) -> Any:
                if isinstance(argument, Pair):
                    return getattr(argument, side)
                return [of(item) for item in argument] if isinstance(argument, list) else argument

            own = [of(argument) for argument in arguments]
            sides.append(_outcome(lambda own=own, side=side: getattr(getattr(self.pool, side), verb)(*own)))
        assert sides[0] == sides[1], (verb, arguments)
        return sides[0]

    def table(self, index: int) -> Pair:
        if not self.tables:
            self.tables.append(Pair(_native.BlockList(), model.pool.BlockList()))
        return self.tables[index % len(self.tables)]

    # -- tables --------------------------------------------------------------------------------

    @rule(group=groups, content=contents, stop=st.integers(0, 12))
    def hit(self, group: int, content: int, stop: int) -> None:
        stride = STRIDES[group]
        stop = min(stop, 12 // stride)
        found = [
            getattr(self.pool, side).prefix([group], CONTENTS[content], stride, stop)[0] for side in ("native", "plain")
        ]
        assert found[0].ids() == found[1].ids()
        self.both("serves", Pair(*found), group, tuple(CONTENTS[content]), stride)
        self.both("count_evictable", Pair(*found), 0, stop)
        table = Pair(_native.BlockList(), model.pool.BlockList())
        self.both("adopt", table, Pair(*found), 0, len(found[0]))
        self.tables.append(table)

    @rule(index=st.integers(0, 9), source=st.integers(0, 9), start=positions, stop=positions)
    def adopt(self, index: int, source: int, start: int, stop: int) -> None:
        held = [b for b in self.table(source).plain.ids() if b]
        if set(held) & set(self.table(index).plain.ids()):
            return  # nobody holds a block twice in one table
        self.both("adopt", self.table(index), self.table(source), start, stop)

    @rule(index=st.integers(0, 9), count=st.integers(-1, 12), note=st.booleans())
    def extend(self, index: int, count: int, note: bool) -> None:
        self.both("extend", self.table(index), count, note)

    @rule(index=st.integers(0, 9), count=st.integers(-1, 3))
    def extend_null(self, index: int, count: int) -> None:
        self.both("extend_null", self.table(index), count)

    @rule(index=st.integers(0, 9), source=st.integers(0, 13))
    def move(self, index: int, source: int) -> None:
        self.both("move", self.table(index), source)

    @rule(index=st.integers(0, 9), start=positions, stop=positions, keep=positions, kept=st.integers(0, 3))
    def release(self, index: int, start: int, stop: int, keep: int, kept: int) -> None:
        self.both("release", self.table(index), start, stop, range(keep, keep + kept))

    @rule(index=st.integers(0, 9), group=groups, content=contents, start=positions, stop=positions)
    def commit(self, index: int, group: int, content: int, start: int, stop: int) -> None:
        self.both("commit", self.table(index), group, CONTENTS[content], STRIDES[group], start, stop)

    @rule(index=st.integers(0, 9), count=st.integers(0, 3), dead=positions, keep=positions)
    def free_tables(self, index: int, count: int, dead: int, keep: int) -> None:
        freed = [self.tables.pop(index % len(self.tables)) for _ in range(min(count, len(self.tables)))]
        sizes = [*BLOCK_SIZES[: len(freed)]]
        self.both("free_tables", freed, sizes, [range(dead)] * len(freed), [range(keep, keep + 2)] * len(freed))

    @rule(index=st.integers(0, 9), count=st.integers(0, 3))
    def pop_tables(self, index: int, count: int) -> None:
        popped = [self.tables.pop(index % len(self.tables)) for _ in range(min(count, len(self.tables)))]
        self.outside += self.both("pop_tables", popped, [*BLOCK_SIZES[: len(popped)]])

    # -- blocks by id --------------------------------------------------------------------------

    @rule(count=st.integers(-1, 5))
    def allocate(self, count: int) -> None:
        taken = self.both("allocate", count)
        self.outside += taken if isinstance(taken, list) else []

    @rule(blocks=ids)
    def touch(self, blocks: list[int]) -> None:
        if self.both("touch", blocks) is None:
            self.outside += blocks

    @rule(data=st.data(), more=ids)
    def free_blocks(self, data: st.DataObject, more: list[int]) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.outside), unique=True)) if self.outside else []
        for wrong in (blocks + more, blocks):
            if self.both("free_blocks", wrong) is None:
                for block in wrong:
                    self.outside.remove(block)
                break

    @rule(blocks=ids)
    def evict_blocks(self, blocks: list[int]) -> None:
        self.both("evict_blocks", blocks)

    @rule()
    def reset(self) -> None:
        self.both("reset_prefix_cache")

    @rule()
    def clear(self) -> None:
        self.both("clear_index")

    @rule(count=st.integers(0, 1))
    def reserve(self, count: int) -> None:
        self.both("reserve", count)

    # -- questions -----------------------------------------------------------------------------

    @rule(some=st.lists(groups, max_size=3, unique=True), content=contents, start=positions, stop=positions)
    def look_up(self, some: list[int], content: int, start: int, stop: int) -> None:
        start, stop = max(0, start), min(max(0, stop), 12)
        self.both("prefix", some, CONTENTS[content], 1, stop)
        run = self.both("run_start", some, CONTENTS[content], 1, start, stop)
        for group in some:
            self.both("lookup", group, CONTENTS[content], 1, run, stop)

    @rule(index=st.integers(0, 9), start=positions, stop=positions, group=groups, content=contents)
    def count(self, index: int, start: int, stop: int, group: int, content: int) -> None:
        table = self.table(index)
        self.both("count_evictable", table, max(0, start), max(0, stop))
        self.both("count_exclusive", table, max(0, start), max(0, stop))
        self.both("num_shared_by", table, 2)
        if len(table.plain) <= 12:
            self.both("serves", table, group, CONTENTS[content], 1)

    @rule(block=anything)
    def any_id(self, block: int) -> None:
        self.one_block(block)

    @rule()
    def drain(self) -> None:
        assert self.both("take_new_block_ids") is not None
        self.both("take_events")
        if self.samplers.native is not None:
            assert self.samplers.native.drain() == self.samplers.plain.drain()

    @invariant()
    def equal(self) -> None:
        if not hasattr(self, "pool"):
            return
        for name in ("num_blocks", "num_free", "num_held", "num_popped", "num_reserved", "num_evictions"):
            assert getattr(self.pool.native, name) == getattr(self.pool.plain, name), name
        for name in ("generation", "usage", "eviction_order", "logs_events"):
            assert getattr(self.pool.native, name) == getattr(self.pool.plain, name), name
        for name in ("free_queue", "index", "reserved_blocks"):
            self.both(name)
        for block in range(self.pool.plain.num_blocks):
            self.one_block(block)
        for table in self.tables:
            assert table.native.ids() == table.plain.ids()

    def one_block(self, block: int) -> None:
        for question in ("ref_count", "outside_count", "block_hash"):
            self.both(question, block)


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(
    max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
