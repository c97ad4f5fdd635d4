"""What only compiled code can get wrong: the GIL, lists that change while they are read, threads, lifetimes."""

from __future__ import annotations

import gc
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvpager import _native
from kvpager.errors import InvalidRequestError
from kvpager.hashing import hash_blocks, token_list
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
    assert _native.hash_chain(tokens, size, PARENT, None, cbor) == expected
    suffixes = [b"\xf6" if cbor else bytes(4)] * (len(tokens) // size)
    assert _native.hash_chain(tokens, size, PARENT, suffixes, cbor) == expected


def test_a_huge_block_size_costs_nothing_without_a_full_block() -> None:
    assert hash_blocks([1, 2, 3], block_size=2**32 - 1, parent=PARENT) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ([1], 0, PARENT, None, False),
        ([1], -1, PARENT, None, False),
        ([1], 2**32, PARENT, None, False),
        ([1], 1, b"short", None, False),
        ([1], 1, "text", None, False),
        ([1], 1, PARENT, [b"a", b"b"], False),
        ([1], 1, PARENT, ["text"], False),
        ([1], 1, PARENT, 5, False),
        ([1], 1, PARENT, None),
    ],
)
def test_wrong_arguments_are_exceptions(arguments: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        _native.hash_chain(*arguments)
