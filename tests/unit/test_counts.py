"""Whatever takes a count takes NumPy's integers too and keeps plain ints; booleans and the rest are refused by name."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpager import (
    BlockHasher,
    BlockTable,
    CacheConfig,
    ConfigError,
    FullAttention,
    KVCacheManager,
    KVPagerError,
    Request,
    ResidencySampler,
    SlidingWindow,
    hash_blocks,
)
from kvpager.counts import as_count, as_integer, as_number
from kvpager.extra_keys import LoRA, MultiModalItem
from kvpager.planner import PlanOptions
from kvpager.replay import (
    ClosedLoop,
    PromptMaker,
    ReplayOptions,
    StepTime,
    builtin_workload,
    num_blocks_in,
    parse_groups,
    replay,
    sweep,
)
from kvpager.replay.arrivals import TraceClock
from kvpager.replay.sweep import Input
from kvpager.scheduler import Scheduler

FULL = FullAttention(block_size=4)
CONFIG = CacheConfig.uniform(20, [FULL, SlidingWindow(block_size=4, window=8)])


def manager() -> KVCacheManager:
    return KVCacheManager(CONFIG, max_model_len=64)


# What is made, the argument, a value that will do, and what is kept of it.
COUNTS: list[tuple[Callable[..., Any], str, int]] = [
    (lambda **o: Request("a", [1], **o), "max_tokens", 5),
    (lambda **o: Request("a", [1], **o), "priority", -5),
    (lambda **o: Request.from_hashes("a", block_hashes=[], **o), "num_prompt_tokens", 5),
    (lambda **o: LoRA(name="a", **o), "id", 5),
    (lambda **o: MultiModalItem(**{"identifier": "a", "offset": 0, "length": 1} | o), "offset", 5),
    (lambda **o: MultiModalItem(**{"identifier": "a", "offset": 0, "length": 1} | o), "length", 5),
    (lambda **o: Scheduler(manager(), **o), "max_num_scheduled_tokens", 5),
    (lambda **o: Scheduler(manager(), **o), "max_num_running", 5),
    (lambda **o: Scheduler(manager(), **o), "num_lookahead_tokens", 5),
    (lambda **o: CacheConfig.uniform(specs=[FULL], **o), "num_blocks", 5),
    (lambda **o: CacheConfig.uniform(20, [FULL], **o), "hash_block_size", 2),
    (lambda **o: CacheConfig.uniform(20, [FULL], **o), "dcp_world_size", 2),
    (lambda **o: CacheConfig.uniform(20, [FULL], **o), "pcp_world_size", 2),
    (lambda **o: CacheConfig.uniform(20, [SlidingWindow(block_size=4, window=8)], **o), "retention_interval", 8),
    (BlockHasher, "hash_size", 4),
    (lambda **o: BlockTable(**{"max_num_tokens_per_request": 9, "block_sizes": [4], **o}), "max_num_requests", 3),
    (lambda **o: ReplayOptions(config=CONFIG, **o), "max_model_len", 64),
    (lambda **o: ReplayOptions(config=CONFIG, **o), "max_num_batched_tokens", 64),
    (lambda **o: ReplayOptions(config=CONFIG, **o), "max_num_running", 4),
    (lambda **o: ReplayOptions(config=CONFIG, **o), "num_lookahead_tokens", 4),
    (lambda **o: ReplayOptions(config=CONFIG, **o), "num_in_flight", 4),
    (lambda **o: ReplayOptions(config=CONFIG, **o), "limit", 4),
    (lambda **o: ReplayOptions(config=CONFIG, **o), "check_every", 4),
    (lambda **o: PlanOptions(**{"memory_bytes": 10**9} | o), "memory_bytes", 10**9),
    (lambda **o: PlanOptions(memory_bytes=10**9, **o), "weights_bytes", 5),
    (lambda **o: PlanOptions(memory_bytes=10**9, **o), "tensor_parallel", 2),
    (lambda **o: PlanOptions(memory_bytes=10**9, **o), "block_size", 16),
    (lambda **o: PlanOptions(memory_bytes=10**9, **o), "max_model_len", 16),
]  # fmt: skip


@pytest.mark.parametrize(("make", "name", "value"), COUNTS)
def test_numpy_integers_are_kept_as_ints(make: Callable[..., Any], name: str, value: int) -> None:
    for kind in (np.int64, np.int32):
        kept = getattr(make(**{name: kind(value)}), name)
        assert (kept, type(kept)) == (value, int)


@pytest.mark.parametrize("bad", [True, np.True_, 1.0, np.float32(1), "1", b"1", [], {}, float("nan"), object()])
@pytest.mark.parametrize(("make", "name", "value"), COUNTS)
def test_what_is_no_integer_is_refused_by_name(make: Callable[..., Any], name: str, value: int, bad: Any) -> None:
    with pytest.raises(KVPagerError, match=rf"{name} .*must be an integer.*got") as error:
        make(**{name: bad})
    assert repr(bad) in str(error.value)


@pytest.mark.parametrize("bad", [-1, 2**63, 2**70])
@pytest.mark.parametrize(("make", "name", "value"), [case for case in COUNTS if case[1] != "priority"])
def test_what_is_no_count_is_refused_by_name(make: Callable[..., Any], name: str, value: int, bad: int) -> None:
    with pytest.raises(KVPagerError, match=rf"{name} .*must be an integer of at (least|most)"):
        make(**{name: bad})


def test_a_request_with_numpy_numbers_runs_to_its_end() -> None:
    scheduler = Scheduler(manager(), max_num_running=np.int64(3), max_num_scheduled_tokens=np.int32(8))
    hasher = BlockHasher.for_config(CONFIG)
    prompt = np.arange(10, dtype=np.int64)
    scheduler.add(Request("a", prompt, block_hasher=hasher, max_tokens=np.int64(5), arrival_time=np.float32(1)))
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        sampled = {step.request.request_id: np.array([7]) for step in output.scheduled if step.samples}
        finished = scheduler.update(output, sampled)
    assert [request.output_token_ids for request in finished] == [[7] * 5]


def test_a_block_table_takes_numpy_integers_and_refuses_the_rest() -> None:
    table = BlockTable(np.int64(2), np.int32(16), np.array([4]), num_extra_blocks=[np.int64(1)])
    table.add_row(np.int64(1), [np.array([5, 9], np.int32)])
    assert table.num_blocks(np.int64(1), np.int64(0)) == 2
    assert table.slot_mapping(np.int64(0), np.array([1], np.uint8), array("q", [5])).tolist() == [37]
    bad: Any
    for bad in (True, 1.5, "1", None, [], 2**70, -1):
        for call in (
            lambda bad=bad: table.rows(bad),
            lambda bad=bad: table.num_blocks(bad, 0),
            lambda bad=bad: table.clear_row(bad),
            lambda bad=bad: table.move_row(bad, 0),
            lambda bad=bad: table.swap_rows(0, bad),
            lambda bad=bad: table.slot_mapping(bad, [0], [0]),
        ):
            with pytest.raises(KVPagerError, match=r"row|group"):
                call()
    for bad in ([1.5], [float("nan")], "1", [2**70], ["x"], [[1], [2, 3]], None, [True]):
        with pytest.raises(KVPagerError, match="row_indices"):
            table.slot_mapping(0, bad, [0])
        with pytest.raises(KVPagerError, match="positions"):
            table.slot_mapping(0, [1], bad)
        with pytest.raises(KVPagerError, match="block ids"):
            table.append_row(1, [bad])
    for bad in (None, 5, {}, object(), iter([[1]])):
        with pytest.raises(KVPagerError, match="block_ids"):
            table.append_row(1, bad)
    assert table.rows(0).tolist() == [[0] * 5, [5, 9, 0, 0, 0]]


def test_what_a_block_table_cannot_hold_is_refused_before_anything_is_written() -> None:
    table = BlockTable(1, 16, [4, 4])
    with pytest.raises(KVPagerError, match="one dimension"):
        table.add_row(0, [[5], [[1, 2], [3, 4]]])
    assert table.rows(0).tolist() == [[0] * 4]
    with pytest.raises(ConfigError, match=r"block_sizes\[0\]"):
        BlockTable(1, 16, [2**31 + 1])  # a slot would not fit an int64
    with pytest.raises(ConfigError, match="bytes"):
        BlockTable(2**40, 2**40, [1])
    with pytest.raises(KVPagerError, match="do not pair up"):
        table.slot_mapping(0, [0, 0], [0, 0, 0])


@pytest.mark.parametrize("bad", [None, True, "x", 0, 2, float("nan"), 2**2000, [], object()])
def test_a_sampler_refuses_what_is_no_rate(bad: Any) -> None:
    with pytest.raises(ConfigError, match="sample_rate"):
        ResidencySampler(bad, clock=lambda: 0.0)


def test_a_sampler_takes_numpy_numbers_and_refuses_the_rest() -> None:
    both = [ResidencySampler(rate, clock=float, seed=seed) for rate, seed in ((0.5, 3), (np.float32(0.5), np.int64(3)))]
    for block_id in range(50):
        for sampler in both:
            sampler.allocated(block_id)
            sampler.evicted(block_id)
    assert len(both[0].drain()) == len(both[1].drain()) > 0
    for seed in (None, "x", 1.0):
        with pytest.raises(ConfigError, match="seed must be an integer"):
            ResidencySampler(0.5, clock=float, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="clock"):
        ResidencySampler(0.5, clock=3)  # type: ignore[arg-type]


def test_a_replay_takes_numpy_integers() -> None:
    numbers = {"limit": 7, "num_in_flight": 3, "max_num_running": 4, "max_model_len": 4096, "check_every": 5}
    config = CacheConfig.uniform(np.int64(900), parse_groups("full", np.int64(16)))
    reports = [
        replay(builtin_workload(seed), ReplayOptions(config=config, **{k: kind(v) for k, v in numbers.items()})).report  # type: ignore[arg-type]
        for kind, seed in ((int, 3), (np.int64, np.int64(3)))
    ]
    assert reports[0].steps == reports[1].steps and reports[1].requests == 7
    assert num_blocks_in(np.int64(1 << 20), np.int64(64), np.int64(16), np.int64(2)) == 2048
    assert len(list(ClosedLoop(builtin_workload(), np.int64(3), np.int64(2)).poll(0.0))) == 2
    assert TraceClock(builtin_workload(), np.int64(1)).next_time == 0.0


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda bad: StepTime(base_ms=bad), "base_ms"),
        (lambda bad: ReplayOptions(config=CONFIG, watermark=bad), "watermark"),
        (lambda bad: ReplayOptions(config=bad), "config"),
        (lambda bad: ReplayOptions(config=CONFIG, step_time=bad), "step_time"),
        (lambda bad: PromptMaker(bad), "hash_size"),
        (lambda bad: ClosedLoop([], bad), "num_slots"),
        (lambda bad: TraceClock([], bad if bad is not None else "x"), "limit"),
        (lambda bad: next(builtin_workload(bad)), "seed"),
        (lambda bad: sweep(Input(), ReplayOptions(config=CONFIG), [bad]), "sizes"),
        (lambda bad: num_blocks_in(bad, 1, 1, 1), "memory_bytes"),
        (lambda bad: parse_groups("full", bad), "block_size"),
        (lambda bad: parse_groups(bad, 4), "groups"),
        (lambda bad: hash_blocks([1], block_size=bad), "block_size"),
        (lambda bad: Request("a", [1], arrival_time=bad), "arrival_time"),
    ],
)
@pytest.mark.parametrize("bad", [None, True, "x", b"", [], float("nan"), object()])
def test_other_numbers_and_what_stands_beside_them_are_refused_by_name(
    make: Callable[[Any], object], name: str, bad: Any
) -> None:
    with pytest.raises(KVPagerError, match=name):
        make(bad)


def test_sweeping_no_size_gives_no_report() -> None:
    assert sweep(Input(), ReplayOptions(config=CONFIG), []) == []


def test_the_checks_themselves() -> None:
    assert as_count(np.int8(3), "n", 3, at_most=3) == 3
    assert as_integer(-(2**70), "n") == -(2**70)
    assert type(as_number(np.float32(0.5), "n")) is float
    for bad in (2, 4):
        with pytest.raises(ConfigError, match=f"n must be .*at (least|most) 3.*, got {bad}"):
            as_count(bad, "n", 3, at_most=3)
    with pytest.raises(ConfigError, match=r"at least 0\.5, got 0\.25"):
        as_number(0.25, "n", 0.5)
