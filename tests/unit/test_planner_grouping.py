"""Groups of equal size over equal pages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager.attention import Mamba
from kvpager.config import CacheConfig
from kvpager.planner.grouping import Grouping, group_layers, pipeline_ranks
from kvpager.planner.memory import KV_DTYPES, AttentionMemory, Layer, StateMemory, StateTensor

BF16 = KV_DTYPES["bf16"]


def attention(kind: str = "full", *, heads: int = 8, extent: int | None = None) -> AttentionMemory:
    return AttentionMemory(kind=kind, num_heads=heads, head_size=64, dtype=BF16, extent=extent)  # type: ignore[arg-type]


def state(num_values: int, label: str = "state") -> StateMemory:
    return StateMemory(label=label, tensors=(StateTensor(name="s", shape=(num_values,), dtype="float16"),))


FULL, WINDOW = attention(), attention("sliding", extent=512)


def layers(*memories: AttentionMemory | StateMemory) -> list[Layer]:
    return [Layer(index=index, name=f"layers.{index}", memory=memory) for index, memory in enumerate(memories)]


def grouped(stack: list[Layer], *, stages: int = 1, **options: Any) -> Grouping:
    defaults = {
        "block_size": 16,
        "state_mode": "align",
        "max_model_len": 8192,
        "max_step": 512,
        "num_encoder_tokens": 0,
    }
    return group_layers(stack, ranks=pipeline_ranks(len(stack), stages), **{**defaults, **options})


def sizes(grouping: Grouping) -> list[int]:
    return [len(group.layers) for group in grouping.groups]


@pytest.mark.parametrize(
    ("full", "windows", "expected"),
    [
        (12, 0, [12]),
        (12, 12, [12, 12]),
        (10, 50, [10] * 6),
        (20, 30, [10] * 5),  # not 20: a fifth of what short requests hold would be empty
        (12, 13, [4, 4, 4, 4, 3, 3, 3]),  # not 13: 8% of what long requests hold would be empty
        (1, 4, [1] * 5),
    ],
)
def test_group_sizes(full: int, windows: int, expected: list[int]) -> None:
    stack = layers(*[FULL] * full, *[WINDOW] * windows)
    assert sizes(grouped(stack, max_model_len=131072)) == expected


def test_a_few_percent_of_padding_are_worth_fewer_groups() -> None:
    few = grouped(layers(*[FULL] * 10, *[WINDOW] * 52), max_model_len=131072)
    assert sizes(few) == [10, 9, 9, 9, 9, 8, 8]
    assert sum(few.padding_layers(group) for group in few.groups) == 8


def test_layers_are_dealt_out_so_that_each_stage_has_its_share() -> None:
    stack = layers(*[WINDOW, WINDOW, FULL] * 4)
    both = grouped(stack, stages=2)
    assert sizes(both) == [4, 4, 4]
    assert both.pages_per_block == 2
    assert all(both.padding_layers(group) == 0 for group in both.groups)


def test_smaller_pages_get_larger_blocks() -> None:
    grouping = grouped(layers(attention(heads=8), attention(heads=2, extent=512, kind="sliding")))
    assert [group.spec.block_size for group in grouping.groups] == [16, 64]
    assert [group.used_page_bytes for group in grouping.groups] == [16 * 2048, 64 * 512]


def test_what_does_not_divide_is_padding() -> None:
    grouping = grouped(layers(attention(heads=8), attention(heads=3)))
    assert [group.spec.block_size for group in grouping.groups] == [16, 32]
    assert [grouping.padding_bytes(group) for group in grouping.groups] == [0, 16 * 2048 - 32 * 768]


def test_chunks_stay_whole_blocks() -> None:
    grouping = grouped(layers(attention(heads=8), attention("chunked", heads=1, extent=192)))
    assert [group.spec.block_size for group in grouping.groups] == [16, 96]  # not 128: 192 is no multiple of it


def test_a_state_decides_the_page() -> None:
    grouping = grouped(layers(FULL, state(20 * 1024 + 1)))  # 1 KiB short of 1.25 pages of 16 tokens
    full, states = grouping.groups
    assert full.spec.block_size == states.spec.block_size == 32
    assert full.spec.page_bytes == states.spec.page_bytes == 32 * 2048
    assert grouping.padding_bytes(states) == 32 * 2048 - 2 * (20 * 1024 + 1)


def test_states_end_where_every_attention_block_ends() -> None:
    grouping = grouped(layers(attention(heads=8), attention(heads=4), attention(heads=2), state(1)))
    assert [group.spec.block_size for group in grouping.groups] == [16, 32, 64, 64]


def test_states_alone() -> None:
    grouping = grouped(layers(state(100), state(100)), block_size=64)
    assert grouping.page_bytes == 200
    assert grouping.groups[0].spec == Mamba(block_size=64, page_bytes=200, mode="align")


@pytest.mark.parametrize(
    ("num_layers", "stages", "counts"),
    [(32, 4, [8, 8, 8, 8]), (61, 4, [15, 15, 16, 15]), (62, 4, [15, 16, 16, 15]), (5, 4, [1, 1, 2, 1]), (7, 1, [7])],
)
def test_stages_share_the_layers(num_layers: int, stages: int, counts: list[int]) -> None:
    ranks = pipeline_ranks(num_layers, stages)
    assert [len(rank) for rank in ranks] == counts
    assert [index for rank in ranks for index in rank] == list(range(num_layers))


memories = st.one_of(
    st.builds(attention, heads=st.integers(1, 8)),
    st.builds(attention, kind=st.just("sliding"), heads=st.integers(1, 8), extent=st.sampled_from([100, 512])),
    st.builds(attention, kind=st.just("chunked"), heads=st.integers(1, 8), extent=st.sampled_from([192, 1024])),
    st.builds(state, num_values=st.integers(1, 100_000)),
)
stacks = st.lists(memories, min_size=1, max_size=4).flatmap(
    lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=30)
)


@given(stack=stacks, stages=st.integers(1, 4), block_size=st.sampled_from([8, 16, 32]))
def test_any_mix_of_layers(stack: list[AttentionMemory | StateMemory], stages: int, block_size: int) -> None:
    all_layers = layers(*stack)
    grouping = grouped(all_layers, stages=min(stages, len(stack)), block_size=block_size)

    grouped_layers = [layer for group in grouping.groups for layer in group.layers]
    assert sorted(grouped_layers, key=lambda layer: layer.index) == all_layers
    for group in grouping.groups:
        assert {layer.memory for layer in group.layers} == {group.memory}
        assert group.spec.page_bytes == grouping.page_bytes >= group.used_page_bytes
        assert group.spec.block_size % block_size == 0
        assert 0 <= grouping.padding_layers(group) <= grouping.pages_per_block
        assert grouping.padding_bytes(group) >= 0
    assert any(grouping.padding_layers(group) == 0 for group in grouping.groups)
    config = CacheConfig(num_blocks=10, groups=tuple(group.group_spec() for group in grouping.groups))
    assert config.alignment % block_size == 0
