"""Sessions that take turns, and prompts that share a prefix, on a hybrid cache that is full.

The scenarios are those of ``benchmarks/hybrid_sessions.py``, which draws the plot in docs/.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

FULL_ENOUGH = 0.88  # of the pool: the rest is what a running prompt needs besides


def _scenarios() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "hybrid_sessions.py"
    spec = importlib.util.spec_from_file_location("hybrid_sessions", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["hybrid_sessions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scenarios = _scenarios()


@cache
def run(order: str, num_sessions: int, variant: int) -> list[scenarios.Turn]:
    return scenarios.sessions(order, num_sessions, scenarios.VARIANTS[variant])


def first_turns_fit(num_sessions: int, variant: int) -> bool:
    """Whether the last session's first prompt finds room beside what the others left for their next turns."""
    others = (num_sessions - 1) * scenarios.num_needed(scenarios.FIRST_LENGTH)
    own = scenarios.num_held_at_most(scenarios.FIRST_LENGTH, scenarios.VARIANTS[variant])
    return bool(others + own < scenarios.NUM_BLOCKS)


@pytest.mark.parametrize(
    ("num_sessions", "variant"),
    # A first prompt in one step holds all its window blocks at once: from 10 sessions on there is no room for that.
    [(n, v) for v in range(3) for n in scenarios.SESSIONS if v != 1 or first_turns_fit(n, v)],
)
def test_every_turn_hits_all_of_the_turn_before(num_sessions: int, variant: int) -> None:
    """As long as what the next turns need fills at most 88% of the pool."""
    turns = run("dead_first", num_sessions, variant)
    fitting = [t for t in turns if t.demand <= FULL_ENOUGH]
    assert [t.num_hit for t in fitting] == [t.best for t in fitting]
    assert len(fitting) == len(turns) or num_sessions > 9


def test_scenario_reaches_both_sides_of_the_limit() -> None:
    demands = {n: max(t.demand for t in run("dead_first", n, 0)) for n in scenarios.SESSIONS}
    assert demands[2] < 0.2 < FULL_ENOUGH < demands[10] < demands[14]
    assert demands[9] <= FULL_ENOUGH


@pytest.mark.parametrize("variant", range(3), ids=["steps", "one-step", "decoding"])
def test_one_queue_holds_three_sessions_where_dead_first_holds_nine(variant: int) -> None:
    recency = [scenarios.hit_rate(run("recency", n, variant)) for n in (3, 4, 9)]
    dead_first = [scenarios.hit_rate(run("dead_first", n, variant)) for n in (3, 4, 9)]
    assert recency[0] == dead_first[0] > 0.97
    assert recency[1:] == [0, 0]
    assert min(dead_first) > 0.97


@pytest.mark.parametrize("one_shots", [1, 2, 4, 5, 8, 12])
def test_shared_prompts_hit_at_least_as_often_as_with_one_queue(one_shots: int) -> None:
    """Both prompts, then one-shot prompts, again and again: from the second visit on the shared part is there."""
    dead_first, recency = (
        scenarios.shared_prompts(order, one_shots=one_shots, together=True) for order in scenarios.ORDERS
    )
    assert dead_first == [0] + [scenarios.NUM_SHARED] * (len(dead_first) - 1)
    assert sum(dead_first) >= sum(recency)
    assert one_shots < 5 or sum(dead_first) > sum(recency)


@pytest.mark.parametrize("one_shots", [1, 2, 4, 5, 8, 12])
def test_junction_keeps_what_two_prompts_share_even_if_they_never_meet(one_shots: int) -> None:
    """One-shot prompts between any two visits: dead window blocks of the first visit are gone at the second,
    which learns the junction; from the third on the shared part stays."""
    dead_first, recency = (
        scenarios.shared_prompts(order, one_shots=one_shots, together=False) for order in scenarios.ORDERS
    )
    assert dead_first[:2] == [0, 0]
    assert dead_first[2:] == [scenarios.NUM_SHARED] * (len(dead_first) - 2)
    assert sum(recency[2:]) <= sum(dead_first[2:])
    assert one_shots < 5 or sum(recency) == 0
