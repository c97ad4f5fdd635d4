"""Layouts and sizes as text."""

from __future__ import annotations

import pytest

from kvpager import (
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)
from kvpager.errors import ConfigError
from kvpager.replay import DEFAULT_NUM_BLOCKS, cache_config, parse_groups

FULL = FullAttention(block_size=16)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("full", (FULL,)),
        ("full+5xsliding:1024", (FULL, *[SlidingWindow(block_size=16, window=1024)] * 5)),
        ("full+3xmamba", (FULL, *[Mamba(block_size=16, mode="align")] * 3)),
        ("2xfull + mamba:all", (FULL, FULL, Mamba(block_size=16, mode="all"))),
        ("mla+chunked:8192", (MLAAttention(block_size=16), ChunkedLocalAttention(block_size=16, chunk_size=8192))),
        (
            "reference:64+sink:32",
            (ReferenceWindow(block_size=16, window=64), SinkAttention(block_size=16, sink_len=32)),
        ),
    ],
)
def test_layouts(text: str, specs: tuple[object, ...]) -> None:
    assert parse_groups(text, 16) == specs


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is not a group"),
        ("ful", "'ful' is not a group"),
        ("full+", "'' is not a group"),
        ("full++full", "'' is not a group"),
        ("0xfull", "no group at all"),
        ("full:7", "takes nothing"),
        ("sliding", "needs a number of tokens"),
        ("sliding:big", "needs a number of tokens"),
        ("sliding:0", "window"),
        ("chunked:24", "multiple of the block"),
        ("mamba:some", "'none', 'all' or 'align'"),
    ],
)
def test_layouts_that_are_none(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        parse_groups(text, 16)


def test_the_size_of_a_cache() -> None:
    assert cache_config("full", 16).num_blocks == DEFAULT_NUM_BLOCKS
    assert cache_config("full", 16, num_blocks=7).num_blocks == 7
    memory = {"kv_memory": "40GiB", "kv_bytes_per_token": 131072}
    assert cache_config("full", 16, **memory).num_blocks == 40 * 2**30 // (16 * 131072)  # type: ignore[arg-type]
    # A block of one of four groups holds a fourth of the layers.
    assert cache_config("full+3xsliding:64", 16, **memory).num_blocks == 4 * 20480  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({"kv_memory": "40GiB"}, "go together"),
        ({"kv_bytes_per_token": 1}, "go together"),
        ({"kv_memory": "40GiB", "kv_bytes_per_token": 1, "num_blocks": 5}, "once"),
        ({"kv_memory": "40 cows", "kv_bytes_per_token": 1}, "40 cows"),
        ({"kv_memory": "1KiB", "kv_bytes_per_token": 64}, "hold 1 blocks"),
        ({"kv_memory": "1KiB", "kv_bytes_per_token": 0}, "at least 1"),
        ({"num_blocks": 1}, "leave none to allocate"),
    ],
)
def test_sizes_that_are_none(sizes: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        cache_config("full", 16, **sizes)  # type: ignore[arg-type]
