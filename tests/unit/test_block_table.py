"""Block tables against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager import CacheConfig, FullAttention, KVCacheManager, Request, SinkAttention, SlidingWindow
from kvpager.block_table import BlockTable
from kvpager.errors import ConfigError, InvalidRequestError, UnknownBlockError
from kvpager.pool import BlockList

NUM_ROWS, NUM_TOKENS, SIZES = 3, 40, (4, 16)
WIDTHS = (10, 3)


@pytest.fixture
def table() -> BlockTable:
    return BlockTable(NUM_ROWS, NUM_TOKENS, SIZES)


def contents(table: BlockTable, row: int) -> list[list[int]]:
    groups = range(len(table.block_sizes))
    return [table.rows(g)[row, : table.num_blocks(row, g)].tolist() for g in groups]


def test_rows_are_int32_views_with_room_for_the_longest_request(table: BlockTable) -> None:
    for group, width in enumerate(WIDTHS):
        assert table.rows(group).shape == (NUM_ROWS, width)
        assert table.rows(group).dtype == np.int32
        assert table.rows(group) is table.rows(group)
    wider = BlockTable(NUM_ROWS, NUM_TOKENS, SIZES, num_extra_blocks=(0, 2))
    assert [wider.rows(g).shape[1] for g in (0, 1)] == [10, 5]


def test_slots_of_two_requests_in_groups_of_different_block_sizes(table: BlockTable) -> None:
    table.add_row(0, [[17, 4, 9], [2]])
    table.add_row(2, [[3], [8]])
    rows, positions = [0, 0, 2, 0], [0, 11, 3, 4]
    assert table.slot_mapping(0, rows, positions).tolist() == [68, 39, 15, 16]
    assert table.slot_mapping(1, rows, positions).tolist() == [32, 43, 131, 36]
    assert table.slot_mapping(0, 0, np.arange(4)).tolist() == [68, 69, 70, 71]
    assert table.slot_mapping(0, [], []).tolist() == []


def test_slots_do_not_overflow_32_bits(table: BlockTable) -> None:
    table.add_row(0, [[], [2**31 - 1]])
    assert table.slot_mapping(1, [0], [15]).tolist() == [(2**31 - 1) * 16 + 15]


def test_slots_are_written_to_the_head_of_out(table: BlockTable) -> None:
    table.add_row(0, [[5], []])
    out = np.full(4, -1, np.int64)
    slots = table.slot_mapping(0, [0, 0], [1, 2], out=out)
    assert slots.base is out
    assert out.tolist() == [21, 22, -1, -1]


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[str, int, int, list[list[int]]]]:
    row = st.integers(0, NUM_ROWS - 1)
    ids = st.tuples(*(st.lists(st.integers(0, 2**31 - 1), max_size=width) for width in WIDTHS)).map(list)
    names = st.sampled_from(["append", "add", "move", "swap", "clear"])
    return draw(st.lists(st.tuples(names, row, row, ids), max_size=12))


@given(operations())
def test_rows_behave_like_lists(ops: list[tuple[str, int, int, list[list[int]]]]) -> None:
    table = BlockTable(NUM_ROWS, NUM_TOKENS, SIZES)
    model: list[list[list[int]]] = [[[], []] for _ in range(NUM_ROWS)]
    for name, a, b, ids in ops:
        if name == "append":
            longer = [old + new for old, new in zip(model[a], ids, strict=True)]
            if any(len(blocks) > width for blocks, width in zip(longer, WIDTHS, strict=True)):
                with pytest.raises(InvalidRequestError, match="holds at most"):
                    table.append_row(a, ids)
            else:
                table.append_row(a, ids)
                model[a] = longer
        elif name == "add":
            table.add_row(a, ids)
            model[a] = ids
        elif name == "move":
            table.move_row(a, b)
            model[a], model[b] = ([[], []], model[a]) if a != b else (model[a], model[a])
        elif name == "swap":
            table.swap_rows(a, b)
            model[a], model[b] = model[b], model[a]
        else:
            table.clear_row(a)
            model[a] = [[], []]
        for row in range(NUM_ROWS):
            assert contents(table, row) == model[row]
            for group in range(2):  # what is right of the blocks reads as the null block
                assert not table.rows(group)[row, table.num_blocks(row, group) :].any()


@pytest.mark.parametrize("row", [-1, NUM_ROWS])
def test_a_row_that_is_not_there_is_refused(table: BlockTable, row: int) -> None:
    calls = [
        lambda: table.append_row(row, [[1], [1]]),
        lambda: table.add_row(row, [[1], [1]]),
        lambda: table.move_row(0, row),
        lambda: table.swap_rows(row, 0),
        lambda: table.clear_row(row),
        lambda: table.num_blocks(row, 0),
        lambda: table.slot_mapping(0, [0, row], [0, 0]),
    ]
    table.add_row(0, [[1], [1]])
    for call in calls:
        with pytest.raises(InvalidRequestError, match=f"row {row} is not there; rows are 0 to 2"):
            call()
    assert contents(table, 0) == [[1], [1]]


@pytest.mark.parametrize("group", [-1, 2])
def test_a_group_that_is_not_there_is_refused(table: BlockTable, group: int) -> None:
    calls = (lambda: table.rows(group), lambda: table.num_blocks(0, group), lambda: table.slot_mapping(group, 0, 0))
    for call in calls:
        with pytest.raises(InvalidRequestError, match=f"group {group} is not there; groups are 0 to 1"):
            call()


@pytest.mark.parametrize("position", [-1, 4])
def test_a_position_without_a_block_is_refused(table: BlockTable, position: int) -> None:
    table.add_row(1, [[7], []])
    with pytest.raises(InvalidRequestError, match=f"position {position} of row 1 is outside its 1 blocks of 4"):
        table.slot_mapping(0, [1, 1], [0, position])


def test_a_refused_append_writes_nothing(table: BlockTable) -> None:
    table.add_row(0, [[1], [1]])
    with pytest.raises(InvalidRequestError, match="it has 1, 3 more were given"):
        table.append_row(0, [[2], [2, 3, 4]])
    with pytest.raises(UnknownBlockError, match="got -1 to 3"):
        table.append_row(0, [[2], [3, -1]])
    with pytest.raises(UnknownBlockError, match=str(2**31)):
        table.append_row(0, [[2], [2**31]])
    with pytest.raises(InvalidRequestError, match="for 1 groups; this table has 2"):
        table.append_row(0, [[2]])
    assert contents(table, 0) == [[1], [1]]


def test_an_out_that_cannot_hold_the_slots_is_refused(table: BlockTable) -> None:
    table.add_row(0, [[5], []])
    frozen = np.zeros(2, np.int64)
    frozen.flags.writeable = False
    bad: Any
    for bad in (np.zeros(1, np.int64), np.zeros(2, np.int32), np.zeros((2, 1), np.int64), frozen, [0, 0]):
        with pytest.raises(InvalidRequestError, match=r"int64 array \[at least 2\]"):
            table.slot_mapping(0, [0, 0], [0, 1], out=bad)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 40, (4,)), "max_num_requests"),
        ((3, 0, (4,)), "max_num_tokens_per_request"),
        ((3, 40, (4, 0)), r"block_sizes\[1\]"),
        ((True, 40, (4,)), "max_num_requests"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments: tuple[int, int, tuple[int, ...]], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1"):
        BlockTable(*arguments)


def test_extra_blocks_need_one_entry_a_group() -> None:
    with pytest.raises(ConfigError, match="1 entries for 2 groups"):
        BlockTable(3, 40, SIZES, num_extra_blocks=(1,))
    with pytest.raises(ConfigError, match=r"num_extra_blocks\[1\] must be an integer of at least 0"):
        BlockTable(3, 40, SIZES, num_extra_blocks=(1, -1))


def test_rows_follow_a_manager_through_its_own_answers() -> None:
    specs = [
        SinkAttention(block_size=4, sink_len=4),
        SlidingWindow(block_size=4, window=5),
        FullAttention(block_size=2),
    ]
    manager = KVCacheManager(CacheConfig.uniform(60, specs), max_model_len=40)
    table = BlockTable(2, 40, (4, 4, 2), num_extra_blocks=(1, 0, 0))
    request = Request("a", [1] * 9)
    assert manager.allocate_slots(request, 9) is not None
    table.add_row(1, manager.get_blocks("a"))
    for computed in range(9, 30):
        request.num_computed_tokens = computed
        request.append_output_token_ids(1)
        appended = manager.allocate_slots(request, 1)
        assert appended is not None
        table.append_row(1, appended)
        ids = manager.get_block_ids("a")
        assert contents(table, 1)[0] == ids[0]
        # What the manager has given back since stays in the row: nobody reads it.
        assert [len(group) for group in contents(table, 1)] == [len(group) for group in ids]
    table.add_row(0, manager.get_blocks("a"))
    assert contents(table, 0) == list(manager.get_block_ids("a"))


def test_block_lists_that_do_not_fit_write_nothing(table: BlockTable) -> None:
    table.add_row(0, [BlockList([1, 2]), BlockList([3])])
    with pytest.raises(InvalidRequestError, match="holds at most 3 blocks"):
        table.append_row(0, [BlockList([4]), BlockList([5, 6, 7])])
    assert contents(table, 0) == [[1, 2], [3]]
