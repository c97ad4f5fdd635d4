"""Calls out of the ordinary beside the ordinary call of the same size: both ours, full + 3 windows, events off."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from .cases import Row, new_request
from .peers import Kvpager, tokens_of
from .shapes import BLOCK, WINDOWS

TOKENS = 2_048
CALLS = 40
"""Calls in one sample."""
Pair = Callable[[], tuple[float, float]]
"""One repetition: nanoseconds a call, out of the ordinary and ordinary."""


def ways() -> Iterator[tuple[Row, Pair]]:
    """Each row with its sampler: the ordinary call's time over the other's is at least a half."""
    yield Row(name="refused admission beside one that fits", unit="µs/call", at_least=0.5), _refused()
    yield Row(name="admission with external tokens beside one without", unit="µs/call", at_least=0.5), _external()
    yield Row(name="decode during a load beside one without", unit="µs/call", at_least=0.5), _loading()


def _prompts() -> tuple[Kvpager, Any, Callable[[], Any]]:
    peer, rng = Kvpager(), random.Random(8)
    manager, hasher = peer.manager(WINDOWS, 40_000), peer.hasher()
    return peer, manager, lambda: new_request(peer, tokens_of(TOKENS, rng), hasher)


def _timed(call: Callable[[], Any]) -> tuple[int, Any]:
    start = time.perf_counter_ns()
    answer = call()
    return time.perf_counter_ns() - start, answer


def _admissions(manager: Any, make: Callable[[], Any], num_new: int, **options: Any) -> float:
    took = 0
    for _ in range(CALLS):
        request = make()
        nanoseconds, answer = _timed(lambda request=request: manager.allocate_slots(request, num_new, **options))
        took += nanoseconds
        assert (answer is None) == ("reserved_blocks" in options)
        manager.free(request)
        manager.take_new_block_ids()
    return took / CALLS


def _refused() -> Pair:
    _, manager, make = _prompts()
    return lambda: (
        _admissions(manager, make, TOKENS, full_sequence_must_fit=True, reserved_blocks=39_990),
        _admissions(manager, make, TOKENS, full_sequence_must_fit=True),
    )


def _external() -> Pair:
    _, manager, make = _prompts()
    return lambda: (
        _admissions(manager, make, BLOCK, num_external_computed_tokens=TOKENS - BLOCK),
        _admissions(manager, make, TOKENS),
    )


def _loading() -> Pair:
    """Steps of a request whose first tokens are still being loaded, beside steps in which something changes too."""
    peer, manager, make = _prompts()

    def steps(loading: bool) -> float:
        took = 0
        for _ in range(CALLS):
            request = make()
            if loading:
                options: dict[str, Any] = {"num_external_computed_tokens": TOKENS - BLOCK, "delay_cache_blocks": True}
                manager.allocate_slots(request, BLOCK, **options)
            else:
                manager.allocate_slots(request, TOKENS)
            request.num_computed_tokens, request.status = TOKENS, peer.running
            request.append_output_token_ids(1)
            took += _timed(lambda request=request: manager.allocate_slots(request, 1))[0]
            manager.free(request)
            manager.take_new_block_ids()
        return took / CALLS

    return lambda: (steps(True), steps(False))
