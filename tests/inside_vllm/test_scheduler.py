"""vLLM's scheduler on kvpager's manager: the same decisions as on its own, and what must not go wrong."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM 0.25.1; `make test-vllm` runs these tests where it is")

from vllm.v1.core.kv_cache_manager import KVCacheManager as VLLM
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from kvpager.errors import ConfigError
from kvpager.integrations.vllm import v0_25_1

from .hosts import BLOCK, KVPAGER, answers, full, mamba, request, scheduler, scripted, window

v0_25_1.install()
SPECS = {
    "full": [full()],
    "window": [window(64)],
    "full and windows": [full(), window(64), window(64)],
    "full and Mamba": [full(), mamba()],
}


@pytest.fixture(autouse=True)
def _vllms_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_VLLM_EVICTION", "recency")


def check(host: Any) -> None:
    if isinstance(host.kv_cache_manager, KVPAGER):
        host.kv_cache_manager.check()


# -- a long random life -------------------------------------------------------------------------


class Life:
    """Requests that come, share beginnings, are aborted and preempted; the same for every manager."""

    def __init__(self, kind: Any, seed: int, *, num_drafts: int = 0, is_async: bool = False, **options: Any) -> None:
        self.host = scheduler(kind, is_async=is_async, num_drafts=num_drafts, **options)
        self.source = random.Random(seed)
        self.num_drafts, self.is_async = num_drafts, is_async
        self.seen: list[Any] = []
        self.refused = 0
        self.number = 0
        self.pending: deque[Any] = deque()

    def run(self, num_steps: int) -> Life:
        for step in range(num_steps):
            if step < num_steps // 2 and self.source.random() < 0.3:
                self._arrive()
            if self.number and self.source.random() < 0.05:
                victim = str(self.source.randrange(self.number))
                self.host.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            self.step()
        return self

    def _arrive(self) -> None:
        beginning = [self.source.randrange(3)] * self.source.choice([0, 16, 40, 64])
        own = [self.source.randrange(3, 1000) for _ in range(self.source.choice([1, 15, 16, 50, 100]))]
        priority = self.source.randrange(3)
        one = request(str(self.number), beginning + own, max_tokens=self.source.choice([1, 20, 80]), priority=priority)
        one.arrival_time = float(self.number)
        self.host.add_request(one)
        self.number += 1

    def step(self) -> None:
        output = self.host.schedule()
        self.seen.append(self._decisions(output))
        check(self.host)
        samples = [name for name in output.num_scheduled_tokens if not self.host.requests[name].is_prefill_chunk]
        self.pending.append((output, samples))
        if len(self.pending) > self.is_async:
            self._answer(*self.pending.popleft())
            check(self.host)

    def _decisions(self, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        return (
            dict(output.num_scheduled_tokens),
            [(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs],
            list(zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)),
            sorted(output.preempted_req_ids or ()),
            sorted(output.finished_req_ids),
            output.num_common_prefix_blocks,
        )

    def _answer(self, output: Any, samples: list[str]) -> None:
        sampled, drafts = {}, {}
        for request_id in samples:
            proposed = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            accepted = self.source.randrange(proposed + 1)
            sampled[request_id] = [self.source.randrange(1000) for _ in range(1 + accepted)]
            if self.num_drafts and not self.is_async:
                drafts[request_id] = [self.source.randrange(1000) for _ in range(self.num_drafts)]
        self.host.update_from_output(output, answers(output, sampled))
        if drafts:
            self.host.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))


LIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"is_async": True},
    "drafts": {"num_drafts": 3},
    "asynchronous drafts": {"is_async": True, "num_drafts": 3},
    "priorities": {"policy": "priority"},
}


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("seed", range(6))
def test_the_same_decisions_as_on_vllms_manager(life: str, seed: int) -> None:
    options = {"num_blocks": 30, **LIVES[life]}
    ours, theirs = Life(KVPAGER, seed, **options).run(300), Life(VLLM, seed, **options).run(300)
    for step, (mine, others) in enumerate(zip(ours.seen, theirs.seen, strict=True)):
        assert mine == others, f"seed {seed}, step {step}"
    assert sum(len(decisions[3]) for decisions in ours.seen) > 0  # somebody was preempted


@pytest.mark.parametrize("specs", ["window", "full and windows", "full and Mamba"])
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("eviction", ["recency", "dead_first"])
def test_everybody_gets_done(specs: str, life: str, eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPAGER_VLLM_EVICTION", eviction)
    one = Life(KVPAGER, 1, num_blocks=50, specs=SPECS[specs], **LIVES[life]).run(400)
    for _ in range(3000):
        if not one.host.has_unfinished_requests():
            break
        one.step()
    while one.pending:
        one._answer(*one.pending.popleft())
    assert not one.host.requests
    assert one.host.kv_cache_manager.block_pool.get_num_free_blocks() == 49
    check(one.host)


def hits_of_sessions_in_turn(kind: Any, num_sessions: int) -> list[int]:
    """Tokens hit by each of some growing sessions when it comes back, in 170 blocks; each leaves about 80 behind."""
    host = scheduler(kind, num_blocks=171, specs=SPECS["full and windows"], max_num_batched_tokens=512)
    hits = []
    for turn in range(3):
        for session in range(num_sessions):
            name = f"{session}-{turn}"
            host.add_request(request(name, range(1000 * session, 1000 * session + 416 + 16 * turn), max_tokens=1))
            output = step(host, {name: [1]})
            hits.append(output.scheduled_new_reqs[0].num_computed_tokens)
    return hits[num_sessions:]


def test_sessions_of_a_hybrid_model_do_not_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hits_of_sessions_in_turn(VLLM, 3) == [0] * 6
    assert hits_of_sessions_in_turn(KVPAGER, 3) == [0] * 6  # in vLLM's order
    monkeypatch.setenv("KVPAGER_VLLM_EVICTION", "dead_first")
    assert hits_of_sessions_in_turn(KVPAGER, 3) == [416] * 3 + [432] * 3


@pytest.mark.parametrize("kind", [KVPAGER, VLLM])
@pytest.mark.parametrize("is_async", [False, True])
def test_states_at_boundaries_passed_while_decoding_are_hit(kind: Any, is_async: bool) -> None:
    host = scheduler(kind, specs=SPECS["full and Mamba"], is_async=is_async)
    host.add_request(request("a", range(40), max_tokens=40))
    pending: deque[Any] = deque()
    while host.requests:
        pending.append(host.schedule())
        if len(pending) > is_async:
            output = pending.popleft()
            host.update_from_output(output, answers(output, {"a": [7]}))
            check(host)
    assert hit_of(host, [*range(40), *[7] * 40, 1, 2, 3]) == 64


# -- what no correct host does ------------------------------------------------------------------


def finish(host: Any, token: int = 7, *, max_steps: int = 100) -> int:
    """Steps until everybody is done; each request samples one token a step."""
    for number in range(max_steps):
        if not host.requests:
            return number
        output = host.schedule()
        names = [name for name in output.num_scheduled_tokens if not host.requests[name].is_prefill_chunk]
        host.update_from_output(output, answers(output, {name: [token] for name in names}))
        check(host)
    raise AssertionError(f"{sorted(host.requests)} are not done after {max_steps} steps")


@pytest.mark.parametrize("specs", ["full", "window"])
def test_more_tokens_accepted_than_drafted_starts_one_request_over(specs: str, said: list[str]) -> None:
    host = scheduler(specs=SPECS[specs], num_drafts=20, max_num_batched_tokens=256)
    for name in ("good", "bad"):
        host.add_request(request(name, [len(name)] * 40, max_tokens=100))
    step(host, {"good": [1], "bad": [1]})
    host.update_draft_token_ids(DraftTokenIds(["good", "bad"], [[2, 2], [2, 2]]))
    step(host, {"good": [2, 2, 2], "bad": [2] * 21})
    output = step(host, {"good": [3]})
    assert output.preempted_req_ids == {"bad"} and "good" in output.num_scheduled_tokens
    (message,) = said
    assert "request bad" in message and "starts over" in message and "num_computed_tokens" in message
    finish(host)
    assert said == [message]


@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_computed_tokens_out_of_nowhere_end_no_step(specs: str, seed: int, said: list[str]) -> None:
    one = Life(KVPAGER, seed, num_blocks=60, specs=SPECS[specs])
    for _ in range(200):
        if one.source.random() < 0.2:
            one._arrive()
        one.step()
        for victim in one.host.requests.values():
            if one.source.random() < 0.05:
                victim.num_computed_tokens = one.source.randrange(victim.num_tokens)
    assert any("starts over" in message for message in said)
    finish(one.host, max_steps=3000)
    assert one.host.kv_cache_manager.block_pool.get_num_free_blocks() == 59


def test_computed_tokens_of_a_request_that_was_never_scheduled_start_over(said: list[str]) -> None:
    host = scheduler()
    one = request("session", range(40), max_tokens=4)
    one.num_computed_tokens = 32
    host.add_request(one)
    assert not step(host).num_scheduled_tokens
    assert step(host, {"session": [1]}).num_scheduled_tokens == {"session": 40}
    finish(host)
    (message,) = said
    assert "session" in message and "starts over" in message


def test_tokens_without_slots_are_not_cached_and_nothing_is_raised(said: list[str]) -> None:
    host = scheduler()
    host.add_request(request("a", range(20), max_tokens=100))
    step(host, {"a": [1]})
    one = host.requests["a"]
    one.append_output_token_ids([5] * 100)
    for _ in range(3):
        host.kv_cache_manager.cache_blocks(one, 120)
    check(host)
    (message,) = said
    assert "'a'" in message and "120 tokens cannot be cached" in message


@pytest.mark.parametrize("num_blocks", [42, 45, 48])
@pytest.mark.parametrize("kind", [KVPAGER, VLLM])
def test_a_long_prompt_in_short_steps_is_served(kind: Any, num_blocks: int, said: list[str]) -> None:
    host = scheduler(
        kind,
        num_blocks=num_blocks,
        specs=[full(), window(64)],
        max_num_batched_tokens=512,
        long_prefill_token_threshold=64,
        scheduler_reserve_full_isl=False,
    )
    host.add_request(request("a", range(480), max_tokens=4))
    assert finish(host) == 11
    assert not [message for message in said if "request a" in message]


def test_what_never_fits_is_told_as_it_was_planned(said: list[str]) -> None:
    host = scheduler(
        num_blocks=36, specs=[full(), window(64)], max_num_batched_tokens=512, long_prefill_token_threshold=64
    )
    host.add_request(request("a", range(480), max_tokens=4))
    for _ in range(3):
        assert not step(host).num_scheduled_tokens
    at_start, message = said
    assert "cannot hold a sequence of max_model_len 512" in at_start
    assert "480 tokens" in message and "steps of up to 64" in message and "waits for ever" in message


# -- loads --------------------------------------------------------------------------------------


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Set what the connector says is there, by request id and local hit."""
    from kvpager_test_connector import ScriptedConnector

    def say(answer: Any) -> None:
        monkeypatch.setattr(ScriptedConnector, "matched", staticmethod(answer))

    say(lambda request_id, num_computed: (0, False))
    return say


def index_of(host: Any) -> dict[Any, list[int]]:
    return host.kv_cache_manager.manager.block_pool.index()


def hit_of(host: Any, tokens: Sequence[int]) -> int:
    """How many tokens of a newcomer would be hit."""
    return int(host.kv_cache_manager.get_computed_blocks(request("newcomer", tokens))[1])


def step(host: Any, sampled: dict[str, list[int]] | None = None, **transferred: Any) -> Any:
    output = host.schedule()
    host.update_from_output(output, answers(output, sampled or {}, **transferred))
    check(host)
    return output


def test_a_load_is_cached_only_when_it_has_arrived(matched: Any) -> None:
    host = scheduler(transfer=scripted())
    matched(lambda request_id, num_computed: (64 - num_computed, True))
    host.add_request(request("a", range(100)))
    step(host)
    assert not index_of(host)
    step(host, finished_recving={"a"})
    assert not index_of(host)
    output = step(host, {"a": [1]})
    assert output.num_scheduled_tokens == {"a": 36}
    assert len(index_of(host)) == 6


@pytest.mark.parametrize("specs", SPECS)
def test_a_load_of_everything_leaves_one_token_to_compute(matched: Any, specs: str) -> None:
    host = scheduler(specs=SPECS[specs], transfer=scripted())
    matched(lambda request_id, num_computed: (96 - num_computed, True))
    host.add_request(request("a", range(96), max_tokens=1))
    step(host)
    step(host, finished_recving={"a"})
    output = step(host, {"a": [1]})
    assert output.num_scheduled_tokens == {"a": 1}
    assert not host.requests
    matched(lambda request_id, num_computed: (0, False))
    assert hit_of(host, range(200)) == 96


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reset_takes_running_requests_along(is_async: bool) -> None:
    one = Life(KVPAGER, 3, num_blocks=60, is_async=is_async).run(40)
    while one.pending:
        one._answer(*one.pending.popleft())
    assert one.host.running and index_of(one.host)
    assert one.host.reset_prefix_cache(reset_running_requests=True)
    assert not index_of(one.host) and not one.host.running
    check(one.host)
    assert one.host.kv_cache_manager.make_prefix_cache_stats().reset
    one.step()
    assert one.host.running


@pytest.mark.parametrize("specs", ["full", "window"])
def test_a_load_that_failed_half_way_goes_on_from_what_arrived_or_starts_over(matched: Any, specs: str) -> None:
    host = scheduler(specs=SPECS[specs], transfer=scripted(kv_load_failure_policy="recompute"))
    matched(lambda request_id, num_computed: (80 - num_computed, True))
    host.add_request(request("a", range(100)))
    step(host)
    (ids,) = host.kv_cache_manager.get_block_ids("a")
    held = [position for position, block_id in enumerate(ids) if block_id]
    broken = held[1]
    matched(lambda request_id, num_computed: (0, False))
    output = host.schedule()
    failed = answers(output, {}, finished_recving={"a"}, invalid_block_ids={ids[broken]})
    host.update_from_output(output, failed)
    assert not index_of(host)
    output = host.schedule()
    # A window's tokens left of the failed block were never loaded: there it can only start over.
    start = broken * BLOCK if specs == "full" else 0
    (new,) = output.scheduled_new_reqs
    assert new.num_computed_tokens == start
    check(host)


@pytest.mark.parametrize("budget", [64, 16])
def test_whoever_shares_a_load_that_failed_computes_it_too(matched: Any, budget: int) -> None:
    """vLLM tells its manager nothing here, and lets a sharer read what another may only compute steps later."""
    host = scheduler(max_num_batched_tokens=256, transfer=scripted(kv_load_failure_policy="recompute"))
    matched(lambda request_id, num_computed: (80 - num_computed, False) if request_id == "a" else (0, False))
    host.add_request(request("a", range(100)))
    host.add_request(request("b", [*range(80), *range(1000, 1020)]))
    output = host.schedule()
    assert {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs} == {"a": 80, "b": 80}
    (ids,) = host.kv_cache_manager.manager.get_block_ids("a")
    host.update_from_output(output, answers(output, {}, invalid_block_ids={ids[2]}))
    host.max_num_scheduled_tokens = budget
    output = host.schedule()
    check(host)
    assert set(output.scheduled_cached_reqs.num_computed_tokens) == {2 * BLOCK}
    # What was computed from the failed block can be hit by nobody before it is computed again.
    assert hit_of(host, range(100)) <= 2 * BLOCK + budget


def test_blocks_computed_from_a_load_that_failed_are_hit_by_nobody(matched: Any) -> None:
    host = scheduler(max_num_batched_tokens=256, transfer=scripted(kv_load_failure_policy="fail"))
    matched(lambda request_id, num_computed: (80 - num_computed, False) if request_id == "a" else (0, False))
    host.add_request(request("a", range(100)))
    host.add_request(request("b", [*range(80), *range(1000, 1100)]))
    output = host.schedule()
    (ids,) = host.kv_cache_manager.manager.get_block_ids("a")
    host.update_from_output(output, answers(output, {}, invalid_block_ids={ids[2]}))
    check(host)
    assert not host.requests
    assert hit_of(host, [*range(80), *range(1000, 1100)]) == 2 * BLOCK
    # Once the beginning is computed again, what the sharer computed from the failed load must still be gone.
    host.add_request(request("d", range(100)))
    step(host, {"d": [1]})
    assert hit_of(host, [*range(80), *range(1000, 1100)]) == 80


def test_a_window_whose_load_failed_starts_over_by_preemption(matched: Any) -> None:
    host = scheduler(
        specs=SPECS["window"], max_num_batched_tokens=256, transfer=scripted(kv_load_failure_policy="recompute")
    )
    matched(lambda request_id, num_computed: (80 - num_computed, False))
    host.add_request(request("a", range(100)))
    output = host.schedule()
    (ids,) = host.kv_cache_manager.manager.get_block_ids("a")
    broken = next(position for position, block_id in enumerate(ids) if block_id) + 1
    host.update_from_output(output, answers(output, {}, invalid_block_ids={ids[broken]}))
    matched(lambda request_id, num_computed: (0, False))
    assert step(host).preempted_req_ids == {"a"}
    output = step(host, {"a": [1]})
    assert output.num_scheduled_tokens == {"a": 100}
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert hit_of(host, range(100)) == 96


# -- what else must not go wrong ----------------------------------------------------------------


def test_a_sessions_next_input_gets_hashes_of_its_own() -> None:
    """vLLM keeps the hash of a block that the dropped token had filled, and would cache other content under it."""
    host = scheduler()
    host.add_request(request("session", range(15), max_tokens=1, resumable=True))
    step(host, {"session": [7]})
    host.add_request(request("session", [500, *range(501, 540)], max_tokens=1, resumable=True))
    step(host, {"session": [8]})
    told = request("other", [*range(15), 7, *range(100)])
    true = request("other", [*range(15), 500, *range(501, 540)])
    assert host.kv_cache_manager.get_computed_blocks(told)[1] == 0
    assert host.kv_cache_manager.get_computed_blocks(true)[1] == 48


def test_window_blocks_that_rejected_drafts_would_need_stay() -> None:
    """Computed tokens run ahead of what is known by as much as drafts may be rejected."""
    host = scheduler(specs=[window(32)], is_async=True, num_drafts=3)
    host.add_request(request("a", range(64), max_tokens=100))
    pending: deque[Any] = deque()
    for _ in range(60):
        pending.append(host.schedule())
        one = host.requests.get("a")
        known = one.num_computed_tokens - one.num_output_placeholders
        (ids,) = host.kv_cache_manager.manager.get_block_ids("a")
        first_read = max(0, known - 32 + 1) // BLOCK
        assert all(ids[first_read : one.num_computed_tokens // BLOCK]), (known, ids)
        if len(pending) > 1:
            output = pending.popleft()  # all drafts are rejected, always
            host.update_from_output(output, answers(output, {"a": [5]}))
        check(host)


def offloading(*, lazy: bool) -> dict[str, Any]:
    options = {"cpu_bytes_to_use": 1 << 20, "lazy_offload": lazy}
    return {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}


def test_a_connector_that_walks_the_old_queue_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match=r"lazy_offload.*unset KVPAGER_VLLM"):
        scheduler(transfer=offloading(lazy=True))
    several = {"connectors": [offloading(lazy=True)]}
    with pytest.raises(ConfigError, match="lazy_offload"):
        scheduler(
            transfer={"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": several}
        )


@pytest.mark.parametrize("specs", ["full", "full and windows"])
def test_a_connector_that_pins_blocks_and_reads_their_hashes_works(specs: str) -> None:
    host = scheduler(specs=SPECS[specs], max_num_batched_tokens=256, transfer=offloading(lazy=False))
    host.add_request(request("a", range(100), max_tokens=4))
    while host.requests:  # stores whatever is computed, and its worker is done at once
        output = host.schedule()
        stored = output.kv_connector_metadata.store_event
        told = {"kv_connector_worker_meta": SimpleCPUOffloadWorkerMetadata({stored: 1})} if stored >= 0 else {}
        host.update_from_output(output, answers(output, {"a": [1]}, **told))
        check(host)
    assert host.kv_cache_manager.block_pool.get_num_free_blocks() == 63
    assert host.reset_prefix_cache() and hit_of(host, range(100)) == 0
    host.add_request(request("b", range(100), max_tokens=1))
    assert not step(host).num_scheduled_tokens  # the load is under way
    step(host, finished_recving={"b"})
    assert step(host, {"b": [1]}).num_scheduled_tokens == {"b": 4}
    assert not host.requests and host.kv_cache_manager.block_pool.get_num_free_blocks() == 63
    assert hit_of(host, range(100)) == 96
