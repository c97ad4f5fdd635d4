"""What the scheduler promises, one promise a test; blocks of 4 tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpager.attention import AttentionSpec, CrossAttention, FullAttention, Mamba
from kvpager.check import check_manager
from kvpager.config import CacheConfig
from kvpager.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    RequestTooLargeError,
    UnknownRequestError,
)
from kvpager.hashing import BlockHasher
from kvpager.manager import KVCacheManager
from kvpager.request import Request, RequestStatus
from kvpager.scheduler import Scheduler, SchedulerOutput

BLOCK = 4


class Setup:
    """A scheduler over a manager of its own, and requests for them."""

    def __init__(
        self,
        num_blocks: int = 100,
        specs: Sequence[AttentionSpec] = (FullAttention(block_size=BLOCK),),
        manager_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        config = CacheConfig.uniform(num_blocks + 1, specs)
        self.hasher = BlockHasher.for_config(config)
        self.manager = KVCacheManager(config, **({"max_model_len": 200} | (manager_options or {})))
        self.scheduler = Scheduler(self.manager, **options)

    def request(
        self, request_id: str, prompt: int | Sequence[int], max_tokens: int | None = 3, **options: Any
    ) -> Request:
        """A request; a number stands for a prompt of that length which shares nothing with others."""
        if isinstance(prompt, int):
            start = 1000 * (1 + ord(request_id[0]))
            prompt = range(start, start + prompt)
        return Request(request_id, list(prompt), block_hasher=self.hasher, max_tokens=max_tokens, **options)

    def add(self, *arguments: Any, **options: Any) -> Request:
        request = self.request(*arguments, **options)
        self.scheduler.add(request)
        return request

    def update(self, output: SchedulerOutput, **options: Any) -> list[Request]:
        sampled = {step.request.request_id: [7] for step in output.scheduled if step.samples}
        finished = self.scheduler.update(output, sampled, **options)
        check_manager(self.manager)
        return finished

    def step(self) -> dict[str, tuple[int, int]]:
        """One step, every sample a 7: {request: (start, number of tokens)} in the order scheduled."""
        output = self.scheduler.schedule()
        self.update(output)
        return {step.request.request_id: (step.start, step.num_tokens) for step in output.scheduled}


def test_a_request_is_prefilled_and_decodes_to_its_length() -> None:
    s = Setup()
    request = s.add("a", 10)
    assert (s.scheduler.num_waiting, s.scheduler.num_running, s.scheduler.has_unfinished) == (1, 0, True)

    output = s.scheduler.schedule()
    (step,) = output.scheduled
    assert (step.request, step.start, step.num_tokens, step.is_prefill, step.samples) == (request, 0, 10, True, True)
    assert (output.num_scheduled_tokens, step.num_cached_tokens) == (10, 0)
    assert [len(ids) for ids in step.block_ids] == [3]
    assert s.update(output) == []
    assert (request.status, request.num_computed_tokens, request.output_token_ids) == (RequestStatus.RUNNING, 10, [7])

    output = s.scheduler.schedule()
    (step,) = output.scheduled
    assert (step.start, step.num_tokens, step.is_prefill, step.num_cached_tokens) == (10, 1, False, None)
    assert s.update(output) == []
    assert s.update(s.scheduler.schedule()) == [request]
    assert (request.status, request.output_token_ids) == (RequestStatus.FINISHED_LENGTH, [7, 7, 7])
    assert not s.scheduler.has_unfinished
    assert s.manager.usage == 0


def test_the_budget_is_given_to_running_requests_first_and_a_prompt_is_cut_to_the_rest() -> None:
    s = Setup(max_num_scheduled_tokens=8)
    s.add("a", 4)
    s.add("b", 12)
    assert s.step() == {"a": (0, 4), "b": (0, 4)}
    assert s.step() == {"a": (4, 1), "b": (4, 7)}
    assert s.step() == {"a": (5, 1), "b": (11, 1)}


def test_a_cut_prompt_samples_only_in_its_last_step() -> None:
    s = Setup(max_num_scheduled_tokens=8)
    s.add("a", 12)
    assert [(step.samples, step.is_prefill) for step in s.scheduler.schedule().scheduled] == [(False, True)]


def test_a_prompt_of_one_token_is_a_prefill_and_its_answer_is_not() -> None:
    s = Setup()
    s.add("a", 1)
    for is_prefill in (True, False):
        output = s.scheduler.schedule()
        assert output.scheduled[0].is_prefill == is_prefill
        s.update(output)


def test_without_chunked_prefill_a_prompt_waits_until_a_step_has_room_for_all_of_it() -> None:
    options = {"max_model_len": 12, "max_num_batched_tokens": 12}
    s = Setup(manager_options=options, enable_chunked_prefill=False)
    s.add("a", 8, 2)
    s.add("b", 6)
    s.add("c", 1)
    assert s.step() == {"a": (0, 8)}  # b needs 6 of the 4 left, and c stays behind b
    assert s.step() == {"a": (8, 1), "b": (0, 6), "c": (0, 1)}
    with pytest.raises(ConfigError, match="max_num_scheduled_tokens is 11, max_model_len 12"):
        Scheduler(s.manager, enable_chunked_prefill=False, max_num_scheduled_tokens=11)


def test_at_most_so_many_run() -> None:
    s = Setup(max_num_running=2)
    for name in "abc":
        s.add(name, 4, 2)
    assert list(s.step()) == ["a", "b"]
    assert (s.scheduler.num_running, s.scheduler.num_waiting) == (2, 1)
    assert list(s.step()) == ["a", "b"]
    assert list(s.step()) == ["c"]


def test_a_prompt_that_was_seen_hits_and_the_output_says_how_much() -> None:
    s = Setup()
    s.add("a", range(50, 60))
    s.step()
    s.add("b", range(50, 60))
    output = s.scheduler.schedule()
    assert [step.num_cached_tokens for step in output.scheduled] == [None, 8]
    assert (output.scheduled[1].start, output.scheduled[1].num_tokens) == (8, 2)
    assert output.scheduled[0].block_ids[0][:2] == output.scheduled[1].block_ids[0][:2]


def test_fcfs_goes_by_the_order_of_add_alone() -> None:
    s = Setup(max_num_running=1)
    s.add("a", 4, 1, priority=9, arrival_time=5.0)
    s.add("b", 4, 1, priority=1, arrival_time=1.0)
    assert [list(s.step()), list(s.step())] == [["a"], ["b"]]


def test_priority_lower_first_ties_by_arrival_then_by_order_of_add() -> None:
    s = Setup(max_num_running=1, policy="priority")
    s.add("late", 4, 1, priority=1, arrival_time=9.0)
    s.add("low", 4, 1, priority=2)
    s.add("early", 4, 1, priority=1, arrival_time=1.0)
    s.add("early2", 4, 1, priority=1, arrival_time=1.0)
    s.add("urgent", 4, 1, priority=-1, arrival_time=9.0)
    assert [next(iter(s.step())) for _ in range(5)] == ["urgent", "early", "early2", "late", "low"]


def test_the_last_is_preempted_when_blocks_run_out_and_returns_to_the_head() -> None:
    s = Setup(num_blocks=4)
    a, b, c = s.add("a", 7, 8), s.add("b", 7, 8), s.add("c", 3, 8)
    assert list(s.step()) == ["a", "b"]  # two blocks each
    assert list(s.step()) == ["a", "b"]
    output = s.scheduler.schedule()  # a needs its third block
    assert [step.request for step in output.scheduled] == [a]
    assert output.preempted == (b,)
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    s.update(output)
    while a.status is RequestStatus.RUNNING:
        assert list(s.step()) == ["a"]  # c would fit, but b is at the head
    assert c.status is RequestStatus.WAITING
    output = s.scheduler.schedule()
    assert output.scheduled[0].request is b
    assert output.scheduled[0].is_prefill
    assert b.num_output_tokens == 2  # what it had generated is kept
    s.update(output)
    while s.scheduler.has_unfinished:
        s.step()
    assert [r.num_output_tokens for r in (a, b, c)] == [8, 8, 8]
    assert s.manager.usage == 0


def test_a_request_that_gets_no_blocks_and_is_the_last_preempts_itself() -> None:
    s = Setup(num_blocks=4)
    s.add("a", 6, 8)
    b = s.add("b", 8, 8)
    s.step()
    output = s.scheduler.schedule()
    assert output.preempted == (b,)
    assert [step.request.request_id for step in output.scheduled] == ["a"]


def test_the_least_important_is_preempted() -> None:
    s = Setup(num_blocks=4, policy="priority")
    low = s.add("low", 8, 8, priority=5)
    s.step()
    high = s.add("high", 7, 8, priority=1)
    output = s.scheduler.schedule()
    assert (output.preempted, [step.request for step in output.scheduled]) == ((), [low])
    s.update(output)
    s.scheduler.abort("low")
    low = s.add("low2", 7, 8, priority=5)
    assert list(s.step()) == ["high", "low2"]
    s.step()
    output = s.scheduler.schedule()
    assert (output.preempted, [step.request for step in output.scheduled]) == ((low,), [high])


def test_a_step_that_preempts_admits_nobody() -> None:
    s = Setup(num_blocks=4, policy="priority")
    s.add("high", 7, 8, priority=1)
    s.add("low", 7, 8, priority=5)
    s.step()
    s.step()
    s.add("urgent", 1, 1)
    assert list(s.step()) == ["high"]  # although a block of low's is free
    assert list(s.step()) == ["high", "urgent"]


def test_a_lone_request_that_outgrows_the_pool_finishes_by_length() -> None:
    s = Setup(num_blocks=3)
    request = s.add("a", 6, None)
    for _ in range(7):
        assert s.step()
    output = s.scheduler.schedule()
    assert (output.scheduled, output.preempted) == ((), ())
    assert s.update(output) == [request]
    assert (request.status, request.num_tokens) == (RequestStatus.FINISHED_LENGTH, 13)
    assert s.manager.usage == 0


def test_who_waits_goes_on_in_the_step_in_which_the_lone_one_outgrows_the_pool() -> None:
    s = Setup(num_blocks=3)
    request = s.add("a", 11, None)
    s.step()
    s.step()
    s.add("b", 4, 1)
    output = s.scheduler.schedule()
    assert [step.request.request_id for step in output.scheduled] == ["b"]
    assert [r.request_id for r in s.update(output)] == ["a", "b"]
    assert request.status is RequestStatus.FINISHED_LENGTH


def test_who_outgrew_the_pool_on_shared_blocks_and_was_preempted_finishes_too() -> None:
    s = Setup(num_blocks=3)
    s.add("a", range(8), 2)
    b = s.add("b", range(12), None)  # shares two blocks, so that both fit for a while
    assert s.step() == {"a": (0, 8), "b": (8, 4)}
    assert s.step() == {"a": (8, 1)}
    assert (b.status, b.num_tokens) == (RequestStatus.PREEMPTED, 13)
    output = s.scheduler.schedule()
    assert output.scheduled == ()
    assert s.update(output) == [b]
    assert b.status is RequestStatus.FINISHED_LENGTH


@pytest.mark.parametrize(("full_sequence_must_fit", "admitted"), [(True, False), (False, True)])
def test_a_prompt_is_admitted_when_all_of_it_fits_or_its_first_chunk(
    full_sequence_must_fit: bool, admitted: bool
) -> None:
    s = Setup(num_blocks=4, max_num_scheduled_tokens=8, full_sequence_must_fit=full_sequence_must_fit)
    s.add("a", 7, 2)
    s.step()
    s.add("b", 12)
    assert ("b" in s.step()) == admitted


def test_the_watermark_is_for_newcomers_while_others_run() -> None:
    s = Setup(num_blocks=9, manager_options={"watermark": 0.5})
    s.add("a", 24, 2)
    s.add("b", 4)
    assert s.step() == {"a": (0, 24)}
    assert s.step() == {"a": (24, 1)}
    assert s.step() == {"b": (0, 4)}


def test_blocks_that_somebody_else_holds_are_waited_for() -> None:
    s = Setup(num_blocks=4)
    request = s.add("a", 7, 6)
    s.step()
    taken = s.manager.block_pool.allocate(2)
    assert s.step() == {"a": (7, 1)}
    assert s.step() == {}
    assert request.status is RequestStatus.PREEMPTED
    assert s.step() == {}
    s.manager.block_pool.free_blocks(taken)
    assert s.step() == {"a": (8, 1)}  # it hits what it had computed
    while s.scheduler.has_unfinished:
        assert s.step()
    assert request.num_output_tokens == 6


@pytest.mark.parametrize("max_tokens", [5, None])
def test_the_model_length_ends_a_request(max_tokens: int | None) -> None:
    s = Setup(manager_options={"max_model_len": 8})
    request = s.add("a", 6, max_tokens)
    s.step()
    s.step()
    assert (request.status, request.num_tokens) == (RequestStatus.FINISHED_LENGTH, 8)


def test_a_stop_token_ends_a_request() -> None:
    s = Setup()
    request = s.add("a", 6)
    assert s.update(s.scheduler.schedule(), stopped={"a"}) == [request]
    assert (request.status, request.output_token_ids) == (RequestStatus.FINISHED_STOPPED, [7])
    assert s.manager.usage == 0


# -- drafts -----------------------------------------------------------------------------------


def test_drafts_are_verified_and_the_rejected_ones_computed_again() -> None:
    s = Setup(num_lookahead_tokens=3)
    request = s.add("a", 6, 20)
    s.scheduler.update(s.scheduler.schedule(), {"a": [7]}, drafts={"a": [8, 9, 10]})
    output = s.scheduler.schedule()
    (step,) = output.scheduled
    assert (step.start, step.num_tokens, step.draft_token_ids, step.is_prefill) == (6, 4, (8, 9, 10), False)
    s.scheduler.update(output, {"a": [8, 77]})
    assert request.output_token_ids == [7, 8, 77]
    assert request.num_computed_tokens == 8
    (step,) = s.scheduler.schedule().scheduled
    assert (step.start, step.num_tokens, step.draft_token_ids) == (8, 1, ())


def test_slots_are_kept_ahead_for_a_drafter() -> None:
    s = Setup(num_lookahead_tokens=3)
    s.add("a", 6, 20)
    lengths = []
    for _ in range(5):
        output = s.scheduler.schedule()
        lengths.append(len(output.scheduled[0].block_ids[0]))
        s.update(output)
    assert lengths == [3, 3, 3, 3, 4]  # 6, 7, 8, 9, 10 tokens and 3 slots


def test_drafts_share_the_budget_and_end_with_the_request() -> None:
    s = Setup(max_num_scheduled_tokens=6)
    s.add("a", 3, 4)
    s.add("b", 3, 20)
    drafts = {"a": [8, 9, 10, 11], "b": [8, 9, 10, 11]}
    s.scheduler.update(s.scheduler.schedule(), {"a": [7], "b": [7]}, drafts=drafts)
    output = s.scheduler.schedule()  # a has 3 tokens to go: 2 drafts and one more
    assert [step.draft_token_ids for step in output.scheduled] == [(8, 9), (8, 9)]
    (a,) = s.scheduler.update(output, {"a": [8, 9, 7], "b": [7]})
    assert a.output_token_ids == [7, 8, 9, 7]


def test_a_draft_is_forgotten_when_its_request_is_preempted() -> None:
    s = Setup(num_blocks=4)
    s.add("a", 7, 9)
    b = s.add("b", 6, 9)
    s.scheduler.update(s.scheduler.schedule(), {"a": [7], "b": [7]}, drafts={"a": [1, 2], "b": [1]})
    output = s.scheduler.schedule()
    assert output.preempted == (b,)
    s.update(output)
    while b.status is not RequestStatus.RUNNING:
        output = s.scheduler.schedule()
        assert all(step.draft_token_ids == () for step in output.scheduled)
        s.update(output)


@pytest.mark.parametrize("sampled", [{}, {"a": []}, {"a": [1, 2, 3]}])
def test_samples_that_the_step_cannot_give_are_refused_and_nothing_changes(sampled: dict[str, list[int]]) -> None:
    s = Setup()
    request = s.add("a", 6)
    s.add("b", 6)
    s.scheduler.update(s.scheduler.schedule(), {"a": [7], "b": [7]}, drafts={"a": [8]})
    output = s.scheduler.schedule()
    with pytest.raises(InvalidRequestError, match=r"'a' got \d sampled tokens; this step gives 1 to 2"):
        s.scheduler.update(output, {"b": [7]} | sampled)
    with pytest.raises(InvalidRequestError, match="-1"):
        s.scheduler.update(output, {"a": [7], "b": [-1]})
    assert (request.num_computed_tokens, request.output_token_ids) == (6, [7])
    s.scheduler.update(output, {"a": [8, 9], "b": [7]})
    assert request.output_token_ids == [7, 8, 9]


# -- abort ------------------------------------------------------------------------------------


def test_abort_in_every_state() -> None:
    s = Setup(num_blocks=4)
    a, b = s.add("a", 7, 8), s.add("b", 7, 8)
    waiting = s.add("c", 7, 8)
    s.step()
    assert s.scheduler.abort("c") is waiting
    s.step()
    s.step()
    assert b.status is RequestStatus.PREEMPTED
    s.scheduler.abort("b")
    s.scheduler.abort("a")
    assert {r.status for r in (a, b, waiting)} == {RequestStatus.FINISHED_ABORTED}
    assert (s.scheduler.num_running, s.scheduler.num_waiting, s.scheduler.has_unfinished) == (0, 0, False)
    assert s.manager.usage == 0
    with pytest.raises(UnknownRequestError, match="no live request 'a' to abort"):
        s.scheduler.abort("a")


def test_abort_while_the_step_runs() -> None:
    s = Setup()
    s.add("a", 6)
    b = s.add("b", 6)
    output = s.scheduler.schedule()
    s.scheduler.abort("a")
    again = s.add("a", range(5))  # the same id, another request
    s.scheduler.update(output, {"a": [7], "b": [7]})
    assert (again.num_tokens, b.num_tokens) == (5, 7)
    assert s.step() == {"b": (6, 1), "a": (0, 5)}


# -- attention kinds --------------------------------------------------------------------------


def test_mamba_align_steps_end_at_block_boundaries() -> None:
    specs = [FullAttention(block_size=BLOCK), Mamba(block_size=BLOCK, mode="align")]
    s = Setup(specs=specs, max_num_scheduled_tokens=6)
    s.add("a", 11)
    assert [s.step()["a"] for _ in range(4)] == [(0, 4), (4, 4), (8, 3), (11, 1)]


def test_a_mamba_align_step_ends_where_another_request_shares_the_prefix() -> None:
    specs = [FullAttention(block_size=BLOCK), Mamba(block_size=BLOCK, mode="align")]
    s = Setup(specs=specs)
    s.add("a", range(50, 80), 1)
    assert s.step() == {"a": (0, 28)}  # its state is left at 28 only
    assert s.step() == {"a": (28, 2)}
    s.add("b", [*range(50, 62), *range(20)])
    assert [s.step()["b"] for _ in range(3)] == [(0, 12), (12, 16), (28, 4)]


def test_a_state_that_this_step_computes_is_hit_in_the_next() -> None:
    specs = [FullAttention(block_size=BLOCK), Mamba(block_size=BLOCK, mode="align")]
    s = Setup(specs=specs)
    s.add("a", range(50, 59))
    s.add("b", range(50, 59))
    s.add("c", 3)
    assert s.step() == {"a": (0, 8)}
    assert s.step() == {"a": (8, 1), "b": (8, 1), "c": (0, 3)}


def test_encoder_tokens_get_their_blocks() -> None:
    specs = [FullAttention(block_size=BLOCK), CrossAttention(block_size=BLOCK)]
    s = Setup(specs=specs, manager_options={"enable_caching": False})
    request = s.request("a", 3)
    request.num_encoder_tokens = 9
    s.scheduler.add(request)
    output = s.scheduler.schedule()
    assert [len(ids) for ids in output.scheduled[0].block_ids] == [1, 3]
    s.update(output)
    while s.scheduler.has_unfinished:
        s.step()
    assert s.manager.usage == 0


# -- bad input --------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_what_would() -> None:
    s = Setup(num_blocks=5)
    with pytest.raises(RequestTooLargeError) as caught:
        s.add("a", 18, 3)
    assert (caught.value.num_tokens, caught.value.num_tokens_that_fit) == (21, 20)
    with pytest.raises(RequestTooLargeError):
        s.add("a", 21, None)
    s.add("a", 18, 2)
    while s.scheduler.has_unfinished:
        assert s.step()


def test_a_prompt_without_room_for_output_is_refused() -> None:
    s = Setup(manager_options={"max_model_len": 8})
    with pytest.raises(RequestTooLargeError, match=r"may grow to 9 tokens.*at most 8"):
        s.add("a", 8)


def test_a_live_id_and_a_used_request_are_refused() -> None:
    s = Setup()
    request = s.add("a", 4, 1)
    with pytest.raises(DuplicateRequestError, match="'a' is in use by a live request"):
        s.add("a", 4)
    s.step()
    with pytest.raises(InvalidRequestError, match="only a fresh request"):
        s.scheduler.add(request)


def test_schedule_and_update_take_turns() -> None:
    s = Setup()
    s.add("a", 4)
    output = s.scheduler.schedule()
    with pytest.raises(InvalidRequestError, match="update"):
        s.scheduler.schedule()
    s.update(output)
    with pytest.raises(InvalidRequestError, match="last schedule"):
        s.update(output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_running": 0}, r"max_num_running must be an integer of at least 1, got 0"),
        ({"max_num_scheduled_tokens": 0}, "max_num_scheduled_tokens must be an integer of at least 1"),
        ({"max_num_scheduled_tokens": 201}, "is 201, but the manager plans for steps of at most 200"),
        ({"num_lookahead_tokens": -1}, "num_lookahead_tokens must be an integer of at least 0"),
        ({"policy": "lifo"}, "policy must be 'fcfs' or 'priority', got 'lifo'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    make: Callable[[], Setup] = lambda: Setup(**options)  # noqa: E731
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_request_that_is_none_is_refused() -> None:
    s = Setup()
    bad: Any
    for bad in (None, "a", object()):
        with pytest.raises(InvalidRequestError, match=r"takes a kvpager\.Request"):
            s.scheduler.add(bad)
    for bad in (None, [], {}, "a", b"a"):
        with pytest.raises(UnknownRequestError, match="no live request"):
            s.scheduler.abort(bad)


@pytest.mark.parametrize("bad", ["x", -1, 5, None, {}, [-1], [2**40], ["x"], [1.5], [True], [None], [8, 9, -1]])
@pytest.mark.parametrize("name", ["sampled", "drafts"])
def test_what_are_no_tokens_is_refused_and_nothing_is_taken_in(name: str, bad: Any) -> None:
    s = Setup()
    s.add("a", 6, 3)
    s.add("b", 6, 3)
    output = s.scheduler.schedule()
    before = [(r.num_computed_tokens, r.all_token_ids[:]) for r in (step.request for step in output.scheduled)]
    given: dict[str, Any] = {"sampled": {"a": [7], "b": [7]}, "drafts": {"a": [8], "b": [8]}}
    given[name]["b"] = bad
    with pytest.raises(
        InvalidRequestError, match=f"{name} of request 'b': token_ids" if bad else "0 sampled tokens|ids"
    ):
        s.scheduler.update(output, **given)
    after = [(r.num_computed_tokens, r.all_token_ids[:]) for r in (step.request for step in output.scheduled)]
    assert after == before
    given[name]["b"] = [9]
    s.scheduler.update(output, **given)
    assert [step.draft_token_ids for step in s.scheduler.schedule().scheduled] == [
        (8,),
        (9 if name == "drafts" else 8,),
    ]


@pytest.mark.parametrize("name", ["sampled", "drafts", "stopped"])
@pytest.mark.parametrize("unknown", ["nobody", "cut", "waiting", 5, None])
def test_only_requests_that_sample_in_the_step_may_be_named(name: str, unknown: Any) -> None:
    s = Setup(max_num_scheduled_tokens=8, max_num_running=2)
    request = s.add("a", 6)
    s.add("cut", 6)  # two of its tokens are computed: it does not sample
    s.add("waiting", 6)
    output = s.scheduler.schedule()
    given: dict[str, Any] = {"sampled": {"a": [7]}, "drafts": {"a": [8]}, "stopped": set()}
    wrong = given[name] | ({unknown} if name == "stopped" else {unknown: [1]})
    with pytest.raises(InvalidRequestError, match=f"{name} names {unknown!r}, but"):
        s.scheduler.update(output, **given | {name: wrong})
    assert (request.num_computed_tokens, request.num_output_tokens) == (0, 0)
    s.scheduler.update(output, **given)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("sampled", bad) for bad in (None, 5, [], "a", {("a", 7)})),
        *(("drafts", bad) for bad in (5, [], "a", {"a"})),
        *(("stopped", bad) for bad in (None, 5, "a", [[]], [{}], object())),
    ],
)
def test_what_is_no_collection_of_answers_is_refused(name: str, bad: Any) -> None:
    s = Setup()
    s.add("a", 6)
    output = s.scheduler.schedule()
    with pytest.raises(InvalidRequestError, match=f"{name} must"):
        s.scheduler.update(output, **{"sampled": {"a": [7]}, name: bad})
    s.update(output)


def test_who_was_aborted_since_may_still_be_named() -> None:
    s = Setup()
    s.add("a", 6)
    b = s.add("b", 6)
    output = s.scheduler.schedule()
    s.scheduler.abort("a")
    answers: dict[str, list[Any]] = {"a": ["no token"], "b": [7]}
    assert s.scheduler.update(output, answers, {"a": [-1]}, {"a", "b"}) == [b]
    assert b.output_token_ids == [7]


class Failing(Request):
    """A request that cannot say how many of its tokens are computed while ``fails``."""

    fails = False
    computed = 0

    @property
    def num_computed_tokens(self) -> int:
        if self.fails:
            raise RuntimeError("not now")
        return self.computed

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self.computed = value


def test_an_abort_and_a_preemption_that_fail_can_be_done_again() -> None:
    s = Setup(num_blocks=4)
    failing = Failing("b", range(7), block_hasher=s.hasher, max_tokens=8)
    s.add("a", 7, 8)
    s.scheduler.add(failing)
    s.step()
    s.step()
    failing.fails = True
    for call in (s.scheduler.schedule, lambda: s.scheduler.abort("b")):
        with pytest.raises(RuntimeError):
            call()
        assert (s.scheduler.num_running, s.scheduler.num_waiting, failing.status) == (2, 0, RequestStatus.RUNNING)
        check_manager(s.manager)
    failing.fails = False
    output = s.scheduler.schedule()
    assert output.preempted == (failing,)
    s.update(output)
    assert s.scheduler.abort("b") is failing


# -- requests without hashes ------------------------------------------------------------------


def test_a_request_without_a_hasher_warns_once_where_caching_is_on() -> None:
    s = Setup()
    with pytest.warns(UserWarning, match="request 'a' has no block hashes") as caught:
        s.scheduler.add(Request("a", [1]))
        s.scheduler.add(Request("b", [1]))
    assert len(caught) == 1 and caught[0].filename == __file__


def test_who_brings_hashes_and_who_needs_none_does_not_warn() -> None:
    s = Setup()
    s.add("a", 3)
    s.scheduler.add(Request.from_hashes("b", 3, []))
    Setup(manager_options={"enable_caching": False}).scheduler.add(Request("a", [1]))
