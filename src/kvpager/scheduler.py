"""Continuous batching on top of the manager: which requests run next, and on how many tokens.

One order decides everything: by arrival (``fcfs``), or by priority and then arrival. ``running``
and ``waiting`` are both kept in it::

    running   most important ────► least important    each step goes from left to right and gives out its token budget;
                                     │   ▲            where blocks are missing, the right end is preempted
                            preempted│   │admitted
                                     ▼   │
    waiting   most important ────► least important    the left end is admitted with the rest of the budget, if it fits

Two things follow. The first of ``running`` is never preempted for another, so somebody always
finishes. And whoever is preempted has not been scheduled in that step yet, so the hash index never
names a block whose tokens no step computes.

The scheduler knows nothing of models: `schedule` says what to run, `update` is told what came out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from .errors import ConfigError, DuplicateRequestError, InvalidRequestError, RequestTooLargeError, UnknownRequestError
from .hashing import token_list
from .manager import KVCacheManager
from .request import Request, RequestStatus

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerOutput", "SchedulingPolicy"]

SchedulingPolicy = Literal["fcfs", "priority"]


class ScheduledRequest(NamedTuple):
    """What one request does in a step: compute the tokens at ``[start, start + num_tokens)``.

    The last ``len(draft_token_ids)`` of them are drafts to verify, the rest are the request's own.
    """

    request: Request
    start: int
    num_tokens: int
    draft_token_ids: tuple[int, ...]
    num_cached_tokens: int | None
    """Tokens that hit, in the step that admits the request (again); None in every other step."""
    is_prefill: bool
    """Whether tokens are computed that are known already: the prompt's, or those lost to preemption."""
    samples: bool
    """Whether the step reaches the request's last token, so that the next one is sampled."""
    manager: KVCacheManager

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """The request's block table, a list a group, until the step's `Scheduler.update`. O(blocks)."""
        return self.manager.get_block_ids(self.request.request_id)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what to run, most important first within running and then within admitted."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    num_scheduled_tokens: int


@dataclass(slots=True, eq=False)
class _Live:
    """What the scheduler keeps of a request that has not finished."""

    request: Request
    rank: tuple[int, float, int]
    max_num_tokens: int
    junction: int = 0
    drafts: tuple[int, ...] = ()


_RUNNING = RequestStatus.RUNNING
_rank = attrgetter("rank")


class Scheduler:
    """Runs requests over a `KVCacheManager`, at most ``max_num_running`` at a time.

    ``max_num_scheduled_tokens`` (default: the manager's ``max_num_batched_tokens``) is the token
    budget of a step. With ``policy="priority"`` the lower ``request.priority`` goes first, ties by
    arrival time; ``fcfs`` goes by the order of `add`. ``num_lookahead_tokens`` slots are kept ahead
    for a drafter. ``enable_chunked_prefill=False`` admits a prompt only when the rest of the budget
    takes all of it. ``full_sequence_must_fit`` admits a request only when all its tokens so far fit,
    not just the first chunk. Raises ``ConfigError``.

    `schedule` and `update` take turns; `add` and `abort` may come at any time. A step costs
    O(running + admitted) calls of the manager.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_scheduled_tokens: int | None = None,
        max_num_running: int = 256,
        policy: SchedulingPolicy = "fcfs",
        num_lookahead_tokens: int = 0,
        enable_chunked_prefill: bool = True,
        full_sequence_must_fit: bool = True,
    ) -> None:
        if max_num_scheduled_tokens is None:
            max_num_scheduled_tokens = manager.max_num_batched_tokens
        _check_options(manager, max_num_scheduled_tokens, max_num_running, policy, num_lookahead_tokens)
        if not enable_chunked_prefill and max_num_scheduled_tokens < manager.max_model_len:
            raise ConfigError(
                f"without chunked prefill a step must take the longest request: max_num_scheduled_tokens is "
                f"{max_num_scheduled_tokens}, max_model_len {manager.max_model_len}; raise one or lower the other"
            )
        self.manager = manager
        self.max_num_scheduled_tokens = max_num_scheduled_tokens
        self.max_num_running = max_num_running
        self.policy = policy
        self.num_lookahead_tokens = num_lookahead_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.full_sequence_must_fit = full_sequence_must_fit
        # Every live request is in one of the two queues, which are sorted by rank.
        self._live: dict[str, _Live] = {}
        self._running: list[_Live] = []
        self._waiting: list[_Live] = []
        self._num_added = 0
        self._outgrown: list[Request] = []
        self._step: SchedulerOutput | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs or waits. O(1)."""
        return bool(self._live)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks. O(1)."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted, preempted ones included. O(1)."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises ``DuplicateRequestError`` (its id is live), ``InvalidRequestError`` (it has run already) or
        ``RequestTooLargeError`` (it could never fit). O(log waiting + groups).
        """
        if request.request_id in self._live:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use by a live request; take another")
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise InvalidRequestError(f"only a fresh request can be added, got {request!r}")
        max_num_tokens = self._check_size(request)
        important = (request.priority, request.arrival_time) if self.policy == "priority" else (0, 0.0)
        live = _Live(request, (*important, self._num_added), max_num_tokens)
        self._num_added += 1
        self._live[request.request_id] = live
        insort(self._waiting, live, key=_rank)

    def abort(self, request_id: str) -> Request:
        """End a request, whatever its state; it is not in what `update` returns.

        A step that has been scheduled must still be run: other requests may have hit blocks that it
        fills. Raises ``UnknownRequestError``. O(log requests + blocks).
        """
        live = self._live.get(request_id)
        if live is None:
            raise UnknownRequestError(f"no live request {request_id!r} to abort; it has finished or was never added")
        queue = self._running if live.request.status is _RUNNING else self._waiting
        del queue[bisect_left(queue, live.rank, key=_rank)]
        return self._finish(live, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step: first who runs, then who waits. Raises ``InvalidRequestError`` out of turn."""
        if self._step is not None:
            raise InvalidRequestError("schedule() was called twice; tell update() first what the last step gave")
        self.manager.new_step_starts()
        scheduled: list[ScheduledRequest] = []
        preempted: list[Request] = []
        budget = self._schedule_running(scheduled, preempted)
        if not preempted:  # blocks are short: whoever came in now would be the next to be preempted
            budget = self._admit_waiting(scheduled, budget)
        self._step = SchedulerOutput(tuple(scheduled), tuple(preempted), self.max_num_scheduled_tokens - budget)
        return self._step

    def update(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, Sequence[int]],
        drafts: Mapping[str, Sequence[int]] | None = None,
        stopped: Collection[str] = (),
    ) -> list[Request]:
        """Take in what a step gave; returns the requests that finished with it.

        ``sampled`` has for every request that samples the drafts that were accepted and one token
        more; ``drafts`` are proposals for the next step; ``stopped`` names requests that end here
        (a stop token). Requests aborted since `schedule` are passed over. Raises ``InvalidRequestError``
        for another step's output and for tokens that are missing, too many or no token ids, and changes
        nothing then.
        """
        if output is not self._step:
            raise InvalidRequestError("update() needs the output of the last schedule(), once")
        steps = [step for step in output.scheduled if step.request.status is _RUNNING]  # the others were aborted
        for step in steps:
            if step.samples:
                _check_sampled(step, sampled)
        self._step = None
        finished, self._outgrown = self._outgrown, []
        for step in steps:
            request = step.request
            request.num_computed_tokens = step.start + step.num_tokens
            if step.samples:
                tokens = sampled[request.request_id]
                request.num_computed_tokens -= len(step.draft_token_ids) + 1 - len(tokens)  # rejected drafts
                request.append_output_token_ids(tokens if len(tokens) > 1 else tokens[0])  # one is faster
                live = self._live[request.request_id]
                if request.request_id in stopped:
                    finished.append(self._finish(live, RequestStatus.FINISHED_STOPPED))
                elif request.num_tokens >= live.max_num_tokens:
                    finished.append(self._finish(live, RequestStatus.FINISHED_LENGTH))
                else:
                    proposed = drafts.get(request.request_id, ()) if drafts else ()
                    live.drafts = tuple(proposed[: live.max_num_tokens - 1 - request.num_tokens])
        if finished:
            self._running = [live for live in self._running if live.request.status is _RUNNING]
        return finished

    # -- who runs -----------------------------------------------------------------------------

    def _schedule_running(self, scheduled: list[ScheduledRequest], preempted: list[Request]) -> int:
        """Give every running request its next tokens; returns what is left of the budget."""
        budget = self.max_num_scheduled_tokens
        for live in self._running:  # preempting shortens the list, from the end
            if not budget:
                break
            start = live.request.num_computed_tokens
            num_new = self._num_new_tokens(live, start, budget)
            if self._make_room(live, num_new, preempted):
                scheduled.append(self._scheduled(live, start, num_new, None))
                budget -= num_new
        return budget

    def _make_room(self, live: _Live, num_new: int, preempted: list[Request]) -> bool:
        """Allocate a running request's slots, if need be at the cost of the least important ones."""
        allocate, lookahead = self.manager.allocate_slots, self.num_lookahead_tokens
        while allocate(live.request, num_new, num_lookahead_tokens=lookahead) is None:
            victim = self._running.pop()
            self.manager.free(victim.request)
            if self._pool_is_empty():  # it had the pool to itself and needs more than that
                self._outgrown.append(self._finish(victim, RequestStatus.FINISHED_LENGTH))
                return False
            self._preempt(victim)
            preempted.append(victim.request)
            if victim is live:
                return False
        return True

    def _preempt(self, live: _Live) -> None:
        request = live.request
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        live.drafts = ()
        insort(self._waiting, live, key=_rank)

    # -- who waits ----------------------------------------------------------------------------

    def _admit_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Admit requests in order until one does not fit; returns what is left of the budget."""
        while self._waiting and budget and len(self._running) < self.max_num_running:
            live = self._waiting[0]
            step = self._try_to_admit(live, budget)
            if step is not None:
                del self._waiting[0]
                insort(self._running, live, key=_rank)
                scheduled.append(step)
                budget -= step.num_tokens
            elif self._pool_is_empty():  # it outgrew the pool before it was preempted
                del self._waiting[0]
                self._outgrown.append(self._finish(live, RequestStatus.FINISHED_LENGTH))
            else:
                break
        return budget

    def _try_to_admit(self, live: _Live, budget: int) -> ScheduledRequest | None:
        request, manager = live.request, self.manager
        hit, num_cached = manager.get_computed_blocks(request)
        if not self.enable_chunked_prefill and request.num_tokens - num_cached > budget:
            return None
        live.junction = hit.junction
        num_new = self._num_new_tokens(live, num_cached, budget)
        new = manager.allocate_slots(
            request,
            num_new,
            num_cached,
            hit,
            num_lookahead_tokens=self.num_lookahead_tokens,
            num_encoder_tokens=request.num_encoder_tokens,
            full_sequence_must_fit=self.full_sequence_must_fit,
            has_scheduled_reqs=bool(self._running),
        )
        if new is None:
            return None
        request.num_computed_tokens = num_cached
        request.status = _RUNNING
        return self._scheduled(live, num_cached, num_new, num_cached)

    # -- both ---------------------------------------------------------------------------------

    def _num_new_tokens(self, live: _Live, start: int, budget: int) -> int:
        """How many tokens a request with ``start`` computed gets of the budget: at least one."""
        num_tokens = live.request.num_tokens
        num_new = min(num_tokens + len(live.drafts) - start, budget)
        if start + 1 < num_tokens:  # a prefill
            num_new = self.manager.limit_prefill_step(live.request, start, num_new, live.junction)
        return num_new

    def _scheduled(self, live: _Live, start: int, num_new: int, num_cached: int | None) -> ScheduledRequest:
        request = live.request
        num_drafts = start + num_new - request.num_tokens
        drafts = live.drafts[:num_drafts] if num_drafts > 0 else ()
        is_prefill = start < request.num_prompt_tokens or start + 1 < request.num_tokens
        return ScheduledRequest(request, start, num_new, drafts, num_cached, is_prefill, num_drafts >= 0, self.manager)

    def _finish(self, live: _Live, status: RequestStatus) -> Request:
        """Give a request's blocks back and forget it; the caller takes it out of its queue."""
        self.manager.free(live.request)
        live.request.status = status
        del self._live[live.request.request_id]
        return live.request

    def _pool_is_empty(self) -> bool:
        return not self._running and self.manager.usage == 0

    def _check_size(self, request: Request) -> int:
        """The tokens that the request may grow to; raises when they could never fit."""
        max_num_tokens = self.manager.max_model_len
        if request.num_prompt_tokens >= max_num_tokens:  # no room for a single token of output
            raise RequestTooLargeError(request.request_id, request.num_prompt_tokens + 1, max_num_tokens)
        if request.max_tokens is not None:
            max_num_tokens = min(max_num_tokens, request.num_prompt_tokens + request.max_tokens)
        beside = (self.num_lookahead_tokens, request.num_encoder_tokens)
        if not self.manager.fits_alone(request, *beside):
            raise RequestTooLargeError(request.request_id, max_num_tokens, self.manager.longest_that_fits(*beside))
        return max_num_tokens


def _check_options(manager: KVCacheManager, budget: int, max_num_running: int, policy: str, lookahead: int) -> None:
    for name, value, lowest in (
        ("max_num_scheduled_tokens", budget, 1),
        ("max_num_running", max_num_running, 1),
        ("num_lookahead_tokens", lookahead, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ConfigError(f"Scheduler: {name} must be an integer of at least {lowest}, got {value!r}")
    if budget > manager.max_num_batched_tokens:
        raise ConfigError(
            f"Scheduler: max_num_scheduled_tokens is {budget}, but the manager plans for steps of at most "
            f"{manager.max_num_batched_tokens} tokens; give it a larger max_num_batched_tokens"
        )
    if policy not in ("fcfs", "priority"):
        raise ConfigError(f"Scheduler: policy must be 'fcfs' or 'priority', got {policy!r}")


def _check_sampled(step: ScheduledRequest, sampled: Mapping[str, Sequence[int]]) -> None:
    tokens, most = sampled.get(step.request.request_id, ()), len(step.draft_token_ids) + 1
    if not 1 <= len(tokens) <= most:
        raise InvalidRequestError(
            f"request {step.request.request_id!r} got {len(tokens)} sampled tokens; this step gives 1 to {most}: "
            f"the accepted drafts and one more"
        )
    token_list(tokens)  # raises for what is not a token id
