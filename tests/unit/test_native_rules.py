"""What the compiled part says of the attention kinds is what Python says: every formula that is written twice."""

from __future__ import annotations

from itertools import pairwise
from math import lcm
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

import model.pool
from kvpager import BlockList, BlockPool, CacheConfig, KVCacheCoordinator, SingleTypeKVCacheManager
from kvpager.attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    ReferenceWindow,
    SlidingWindow,
    ceil_div,
)
from kvpager.attention.base import UNBOUNDED
from model.plain import plain_python
from model.rules import GroupRule

SPECS: list[AttentionSpec] = [
    FullAttention(block_size=4),
    SlidingWindow(block_size=4, window=1),
    SlidingWindow(block_size=4, window=9),
    SlidingWindow(block_size=2, window=20),
    ChunkedLocalAttention(block_size=4, chunk_size=12),
    Mamba(block_size=4, mode="none", num_speculative_states=1),
    Mamba(block_size=4, mode="all", num_speculative_states=2),
    Mamba(block_size=4, mode="align"),
    Mamba(block_size=8, mode="align", num_speculative_states=3),
    ReferenceWindow(block_size=4, window=5),
]


def group_of(
    spec: AttentionSpec, other: int, is_eagle: bool = False, interval: int | None = None
) -> SingleTypeKVCacheManager:
    """The group of ``spec`` beside a full group of block size ``other``."""
    config = CacheConfig.uniform(20, [spec, FullAttention(block_size=other)])
    if interval is not None and spec.sparse_retention:
        config = CacheConfig.uniform(20, [spec, FullAttention(block_size=other)], retention_interval=interval)
    coordinator = KVCacheCoordinator(
        config,
        BlockPool(20, 2),
        max_num_batched_tokens=8,
        use_eagle=is_eagle and not isinstance(spec, ChunkedLocalAttention),
        caching=True,
        event_source=lambda request: request,
    )
    return coordinator.single_type_managers[0]


def in_plain_python(group: SingleTypeKVCacheManager) -> GroupRule:
    with plain_python():
        rule: Any = group._as_numbers()
    assert isinstance(rule, GroupRule)
    return rule


specs = st.sampled_from(SPECS)
others = st.sampled_from([4, 8, 16])
numbers = st.integers(0, 100)


@given(spec=specs, computed=numbers, prompt=st.integers(1, 60))
def test_what_is_dead(spec: AttentionSpec, computed: int, prompt: int) -> None:
    assert group_of(spec, 4).rule.dead(computed, prompt) == spec.dead(computed, prompt)


@given(spec=specs, other=others, is_eagle=st.booleans(), hit=numbers)
def test_what_a_hit_needs(spec: AttentionSpec, other: int, is_eagle: bool, hit: int) -> None:
    group = group_of(spec, other, is_eagle)
    needed, compiled = group.needed_for_hit(hit * group.block_size), group.rule.needed_for_hit(hit * group.block_size)
    assert (compiled.start, compiled.stop) == (needed.start, needed.stop)


@given(spec=specs, computed=numbers, new=st.integers(1, 30), prompt=st.integers(1, 60), data=st.data())
def test_how_a_table_grows(spec: AttentionSpec, computed: int, new: int, prompt: int, data: st.DataObject) -> None:
    group = group_of(spec, 4)
    speculative = spec.release_delay
    length = data.draw(st.integers(spec.num_positions(max(computed, 1), 0), spec.num_positions(computed + new, 0) + 1))
    dead = spec.dead(computed, prompt)
    grows = spec.num_slots(1) != UNBOUNDED  # newcomers with a group that does not are Python's
    running = not grows or data.draw(st.booleans())
    if not running:  # a newcomer with a hit
        length = data.draw(st.integers(0, length))
    compiled = group.rule.growth(length, computed + new, dead, running)
    assert compiled == group._growth(length, computed + new, 0, dead, speculative, running)


@settings(max_examples=300)
@given(
    spec=specs,
    other=others,
    is_eagle=st.booleans(),
    interval=st.sampled_from([None, 0, 1, 3]),
    start=st.integers(0, 30),
    count=st.integers(1, 20),
    prompt=st.integers(1, 150),
    junction=st.integers(0, 10),
)
def test_what_is_worth_caching(
    spec: AttentionSpec,
    other: int,
    is_eagle: bool,
    interval: int | None,
    start: int,
    count: int,
    prompt: int,
    junction: int,
) -> None:
    assume(spec.can_hit)
    alignment = lcm(spec.block_size, other)
    group = group_of(spec, other, is_eagle, None if interval is None else interval * alignment)
    junction *= alignment
    parts = group.rule.worth_caching(start, start + count, prompt, junction)
    assert all(a.stop <= b.start for a, b in pairwise(parts))
    positions = [position for part in parts for position in part]
    assert positions == in_plain_python(group).worth_caching(start, start + count, prompt, junction)


@given(spec=specs, other=others, is_eagle=st.booleans(), computed=st.integers(1, 100), prompt=st.integers(1, 100))
def test_how_far_blocks_are_committed(
    spec: AttentionSpec, other: int, is_eagle: bool, computed: int, prompt: int
) -> None:
    """Aligned, one block more for groups whose hits must leave one, never what is not computed or depends on where
    the prompt ended; then quiet."""
    group = group_of(spec, other, is_eagle)
    pool = BlockPool(120, 2)
    table = BlockList()
    pool.extend(table, ceil_div(computed, group.block_size))
    group.rule.commit(pool, table, [], computed, prompt, 0)
    committed = in_plain_python(group).commit_stop(computed, prompt)
    assert table.num_committed == committed
    until = group.rule.quiet_until(table, prompt, True)
    pool.extend_null(table, 20)  # slots to spare: only commits are looked at
    for ended in range(until + 1):
        assert group.rule.commit(pool, table, [], ended, prompt, 0) == []
    assert table.num_committed == committed


@given(
    spec=specs,
    other=others,
    is_eagle=st.booleans(),
    length=st.integers(0, 30),
    released=numbers,
    committed=st.integers(0, 30),
    prompt=st.integers(1, 60),
    commits=st.booleans(),
)
def test_from_where_and_up_to_where_a_request_goes_on(
    spec: AttentionSpec,
    other: int,
    is_eagle: bool,
    length: int,
    released: int,
    committed: int,
    prompt: int,
    commits: bool,
) -> None:
    group = group_of(spec, other, is_eagle)
    table, twin = BlockList(range(length)), model.pool.BlockList(range(length))
    for one in (table, twin):  # released, maybe by a count that is beyond the table's end
        one.num_released, one.num_committed = min(spec.dead(released, prompt).stop, max(length, 1)), committed
    rule = in_plain_python(group)
    assert group.rule.lowest_computed(table, prompt) == rule.lowest_computed(twin, prompt)
    assert group.rule.quiet_until(table, prompt, commits) == rule.quiet_until(twin, prompt, commits)
