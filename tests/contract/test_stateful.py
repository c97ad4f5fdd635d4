"""Random lives of requests against the naive model: every kind of attention, every operation.

The manager that is driven is two in lockstep, one on the compiled part and one in plain Python.

The counted run is seeded and deterministic: each layout is driven until every operation has been
carried out often enough. ``--hypothesis-seed`` has no effect on it; the Hypothesis machine below is
small, and is there to shrink what it finds. A failure prints layout, seed and step.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvpager.attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)
from kvpager.config import CacheConfig, GroupSpec
from model.driver import OPERATIONS, Driver, Layout

FULL = FullAttention(block_size=4)
FULL_2 = FullAttention(block_size=2)
WINDOW = SlidingWindow(block_size=4, window=9)
CHUNK = ChunkedLocalAttention(block_size=4, chunk_size=8)


def layout(name: str, num_blocks: int, *specs: AttentionSpec, eagle: tuple[int, ...] = (), **given: object) -> Layout:
    """Config options and driver options by their names; the rest goes to the manager."""
    config_words = {"dcp_world_size", "pcp_world_size", "retention_interval", "hash_block_size", "namespace"}
    driver_words = {"max_model_len", "batch"}
    groups = tuple(
        GroupSpec(layer_names=(f"layer.{i}",), spec=spec, is_eagle=i in eagle) for i, spec in enumerate(specs)
    )
    config = CacheConfig(
        num_blocks=num_blocks,
        groups=groups,
        **{k: v for k, v in given.items() if k in config_words},  # type: ignore[arg-type]
    )
    options = {k: v for k, v in given.items() if k not in config_words | driver_words}
    return Layout(
        name=name,
        config=config,
        options=options,
        **{k: v for k, v in given.items() if k in driver_words},  # type: ignore[arg-type]
    )


LAYOUTS = [
    layout("full", 24, FULL),
    layout("full, recency, watermark", 24, FULL, eviction_order="recency", watermark=0.1),
    layout("full with EAGLE", 24, FULL, use_eagle=True),
    layout("MLA", 24, MLAAttention(block_size=4), watermark=0.1),
    layout("MLA + full, recency", 36, MLAAttention(block_size=4), FULL, eviction_order="recency"),
    layout("MLA + Mamba none", 30, MLAAttention(block_size=4), Mamba(block_size=4, mode="none")),
    layout("window", 18, SlidingWindow(block_size=4, window=6)),
    layout("window with EAGLE", 20, SlidingWindow(block_size=2, window=5), use_eagle=True),
    layout("chunk", 18, CHUNK),
    layout("chunk, recency", 18, CHUNK, eviction_order="recency"),
    layout("Mamba none", 12, Mamba(block_size=4, mode="none")),
    layout("Mamba none, 2 speculative", 16, Mamba(block_size=4, mode="none", num_speculative_states=2)),
    layout("full + Mamba none, 1 speculative", 36, FULL, Mamba(block_size=4, mode="none", num_speculative_states=1)),
    layout("Mamba all", 20, Mamba(block_size=4, mode="all")),
    layout("full + Mamba all, 1 speculative", 40, FULL, Mamba(block_size=4, mode="all", num_speculative_states=1)),
    layout("Mamba all, 2 speculative", 24, Mamba(block_size=4, mode="all", num_speculative_states=2)),
    layout("Mamba align", 12, Mamba(block_size=4)),
    layout("full + Mamba align", 32, FULL, Mamba(block_size=4)),
    layout("full + Mamba align, 2 speculative", 36, FULL, Mamba(block_size=4, num_speculative_states=2)),
    layout("full + Mamba align with MTP", 36, FULL, Mamba(block_size=4, num_speculative_states=1), use_eagle=True),
    layout("cross + full", 44, CrossAttention(block_size=4), FULL),
    layout("cross + window", 34, CrossAttention(block_size=4), WINDOW),
    layout("full + cross, recency", 48, FULL, CrossAttention(block_size=2), eviction_order="recency"),
    layout("reference window", 24, ReferenceWindow(block_size=2, window=3)),
    layout("reference window + full", 50, ReferenceWindow(block_size=2, window=3), FULL_2),
    layout("reference window, recency", 24, ReferenceWindow(block_size=2, window=2), eviction_order="recency"),
    layout("sinks", 26, SinkAttention(block_size=4, sink_len=8)),
    layout("sinks + window", 34, SinkAttention(block_size=4, sink_len=4), WINDOW),
    layout("sinks, recency", 26, SinkAttention(block_size=4, sink_len=4), eviction_order="recency"),
    layout("full + window", 32, FULL, SlidingWindow(block_size=4, window=6)),
    layout("full + window, recency", 32, FULL, SlidingWindow(block_size=4, window=6), eviction_order="recency"),
    layout("full + 2 windows", 46, FULL, SlidingWindow(block_size=4, window=5), SlidingWindow(block_size=4, window=13)),
    layout("full + the same window twice", 46, FULL, WINDOW, WINDOW, watermark=0.05),
    layout("full + chunk", 32, FULL, CHUNK),
    layout("window + chunk", 26, WINDOW, CHUNK),
    layout("full + window + Mamba align", 46, FULL, SlidingWindow(block_size=4, window=6), Mamba(block_size=4)),
    layout("unequal: full 4 + window 2", 40, FULL, SlidingWindow(block_size=2, window=4)),
    layout("unequal: full 2 + window 4, recency", 50, FULL_2, WINDOW, eviction_order="recency"),
    layout("unequal: full 2 + Mamba align 8", 46, FULL_2, Mamba(block_size=8)),
    layout("unequal windows", 40, SlidingWindow(block_size=2, window=4), WINDOW),
    layout("unequal: window 2 + Mamba align 4", 40, SlidingWindow(block_size=2, window=4), Mamba(block_size=4)),
    layout("chunk + Mamba all + window", 46, CHUNK, Mamba(block_size=4, mode="all"), WINDOW),
    layout("unequal: full 6 + window 4", 32, FullAttention(block_size=6), SlidingWindow(block_size=4, window=8)),
    layout("unequal, EAGLE on full", 40, FULL, SlidingWindow(block_size=2, window=4), eagle=(0,)),
    layout("unequal, EAGLE on window", 50, FULL, SlidingWindow(block_size=2, window=4), eagle=(1,)),
    layout("full + window with EAGLE", 32, FULL, SlidingWindow(block_size=4, window=6), use_eagle=True),
    layout("context parallel", 24, FULL_2, SlidingWindow(block_size=2, window=6), dcp_world_size=2),
    layout("prefill and decode context parallel", 24, FullAttention(block_size=1), dcp_world_size=2, pcp_world_size=2),
    layout("retention 16", 40, FULL, SlidingWindow(block_size=4, window=6), retention_interval=16),
    layout("retention 0 + Mamba", 46, FULL, WINDOW, Mamba(block_size=4), retention_interval=0),
    layout("retention 8, Mamba all", 40, FULL, Mamba(block_size=4, mode="all"), retention_interval=8),
    layout("caching off", 30, FULL, SlidingWindow(block_size=4, window=6), enable_caching=False),
    layout("caching off, Mamba align", 30, FULL, Mamba(block_size=4), enable_caching=False),
]
EVERY_CELL = 100  # operation x kind, over all layouts
LEAST_STEPS = 500
MOST_STEPS = 6000
SEED = 1


def drive(one: Layout, seed: int) -> Driver:
    """Until every operation was carried out as often as its cells of the table need of this layout."""
    driver = Driver(one, Random(seed))
    often = {op: share(one, op) for op in OPERATIONS if is_possible(one, op)}
    try:
        while driver.num_steps < MOST_STEPS:
            missing = [op for op in often if driver.done[op] < often[op]]
            if not missing and driver.num_steps >= LEAST_STEPS:
                break
            rare = missing and driver.rng.random() < 0.5
            driver.step(driver.rng.choice(missing) if rare else None)
        driver.wind_down()
    except Exception as error:
        error.args = (f"layout {one.name!r}, seed {seed}, step {driver.num_steps}: {error}",)
        raise
    return driver


def is_possible(one: Layout, operation: str) -> bool:
    """A state cache without speculative states cannot take drafts."""
    states = [getattr(g.spec, "num_speculative_states", 1) for g in one.config.groups]
    return operation != "speculative decode" or all(states)


def share(one: Layout, operation: str) -> int:
    """Of the ``EVERY_CELL`` times that each of its kinds needs, this layout's part."""
    able = [x for x in LAYOUTS if is_possible(x, operation)]
    return max(-(-EVERY_CELL // sum(kind in x.kinds for x in able)) for kind in one.kinds)


@cache
def run_of(one: str) -> Driver:
    return drive(next(x for x in LAYOUTS if x.name == one), SEED)


@pytest.mark.parametrize("one", [x.name for x in LAYOUTS])
def test_manager_equals_naive_model(one: str) -> None:
    """Hit lengths, refusals, block ids, free order, index, events and content, after every step."""
    assert run_of(one).num_steps >= LEAST_STEPS


def test_every_operation_was_carried_out_with_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(x.name) for x in LAYOUTS]
    kinds = sorted({kind for x in LAYOUTS for kind in x.kinds})
    done = {kind: sum((r.done for r in runs if kind in r.layout.kinds), Counter[str]()) for kind in kinds}
    total = {
        "steps": sum(r.num_steps for r in runs),
        "evictions": sum(r.model.num_evictions for r in runs),
        "preemptions": sum(r.num_preemptions for r in runs),
        "hits": sum(r.num_hits for r in runs),
        "junctions": sum(r.num_junctions for r in runs),
        "refused": sum(sum(r.refused.values()) for r in runs),
    }
    with capsys.disabled():
        print(f"\n\nstateful run, seed {SEED}, {len(LAYOUTS)} layouts: {total}\n{table(kinds, done)}")
    assert total["steps"] >= 20_000
    assert total["evictions"] >= 500
    assert total["preemptions"] >= 200
    assert total["hits"] >= 200
    assert min(done[kind][op] for kind in kinds for op in OPERATIONS) >= EVERY_CELL


def table(kinds: list[str], done: dict[str, Counter[str]]) -> str:
    """Operation x attention kind: how often carried out."""
    short = [kind.replace("_attention", "").replace("_", " ") for kind in kinds]
    width = max(map(len, OPERATIONS))
    lines = [" " * width + "".join(f"  {name:>{max(6, len(name))}}" for name in short)]
    for op in OPERATIONS:
        cells = [f"  {done[kind][op]:>{max(6, len(name))}}" for kind, name in zip(kinds, short, strict=True)]
        lines.append(f"{op:<{width}}" + "".join(cells))
    return "\n".join(lines)


class Lives(RuleBasedStateMachine):
    """The same driver, with Hypothesis as its source of randomness: small, and it shrinks."""

    @initialize(one=st.sampled_from(LAYOUTS), rng=st.randoms(use_true_random=False))
    def start(self, one: Layout, rng: Random) -> None:
        self.driver = Driver(one, rng, deep_check_every=1)

    @rule(operation=st.sampled_from(list(OPERATIONS)), rng=st.randoms(use_true_random=False))
    def step(self, operation: str, rng: Random) -> None:
        self.driver.rng = rng
        self.driver.step(operation)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.rng = Random(0)
            self.driver.wind_down()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=50,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
