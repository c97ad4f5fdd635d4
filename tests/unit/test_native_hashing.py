"""What only compiled code can get wrong: the GIL, lists that change while they are read, threads, lifetimes."""

from __future__ import annotations

import gc
import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvpager.errors import InvalidRequestError
from kvpager.hashing import BlockHashes, hash_blocks, token_list
from model import block_hashes

PARENT = bytes(32)


def test_other_threads_run_while_a_prompt_is_hashed() -> None:
    tokens = np.broadcast_to(np.uint32(7), 1 << 26)  # one token's memory, a quarter of a second's work
    interval: list[float] = []

    def work() -> None:
        interval.append(time.perf_counter())
        hash_blocks(tokens, block_size=1 << 20, parent=PARENT)
        interval.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    seen = []
    while thread.is_alive():
        time.sleep(0.001)
        seen.append(time.perf_counter())
    thread.join()
    begin, end = interval
    middle = [moment for moment in seen if begin + 0.3 * (end - begin) < moment < begin + 0.7 * (end - begin)]
    assert middle, f"nobody else ran in the middle of {end - begin:.3f} s"


def test_threads_agree() -> None:
    tokens = np.arange(40_000, dtype=np.int64)
    expected = hash_blocks(tokens, block_size=16, parent=PARENT)
    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: hash_blocks(tokens, block_size=16, parent=PARENT), range(16)):
            assert result == expected


class Meddler:
    """An integer that empties or grows the list it is in while it is read."""

    def __init__(self, victim: list[Any], grow: int) -> None:
        self.victim, self.grow = victim, grow

    def __index__(self) -> int:
        if self.grow:
            self.victim.extend([9] * self.grow)
        else:
            self.victim.clear()
        gc.collect()
        return 5


@pytest.mark.parametrize("grow", [0, 10_000])
def test_a_list_that_changes_while_it_is_read(grow: int) -> None:
    tokens: list[Any] = [1, 2, 3]
    tokens[1:1] = [Meddler(tokens, grow)]
    hashes = hash_blocks(tokens, block_size=1, parent=PARENT)
    assert hashes[:2] == hash_blocks([1, 5], block_size=1, parent=PARENT)
    tokens = [1, 2, 3]
    tokens[1:1] = [Meddler(tokens, grow)]
    assert token_list(tokens) == [1, 5, 2, 3]


def test_an_error_in_index_is_told_as_a_bad_token() -> None:
    class Broken:
        def __index__(self) -> int:
            raise RuntimeError("no")

    with pytest.raises(InvalidRequestError, match=r"token_ids\[1\]"):
        token_list([1, Broken()])  # type: ignore[list-item]


def test_a_buffer_is_let_go() -> None:
    tokens = array("I", range(40))
    hash_blocks(tokens, block_size=16, parent=PARENT)
    tokens.append(1)  # an exported array could not grow
    tokens[3] = 2**32 - 1
    signed = array("q", tokens)
    signed[20] = -1
    with pytest.raises(InvalidRequestError):
        hash_blocks(signed, block_size=16, parent=PARENT)
    signed.append(1)


def test_a_released_memoryview() -> None:
    view = memoryview(array("I", [1, 2]))
    view.release()
    with pytest.raises(InvalidRequestError, match="memoryview"):
        hash_blocks(view, block_size=1, parent=PARENT)


@pytest.mark.parametrize("cbor", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 255, 256, 257, 4000])
def test_every_alignment_of_message_and_suffix(size: int, cbor: bool) -> None:
    rng = np.random.default_rng(size)
    tokens = rng.integers(0, 2 ** rng.integers(3, 33), 5 * size + 1)
    algorithm = "sha256_cbor" if cbor else "sha256"
    expected = block_hashes.hash_blocks(tokens, block_size=size, parent=PARENT, algorithm=algorithm)
    for suffixes in (None, [b"\xf6" if cbor else bytes(4)] * (len(tokens) // size)):
        hashes = BlockHashes(size, PARENT, cbor)
        hashes.extend(tokens, suffixes)
        assert hashes == expected


def test_a_huge_block_size_costs_nothing_without_a_full_block() -> None:
    assert hash_blocks([1, 2, 3], block_size=2**32 - 1, parent=PARENT) == []


@pytest.mark.parametrize(
    "as_tokens", [list, tuple, lambda tokens: array("I", tokens), lambda tokens: np.array(tokens, np.int64)]
)
def test_hashes_grow_with_the_sequence(as_tokens: Any) -> None:
    hashes = BlockHashes(4, PARENT, False)
    for length in (0, 3, 4, 4, 11, 12, 40):
        tokens = as_tokens([7 * i for i in range(length)])
        hashes.extend(tokens)
        assert hashes == block_hashes.hash_blocks(tokens, block_size=4, parent=PARENT, algorithm="sha256")
    hashes.extend(as_tokens([1, 2]))  # shorter than what is hashed: nothing is new
    assert len(hashes) == 10


def test_hashes_are_a_sequence_of_bytes() -> None:
    hashes = hash_blocks(range(5), block_size=1, parent=PARENT)
    as_list = [hashes[i] for i in range(5)]
    assert all(type(block_hash) is bytes and len(block_hash) == 32 for block_hash in as_list)
    assert isinstance(hashes, Sequence) and list(hashes) == as_list and list(reversed(hashes)) == as_list[::-1]
    assert [hashes[-1], hashes[-5]] == [as_list[4], as_list[0]]
    for part in (slice(None), slice(1, 3), slice(None, None, -2), slice(9, 12), slice(-2, None)):
        assert hashes[part] == as_list[part]
    assert as_list[2] in hashes and PARENT not in hashes
    assert (hashes.index(as_list[2]), hashes.count(as_list[2])) == (2, 1)
    assert repr(hashes) == repr(as_list)
    for index in (5, -6, 2**70):
        with pytest.raises(IndexError):
            hashes[index]
    with pytest.raises(TypeError):
        hashes["0"]  # type: ignore[call-overload]


def test_hashes_equal_the_same_hashes() -> None:
    hashes, longer = hash_blocks(range(3), block_size=1), hash_blocks(range(4), block_size=1)
    others: list[Any] = [hash_blocks(range(3), block_size=1), list(hashes), tuple(hashes)]
    assert all((hashes == other, hashes != other) == (True, False) for other in others)
    different: list[Any] = [longer, list(longer), list(hashes)[:2], [*hashes[:2], "x"], None, 5, set(hashes)]
    assert all((hashes == other, hashes != other) == (False, True) for other in different)
    with pytest.raises(TypeError):
        hash(hashes)


def test_a_bad_token_adds_nothing() -> None:
    hashes = BlockHashes(2, PARENT, False)
    hashes.extend([1, 2])
    for bad in ([1, 2, 3, -1], [1, 2, 3, 4, 2**32], [1, 2, "x", 4], array("q", [1, 2, -3, 4])):
        with pytest.raises(InvalidRequestError, match=r"token_ids\[[234]\]"):
            hashes.extend(bad)
    with pytest.raises(InvalidRequestError, match="2 entries for 1"):
        hashes.extend([1, 2, 3, 4], [b"", b""])
    assert hashes == hash_blocks([1, 2], block_size=2, parent=PARENT)


def test_hashes_extended_while_they_are_extended() -> None:
    class Inner:
        def __index__(self) -> int:
            hashes.extend([1, 2, 3, 4])
            return 2

    hashes = BlockHashes(2, PARENT, False)
    with pytest.raises(InvalidRequestError, match="somebody else"):
        hashes.extend([1, Inner()])
    assert hashes == hash_blocks([1, 2, 3, 4], block_size=2, parent=PARENT)


@pytest.mark.parametrize("arguments", [(0, PARENT, False), (-1, PARENT, False), (2**32, PARENT, False)])
def test_wrong_block_sizes_are_exceptions(arguments: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        BlockHashes(*arguments)


@pytest.mark.parametrize("arguments", [(1, b"short", False), (1, "text", False), (1, PARENT)])
def test_wrong_parents_are_exceptions(arguments: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        BlockHashes(*arguments)


@pytest.mark.parametrize("suffixes", [[b"a", b"b"], ["text"], 5])
def test_wrong_suffixes_are_exceptions(suffixes: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        BlockHashes(1, PARENT, False).extend([1], suffixes)
