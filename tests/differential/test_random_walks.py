"""The same random operations on kvpager and vLLM: equal hits, refusals, block ids, tables and free order."""

from __future__ import annotations

import json
import os

import pytest

from .conftest import REPORT
from .differences import DIFFERENCES
from .layouts import LAYOUTS, Layout
from .walk import failure, run, shrink

SEEDS = tuple(range(int(os.environ.get("KVPAGER_DIFFERENTIAL_SEEDS", "12"))))
STEPS = int(os.environ.get("KVPAGER_DIFFERENTIAL_STEPS", "1000"))
"""Operations a seed: 12 seeds of 1,000 make 12,000 a configuration."""

SCENARIOS = {
    "step: over-counted",
    "LoRA named like a salt",
    "double free",
    "tokens in flight",
    "failed load",
    "duplicate request id",
    "queries write",
    "chunk not a multiple of the block",
    "never fits: told",
}
"""Differences that test_named_differences.py shows."""
MET: dict[str, dict[str, int]] = {}
"""Layout to how often its walks met each difference."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_walk(layout: Layout) -> None:
    steps, counts, differences = 0, {}, {}
    for seed in SEEDS:
        history = []
        try:
            twin = run(layout, seed, STEPS, history)
        except Exception as error:
            pytest.fail(explain(layout, seed, history, error), pytrace=False)
        steps += STEPS
        counts = add(counts, twin.counts)
        differences = add(differences, twin.differences)
    told = (
        "hits",
        "refused admissions",
        "refused steps",
        "evictions",
        "external",
        "drafts rejected",
        "decoded in batches",
        "preempt",
        "resets done",
    )
    MET[layout.name] = differences
    REPORT.append(
        f"{layout.name}: seeds {SEEDS[0]}-{SEEDS[-1]}, {steps} steps; "
        + ", ".join(f"{name} {counts.get(name, 0)}" for name in told)
        + "; differences: "
        + (", ".join(f"{name} {differences[name]}" for name in sorted(differences)) or "none")
    )
    assert not layout.caching or (counts["hits"] >= 100 and counts["evictions"] >= 100)


def test_every_named_difference_is_met() -> None:
    if len(MET) < len(LAYOUTS):
        pytest.skip("only after the walks of all layouts")
    met = {name for differences in MET.values() for name, times in differences.items() if times}
    assert met | SCENARIOS == set(DIFFERENCES)


def add(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {*left, *right}}


def explain(layout: Layout, seed: int, history: list, error: Exception) -> str:
    """The failure with the fewest operations that reproduce it."""
    few = shrink(layout, seed, history)
    lines = "\n".join(json.dumps(op) for op in few)
    return (
        f"{layout.name}, seed {seed}, step {len(history)}: {type(error).__name__}: {error}\n"
        f"the fewest operations found that fail:\n{lines}\n=> {failure(layout, seed, few)}"
    )
