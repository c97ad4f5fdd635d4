"""What drives the compiled part beside plain Python sees a difference, and the twin really is plain Python."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest

from kvpager.attention import FullAttention, Mamba, SlidingWindow
from kvpager.config import CacheConfig
from kvpager.request import Request
from model import plain, pool, rules
from model.driver import Driver, Layout
from model.lockstep import Drift

SPECS = [
    FullAttention(block_size=4),
    SlidingWindow(block_size=4, window=6),
    Mamba(block_size=4, num_speculative_states=1),
]


def driver() -> Driver:
    config = CacheConfig.uniform(46, SPECS, retention_interval=16)
    return Driver(Layout(name="everything", config=config, options={"use_eagle": True}), Random(1))


def one_more(verb: Callable[..., int]) -> Callable[..., int]:
    return lambda *given: verb(*given) + 1


def nothing(*_: Any) -> None: ...


def head_first(
    self: Any, blocks: Any, outside: int = 0, tail_first: Callable[..., None] = pool.BlockPool._give_back
) -> None:
    tail_first(self, blocks[::-1], outside)


FAULTS: dict[str, tuple[type, str, Any]] = {
    "a request is quiet for a token more": (rules.GroupRule, "quiet_until", one_more(rules.GroupRule.quiet_until)),
    "a request needs a token more": (rules.GroupRule, "lowest_computed", one_more(rules.GroupRule.lowest_computed)),
    "a block too many is committed": (rules.GroupRule, "commit_stop", one_more(rules.GroupRule.commit_stop)),
    "ends of steps are not noted": (rules.GroupRule, "step_ends", nothing),
    "all is worth caching": (rules.GroupRule, "worth_caching", lambda self, start, stop, *_: [*range(start, stop)]),
    "states are computed at once": (pool.BlockPool, "compute", nothing),
    "blocks are given back head first": (pool.BlockPool, "_give_back", head_first),
    "a reset leaves the queue as it is": (pool.BlockPool, "_append_recent_to_first_out", nothing),
    "new blocks are not noted": (pool.BlockPool, "take_new_block_ids", lambda self: [1]),
    "events come backwards": (pool.BlockPool, "take_events", lambda self: self._events.reverse() or self._events),
    "grown tables are not told": (plain.DecodeSlots, "add", nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_on_one_side_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    lives = driver()
    with pytest.raises(Drift):
        for number in range(2_000):
            lives.step("decode batch in one call" if number % 2 else None)


def compiled_parts_of(manager: Any) -> set[str]:
    """The names of the compiled classes of which a manager has objects, requests left out."""
    found, seen, left = set(), set(), [manager]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType, BuiltinFunctionType, Request)):
            continue
        seen.add(id(one))
        if type(one).__module__ == "kvpager._native":
            found.add(type(one).__name__)
        left += gc.get_referents(one)
    return found


def test_the_twin_has_nothing_compiled() -> None:
    lives = driver()
    real: Any = lives.real
    for _ in range(200):
        lives.step()
    assert {"BlockPool", "GroupRule", "Holding", "Holdings", "Stepper"} <= compiled_parts_of(real._real)
    assert compiled_parts_of(real._plain) == set()
