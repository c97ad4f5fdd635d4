"""Replays: exact figures, both ways of spelling prompts, pressure, checks, events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from kvpager import CacheConfig, FullAttention
from kvpager.check import check_manager
from kvpager.errors import ConfigError, InvariantError
from kvpager.events import BlockRemoved, BlockStored, KVCacheEvent, apply_events
from kvpager.replay import (
    NUM_WORKLOAD_REQUESTS,
    BlockIds,
    ReplayOptions,
    Session,
    StepTime,
    TraceRequest,
    builtin_workload,
    cache_config,
    replay,
)

from .helpers import exact_figures, run, with_short_outputs


def lone(*lengths: tuple[int, int], start: float = 0.0) -> list[Session]:
    return [Session(start, [TraceRequest(0.0, prompt, output, None)]) for prompt, output in lengths]


def test_every_figure_of_a_replay_done_by_hand() -> None:
    """Two requests with one prompt of 40 tokens, the second at 1 s; steps of 1 s + 1 s a prefill token."""
    record = TraceRequest(0.0, 40, 3, BlockIds(8, ((0, 5),)))
    sessions = [Session(0.0, [record]), Session(1.0, [record])]
    outcome = replay(
        sessions,
        ReplayOptions(
            config=CacheConfig.uniform(11, [FullAttention(block_size=16)]),
            step_time=StepTime(base_ms=1000, ms_per_prefill_token=1000, ms_per_decoding_request=500),
        ),
    )
    report = outcome.report
    # Step 1: 40 prefill tokens, 41 s. Step 2: one decodes (its 4th block is not needed), the other prefills 40 - 32:
    # 1 + 8 + 0.5 s. Step 3: both decode, 2 s; the first is over. Step 4: 1.5 s.
    assert (report.requests, report.prompt_tokens, report.generated_tokens, report.steps) == (2, 80, 6, 4)
    assert report.hit_tokens == 32
    assert report.hit_rate == report.ideal_hit_rate == 0.4
    assert report.simulated_seconds == pytest.approx(41 + 9.5 + 2 + 1.5)
    assert report.peak_usage == pytest.approx(0.4)  # 3 blocks and one of its own, of 10
    assert report.mean_usage == pytest.approx((41 * 0.3 + 9.5 * 0.4 + 2 * 0.4 + 1.5 * 0.3) / 54)
    assert (report.evicted_blocks, report.preemptions, report.refused) == (0, 0, 0)
    assert outcome.queue_time.longest == pytest.approx(40.0)
    assert outcome.queue_time.mean == pytest.approx(20.0)
    assert [sample.num_running for sample in outcome.timeline.samples] == [1, 2, 1, 0]
    assert [sample.num_waiting for sample in outcome.timeline.samples] == [0, 0, 0, 0]
    assert outcome.timeline.samples[-1].hit_rate == 0.4
    assert 0 < report.manager_cpu_seconds <= report.wall_seconds
    assert report.peak_rss_bytes > 1 << 20


def test_the_workload_is_the_same_for_the_same_seed_and_has_as_many_requests_as_it_says() -> None:
    first, again, other = (list(builtin_workload(seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert sum(len(session.requests) for session in first) == NUM_WORKLOAD_REQUESTS
    starts = [session.start for session in first]
    assert starts == sorted(starts)


def test_a_replay_is_exact() -> None:
    first, again = (run(builtin_workload(1), num_blocks=2000, limit=200) for _ in range(2))
    assert exact_figures(first) == exact_figures(again)
    assert first.requests == 200


@pytest.mark.parametrize("groups", ["full", "full+2xsliding:256", "full+2xmamba", "full+chunked:512"])
@pytest.mark.parametrize("arrivals", [None, 8])
def test_block_ids_and_made_up_tokens_give_the_same_hits(groups: str, arrivals: int | None) -> None:
    """Under pressure: some prompts lose their blocks to others."""
    both = [
        run(
            with_short_outputs(builtin_workload(2)),
            num_blocks=1500,
            groups=groups,
            num_in_flight=arrivals,
            limit=150,
            expand_ids=expand,
            check_every=50,
        )
        for expand in (False, True)
    ]
    assert exact_figures(both[0]) == exact_figures(both[1])
    assert both[0].evicted_blocks > 500
    assert both[0].hit_tokens > 10_000


@pytest.mark.parametrize("block_size", [16, 48, 100])
def test_an_infinite_cache_hits_the_ideal_at_any_block_size(block_size: int) -> None:
    report = run(with_short_outputs(builtin_workload(5)), num_blocks=100_000, block_size=block_size, num_in_flight=1)
    assert report.evicted_blocks == 0
    assert report.hit_rate == report.ideal_hit_rate > 0.8


def test_pressure_preempts_and_never_beats_the_ideal() -> None:
    report = run(lone(*[(100, 200)] * 20), num_blocks=60, num_in_flight=10, check_every=1)
    assert report.preemptions > 0
    assert report.generated_tokens == 20 * 200
    assert report.hit_tokens == 0  # what is hit on return from a preemption is no hit on a prompt
    report = run(builtin_workload(), num_blocks=2500, limit=300, check_every=100)
    assert 0 < report.hit_rate <= report.ideal_hit_rate
    assert report.peak_usage <= 1.0


def test_what_can_never_fit_is_refused_and_counted_and_lets_the_others_pass() -> None:
    sessions = lone((100, 5), (1000, 5), (100, 5), (20, 5000), (999_999_999, 1))
    for arrivals in (None, 1):
        report = run(sessions, num_blocks=20, num_in_flight=arrivals)
        assert (report.requests, report.refused, report.prompt_tokens) == (5, 3, 1_000_001_219)
        assert report.generated_tokens == 10


def test_waiting_prompts_are_made_only_when_it_is_nearly_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with how many have arrived: their block lists aren't there yet."""
    from kvpager.replay import simulate

    made = []

    class Counting(simulate.PromptMaker):
        def make(self, request: TraceRequest) -> Any:
            made.append(request)
            return super().make(request)

    def progress(num_done: int) -> None:
        assert len(made) <= num_done + 2 * 3 + 1

    monkeypatch.setattr(simulate, "PromptMaker", Counting)
    monkeypatch.setattr(simulate, "_STEPS_PER_PROGRESS", 1)
    config = cache_config("full", 16, num_blocks=1000)
    outcome = replay(lone(*[(50, 3)] * 100), ReplayOptions(config=config, max_num_running=3), progress=progress)
    assert outcome.report.requests == len(made) == 100
    assert max(sample.num_waiting for sample in outcome.timeline.samples) > 90


def test_events_rebuild_the_index_at_every_step() -> None:
    index: set[tuple[bytes, int | None]] = set()
    kinds: set[type] = set()

    def sink(events: Sequence[KVCacheEvent]) -> None:
        kinds.update(map(type, events))
        apply_events(index, events)

    config = cache_config("full+sliding:64", 16, num_blocks=2500)
    options = ReplayOptions(config=config, limit=100)
    report = replay(with_short_outputs(builtin_workload()), options, event_sink=sink).report
    assert kinds == {BlockStored, BlockRemoved}
    assert 0 < len(index) <= 2500
    assert exact_figures(report) == exact_figures(replay(with_short_outputs(builtin_workload()), options).report)


def test_checks_run_as_often_as_asked_and_their_verdict_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpager.replay import simulate

    config = cache_config("full", 16, num_blocks=100)
    outcome = replay(lone((50, 10)), ReplayOptions(config=config, check_every=3))
    assert (outcome.report.steps, outcome.num_checks) == (10, 3)

    def broken(manager: object) -> None:
        check_manager(manager)  # type: ignore[arg-type]
        raise InvariantError("1 is not 2")

    monkeypatch.setattr(simulate, "check_manager", broken)
    with pytest.raises(InvariantError, match="1 is not 2"):
        replay(lone((50, 10)), ReplayOptions(config=config, check_every=3))


def test_the_timeline_stays_small_and_covers_everything() -> None:
    config = cache_config("full", 16, num_blocks=1000)
    outcome = replay(lone((10, 12_000)), ReplayOptions(config=config))
    samples = outcome.timeline.samples
    assert len(samples) < 4096
    assert samples[0].seconds < 1
    assert samples[-1].seconds == pytest.approx(outcome.report.simulated_seconds, rel=0.01)


def test_pauses_show_in_the_timeline() -> None:
    config = cache_config("full", 16, num_blocks=100)
    outcome = replay([*lone((50, 2)), *lone((50, 2), start=100.0)], ReplayOptions(config=config))
    samples = [(round(s.seconds), s.num_running, s.usage > 0) for s in outcome.timeline.samples]
    assert samples == [(0, 1, True), (0, 0, True), (0, 0, False), (100, 1, True), (100, 0, True)]
    assert outcome.report.simulated_seconds > 100


def test_nothing_to_replay() -> None:
    report = run([], num_blocks=10)
    assert (report.requests, report.steps, report.hit_rate, report.simulated_seconds) == (0, 0, 0.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_in_flight": 0},
        {"limit": 0},
        {"check_every": -1},
        {"watermark": 1.5},
        {"eviction_order": "random"},
        {"max_model_len": 0},
        {"max_num_batched_tokens": 0},
        {"max_num_running": 0},
        {"num_lookahead_tokens": -1},
    ],
)
def test_options_that_cannot_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run(lone((5, 5)), num_blocks=10, **wrong)


@pytest.mark.parametrize("wrong", [{"base_ms": -1.0}, {"ms_per_prefill_token": float("nan")}, {"base_ms": 0.0}])
def test_step_times_that_cannot_work(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="StepTime"):
        StepTime(**{"ms_per_prefill_token": 0.0, **wrong})


def test_watermark_and_lookahead_reach_the_manager() -> None:
    sessions = lone(*[(100, 50)] * 12)
    plain = run(sessions, num_blocks=60, num_in_flight=6)
    careful = run(sessions, num_blocks=60, num_in_flight=6, watermark=0.5)
    assert careful.peak_usage < plain.peak_usage
    ahead = run(lone((16, 1)), num_blocks=60, num_lookahead_tokens=64)
    assert ahead.peak_usage > run(lone((16, 1)), num_blocks=60).peak_usage


def test_outputs_of_no_tokens_count_as_none() -> None:
    records = [dataclasses.replace(record, num_output_tokens=0) for record in lone((20, 1))[0].requests]
    report = run([Session(0.0, [*records, *lone((20, 3))[0].requests])], num_blocks=10)
    assert (report.requests, report.generated_tokens) == (2, 3)
