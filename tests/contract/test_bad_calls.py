"""Calls that nobody should make: bad arguments, requests that fail while they are read, calls in every order.

Whatever comes: a call does what it says, or raises an error that says what came and changes nothing. Two worlds are
driven. Both get the calls that are good, only the first gets the others as well: if those leave anything behind, even
something that cannot be looked at, the two part sooner or later.

The walks are seeded loops; a failure prints seed, step and call, and a test's id is its seed.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from kvpager import BlockPool, InvariantError, KVCacheManager, check_manager
from model.calls import BAD, IN_EVERY_ORDER, METHODS, OF_REQUESTS, Boom, Call, World, draw_call, says

IS_SANITIZED = os.environ.get("HYPOTHESIS_PROFILE") == "sanitize"
SEEDS = range(2 if IS_SANITIZED else 20)
NUM_STEPS = {"arguments": 1400, "attributes": 450, "order": 900}  # for each seed; 100,000 calls in all
CALLS_PER_WORLD = 120

_IDS_AND_BATCHES = ("invalidate_blocks", "evict_blocks", "free_blocks", "touch", "allocate_decode_slots", "create_kv")
_PLAIN_PYTHON = (
    "unsupported operand",
    "did not contain a loop",
    "not supported between",
    "no attribute '_pool'",
    "no attribute 'block_id'",
)
KNOWN_FAULTS: dict[str, Callable[[Call, BaseException], bool]] = {
    "an overload text of nanobind": lambda _, error: "incompatible function arguments" in str(error),
    "no collection, and not said which": lambda call, error: (
        "is not iterable" in str(error) and any(name in call.method for name in _IDS_AND_BATCHES)
    ),
    "no request id, and not said which": lambda call, error: (
        str(error).startswith("unhashable type") and any("request_id" in name for name in call.bad)
    ),
    "Python's operators in manager.py": lambda call, error: (
        bool(call.bad)
        and call.method in ("allocate_slots", "probe", "create_kv_cache_blocks", "cache_blocks")
        and any(text in str(error) for text in _PLAIN_PYTHON)
    ),
    "numbers that limit_prefill_step does not check": lambda call, _: (
        bool(call.bad) and call.method == "limit_prefill_step"
    ),
    "an InvariantError for a caller's wrong hit": lambda call, error: (
        isinstance(error, InvariantError) and call.method == "allocate_slots"
    ),
}
"""What the compiled part or manager.py does wrong and is not mended yet: passed over, and nothing else is."""


class Walk:
    """Calls in one world, the good ones in its twin too."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.rng = Random(f"{kind} {seed}")
        self.calls: Counter[str] = Counter()
        self.passed_over: Counter[str] = Counter()

    def start(self) -> None:
        self.seed = self.rng.randrange(2**32)
        self.world, self.twin = World(self.seed), World(self.seed)
        self.before = self.world.state()

    def run(self, num_steps: int) -> None:
        step = 0
        while step < num_steps:
            if step % CALLS_PER_WORLD == 0:
                self.start()
            step += 1
            call = self.draw()
            try:
                self.step(call)
            except Exception as error:
                raise AssertionError(f"{self.kind}: world {self.seed}, step {step}, {call}: {error!r}") from error

    def draw(self) -> Call:
        if self.kind == "attributes":
            return draw_call(self.rng, self.world, self.rng.choice((*OF_REQUESTS, *IN_EVERY_ORDER)))
        if self.kind == "order" or self.rng.random() < 0.25:
            return draw_call(self.rng, self.world, self.rng.choice(IN_EVERY_ORDER))
        call = draw_call(self.rng, self.world, self.rng.choice(METHODS))
        if not call.arguments:
            return call
        bad = self.rng.sample(sorted(call.arguments), min(len(call.arguments), self.rng.choice([1, 1, 2])))
        return call._replace(arguments=call.arguments | {n: self.rng.choice(BAD) for n in bad}, bad=tuple(bad))

    def step(self, call: Call) -> None:
        answer, error = self.fail_at_every_read(call) if self.kind == "attributes" else self.attempt(call)
        if error is None:
            self.done(call, answer)
        else:
            self.refused(call, error)

    def attempt(self, call: Call, fails_at: int = 0) -> tuple[Any, Exception | None]:
        self.calls[call.method] += 1
        try:
            return call.make(self.world, fails_at), None
        except Exception as error:
            return None, error

    def fail_at_every_read(self, call: Call) -> tuple[Any, Exception | None]:
        """The call when its first, second, ... read of a request fails; then what comes when none does."""
        for read in range(1, 1000):
            answer, error = self.attempt(call, read)
            if self.world.meter.reads < read:
                return answer, error
            assert isinstance(error, Boom), f"the error of {self.world.meter.last} became {error!r}"
            self.unchanged(call, read)
        raise AssertionError("there is no end to what is read")

    def refused(self, call: Call, error: Exception) -> None:
        known = [name for name, is_known in KNOWN_FAULTS.items() if is_known(call, error)]
        self.passed_over.update(known)
        assert known or says(error, call.bad), f"raised {error!r}"
        self.unchanged(call)

    def unchanged(self, call: Call, fails_at: int = 0) -> None:
        if call.method == "allocate_decode_slots":  # who stands before the one that failed has its slots
            with pytest.raises(Exception):  # noqa: B017
                call.make(self.twin, fails_at)
            return self.same()
        assert self.world.state() == self.before, "an error changed something"
        assert self.world.take() == ([], [])

    def done(self, call: Call, answer: Any) -> None:
        """Good: the twin gets the call too."""
        call.settle(self.world, answer)
        call.settle(self.twin, call.make(self.twin))
        self.same()

    def same(self) -> None:
        self.before = self.world.state()
        assert self.twin.state() == self.before, "the twin, which got only the good calls, differs"
        assert self.twin.take() == self.world.take()
        check_manager(self.world.manager)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", NUM_STEPS)
def test_what_comes_is_done_or_refused_with_words_and_changes_nothing(kind: str, seed: int) -> None:
    walk = Walk(kind, seed)
    walk.run(NUM_STEPS[kind])
    print(f"{kind}, seed {seed}: {walk.calls.total()} calls, passed over {dict(walk.passed_over)}")


def public(cls: type) -> Iterator[str]:
    return (name for name, value in vars(cls).items() if not name.startswith("_") and callable(value))


def test_every_public_call_is_among_them() -> None:
    expected = {*public(KVCacheManager), *(f"block_pool.{name}" for name in public(BlockPool))}
    assert set(METHODS) == expected - {"blocks_class"}  # what a host may put in its place, not a call
    world = World(0)
    for name in set(public(KVCacheManager)) - {"blocks_class"}:
        call = draw_call(Random(0), world, name)
        assert list(call.arguments) == list(inspect.signature(getattr(world.manager, name)).parameters)
