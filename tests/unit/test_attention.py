"""The one function of an attention kind, against a definition token by token, and what is derived from it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpager import (
    AttentionSpec,
    ChunkedLocalAttention,
    ConfigError,
    CrossAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)

SPECS = [
    FullAttention(block_size=4),
    MLAAttention(block_size=4),
    SinkAttention(block_size=4, sink_len=8),
    SlidingWindow(block_size=4, window=1),
    SlidingWindow(block_size=4, window=6),
    SlidingWindow(block_size=4, window=9),
    SlidingWindow(block_size=3, window=20),
    ChunkedLocalAttention(block_size=4, chunk_size=4),
    ChunkedLocalAttention(block_size=4, chunk_size=12),
    Mamba(block_size=4, mode="all"),
    Mamba(block_size=4, mode="all", num_speculative_states=2),
    Mamba(block_size=4, mode="align", num_speculative_states=1),
    ReferenceWindow(block_size=4, window=5),
]


def token_is_read(spec: AttentionSpec, token: int, reader: int, prompt: int) -> bool:
    """Whether the token at ``reader`` reads the K/V (or the state) of an earlier ``token``."""
    if isinstance(spec, SlidingWindow):
        return reader - token < spec.window
    if isinstance(spec, ChunkedLocalAttention):
        return token // spec.chunk_size == reader // spec.chunk_size
    if isinstance(spec, Mamba):
        return token == reader - 1
    if isinstance(spec, ReferenceWindow):
        return token < prompt or reader - token <= spec.window
    return True


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_dead_blocks_are_those_whose_tokens_nobody_reads_any_more(spec: AttentionSpec) -> None:
    horizon = 60
    for prompt in (5, 8, 17):
        for computed in range(1, 40):
            read = [
                any(token_is_read(spec, token, reader, prompt) for reader in range(computed, horizon))
                for token in range(computed)
            ]
            expected = [
                block
                for block in range(computed // spec.block_size)
                if not any(read[block * spec.block_size : (block + 1) * spec.block_size])
            ]
            if isinstance(spec, ReferenceWindow):
                # A block that the prompt's end cuts stays: dead blocks are one range behind the prompt.
                expected = [block for block in expected if block * spec.block_size >= prompt]
            assert list(spec.dead(computed, prompt)) == expected, (prompt, computed)


@pytest.mark.parametrize(
    ("spec", "num_tokens", "needed"),
    [
        (FullAttention(block_size=4), 12, [0, 1, 2]),
        (ReferenceWindow(block_size=4, window=4), 12, [0, 1, 2]),
        (SlidingWindow(block_size=4, window=6), 16, [2, 3]),
        (SlidingWindow(block_size=4, window=1), 16, []),
        (ChunkedLocalAttention(block_size=4, chunk_size=12), 20, [3, 4]),
        (ChunkedLocalAttention(block_size=4, chunk_size=12), 24, []),
        (Mamba(block_size=4, mode="all"), 20, [4]),
        (Mamba(block_size=4, mode="align", num_speculative_states=3), 20, [4]),
    ],
    ids=repr,
)
def test_a_hit_needs_the_blocks_that_are_not_dead_at_its_end(
    spec: AttentionSpec, num_tokens: int, needed: list[int]
) -> None:
    assert list(spec.needed_for_hit(num_tokens)) == needed


@settings(max_examples=300, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    first=st.integers(0, 60),
    length=st.integers(1, 120),
    step=st.integers(1, 40),
    prompt=st.integers(1, 100),
)
def test_the_checked_step_starts_hold_the_maximum(
    spec: AttentionSpec, first: int, length: int, step: int, prompt: int
) -> None:
    goal = first + length

    def held(start: int) -> int:
        dead = spec.dead(start - spec.release_delay, prompt)
        positions = spec.num_positions(min(start + step, goal), 0)
        return positions - len([block for block in dead if block < positions])

    brute = max(held(start) for start in range(first, goal))
    last = max(first, goal - step)
    checked = list(spec.step_starts_to_check(first, last, prompt))
    assert all(first <= start <= last for start in checked)
    assert max(held(start) for start in checked) == brute


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.lag is not None], ids=repr)
def test_num_slots_undoes_num_positions(spec: AttentionSpec) -> None:
    for slots in range(1, 50):
        positions = spec.num_positions(slots, 0)
        assert spec.num_slots(positions) >= slots
        assert spec.num_slots(positions - 1) < slots


def test_kinds_that_hold_no_tokens_do_not_grow_with_the_sequence() -> None:
    cross, state = CrossAttention(block_size=4), Mamba(block_size=4, mode="none", num_speculative_states=2)
    assert [cross.num_positions(slots, 10) for slots in (1, 100)] == [3, 3]
    assert [state.num_positions(slots, 0) for slots in (1, 100)] == [3, 3]
    assert not cross.can_hit
    assert not state.can_hit


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FullAttention(block_size=0), ["block_size", "at least 1", "0"]),
        (lambda: FullAttention(block_size=True), ["block_size", "True"]),
        (lambda: FullAttention(block_size=4, page_bytes=-1), ["page_bytes", "-1"]),
        (lambda: SlidingWindow(block_size=4, window=0), ["window", "at least 1"]),
        (lambda: ReferenceWindow(block_size=4, window=-3), ["window", "-3"]),
        (lambda: ChunkedLocalAttention(block_size=16, chunk_size=24), ["multiple", "16", "24"]),
        (lambda: SinkAttention(block_size=16, sink_len=24), ["multiple", "16", "24"]),
        (lambda: Mamba(block_size=4, mode="some"), ["mode", "'none', 'all' or 'align'", "some"]),  # type: ignore[arg-type]
        (lambda: Mamba(block_size=4, num_speculative_states=-1), ["num_speculative_states", "-1"]),
    ],
)
def test_a_bad_size_is_refused_with_what_came_and_what_is_allowed(
    make: Callable[[], AttentionSpec], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_kind_can_be_copied_and_sent_to_another_process(spec: AttentionSpec) -> None:
    spec.dead(10, 5)  # it has its compiled rule by now
    for copied in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert copied == spec and hash(copied) == hash(spec)
        assert copied.dead(40, 20) == spec.dead(40, 20)


@pytest.mark.parametrize("name", ["block_size", "page_bytes", "window"])
def test_sizes_have_an_upper_bound(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at most"):
        SlidingWindow(**{"block_size": 4, "window": 8, name: 2**41})
