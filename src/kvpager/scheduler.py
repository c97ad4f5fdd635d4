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

import warnings
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from .counts import as_count
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


class _Answers(NamedTuple):
    """What a step gave, read and checked: nobody can change it any more."""

    sampled: dict[str, list[int]]
    drafts: dict[str, list[int]]
    stopped: frozenset[str]


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
        budget = manager.max_num_batched_tokens if max_num_scheduled_tokens is None else max_num_scheduled_tokens
        self.manager = manager
        self.max_num_scheduled_tokens = as_count(budget, "Scheduler: max_num_scheduled_tokens", 1)
        self.max_num_running = as_count(max_num_running, "Scheduler: max_num_running", 1)
        self.policy = policy
        self.num_lookahead_tokens = as_count(num_lookahead_tokens, "Scheduler: num_lookahead_tokens")
        self.enable_chunked_prefill = enable_chunked_prefill
        self.full_sequence_must_fit = full_sequence_must_fit
        self._check_options()
        # Every live request is in one of the two queues, which are sorted by rank.
        self._live: dict[str, _Live] = {}
        self._running: list[_Live] = []
        self._waiting: list[_Live] = []
        self._num_added = 0
        self._has_warned = False
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
        ``RequestTooLargeError`` (it could never fit). Warns once of requests without block hashes where caching is
        on. O(log waiting + groups).
        """
        if not isinstance(request, Request):
            raise InvalidRequestError(f"Scheduler.add takes a kvpager.Request, got {request!r}")
        if request.request_id in self._live:
            raise DuplicateRequestError(f"request id {request.request_id!r} is in use by a live request; take another")
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise InvalidRequestError(f"only a fresh request can be added, got {request!r}")
        max_num_tokens = self._check_size(request)
        important = (request.priority, request.arrival_time) if self.policy == "priority" else (0, 0.0)
        live = _Live(request, (*important, self._num_added), max_num_tokens)
        insort(self._waiting, live, key=_rank)
        self._live[request.request_id] = live
        self._num_added += 1
        if self.manager.enable_caching and not request.is_hashed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"prefix caching is on, but request {request.request_id!r} has no block hashes, so it is never cached "
                f"and never hits; make requests with block_hasher=BlockHasher.for_config(config)",
                stacklevel=2,
            )

    def abort(self, request_id: str) -> Request:
        """End a request, whatever its state; it is not in what `update` returns.

        A step that has been scheduled must still be run: other requests may have hit blocks that it
        fills. Raises ``UnknownRequestError``. O(log requests + blocks).
        """
        live = self._live.get(request_id) if isinstance(request_id, str) else None
        if live is None:
            raise UnknownRequestError(f"no live request {request_id!r} to abort; it has finished or was never added")
        queue = self._running if live.request.status is _RUNNING else self._waiting
        request = self._finish(live, RequestStatus.FINISHED_ABORTED)
        del queue[bisect_left(queue, live.rank, key=_rank)]
        return request

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
        (a stop token). All three name only requests that sample in this step. Those aborted since `schedule` are passed
        over. Raises ``InvalidRequestError`` for another step's output, for other requests and for tokens that are
        missing, too many or no token ids, and changes nothing then.
        """
        if output is not self._step or self._step is None:
            raise InvalidRequestError("update() needs the output of the last schedule(), once")
        answers = _read_answers(output, sampled, {} if drafts is None else drafts, stopped)
        self._step = None
        finished, self._outgrown = self._outgrown, []
        for step in output.scheduled:
            request = step.request
            if request.status is not _RUNNING:  # it was aborted
                continue
            request.num_computed_tokens = step.start + step.num_tokens
            if step.samples:
                status = self._take_in(step, answers)
                if status is not None:
                    finished.append(self._finish(self._live[request.request_id], status))
        if finished:
            self._running = [live for live in self._running if live.request.status is _RUNNING]
        return finished

    def _take_in(self, step: ScheduledRequest, answers: _Answers) -> RequestStatus | None:
        """Take in what a step sampled; gives how the request ends, if it does."""
        request = step.request
        request_id = request.request_id
        tokens = answers.sampled[request_id]
        request.num_computed_tokens -= len(step.draft_token_ids) + 1 - len(tokens)  # rejected drafts
        request.append_output_token_ids(tokens if len(tokens) > 1 else tokens[0])  # one is faster
        if request_id in answers.stopped:
            return RequestStatus.FINISHED_STOPPED
        live = self._live[request_id]
        if request.num_tokens >= live.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH
        drafts = answers.drafts.get(request_id)
        live.drafts = tuple(drafts[: live.max_num_tokens - 1 - request.num_tokens]) if drafts else ()
        return None

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
            victim = self._running[-1]
            self.manager.free(victim.request)
            del self._running[-1]
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

    def _check_options(self) -> None:
        manager, budget = self.manager, self.max_num_scheduled_tokens
        if budget > manager.max_num_batched_tokens:
            raise ConfigError(
                f"Scheduler: max_num_scheduled_tokens is {budget}, but the manager plans for steps of at most "
                f"{manager.max_num_batched_tokens} tokens; give it a larger max_num_batched_tokens"
            )
        if not self.enable_chunked_prefill and budget < manager.max_model_len:
            raise ConfigError(
                f"without chunked prefill a step must take the longest request: max_num_scheduled_tokens is "
                f"{budget}, max_model_len {manager.max_model_len}; raise one or lower the other"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"Scheduler: policy must be 'fcfs' or 'priority', got {self.policy!r}")


def _read_answers(
    output: SchedulerOutput,
    sampled: Mapping[str, Sequence[int]],
    drafts: Mapping[str, Sequence[int]],
    stopped: Collection[str],
) -> _Answers:
    """The answers for the step's requests that sample and have not been aborted. O(answers)."""
    for name, given in (("sampled", sampled), ("drafts", drafts)):
        if not isinstance(given, Mapping):
            raise InvalidRequestError(f"{name} must be a mapping from request ids to token ids, got {given!r}")
    sampling = {step.request.request_id: step for step in output.scheduled if step.samples}
    _check_ids("sampled", sampled, sampling)
    proposed = _check_ids("drafts", drafts, sampling)
    stops = _check_ids("stopped", stopped, sampling)
    live = {request_id: step for request_id, step in sampling.items() if step.request.status is _RUNNING}
    return _Answers(
        {request_id: _read_sampled(request_id, step, sampled) for request_id, step in live.items()},
        {request_id: _read_tokens("drafts", request_id, drafts[request_id]) for request_id in proposed & live.keys()},
        stops,
    )


def _check_ids(name: str, given: Collection[str], expected: Mapping[str, object]) -> frozenset[str]:
    """The ids, all of them expected. O(ids)."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InvalidRequestError(f"{name} must be a collection of request ids, got {given!r}")
    try:
        ids = frozenset(given)
    except TypeError as error:
        raise InvalidRequestError(f"{name} must have request ids, which are strings: {error}") from None
    unknown = ids - expected.keys()
    if unknown:
        raise InvalidRequestError(
            f"{name} names {', '.join(map(repr, unknown))}, but the step samples nothing of that; "
            f"name only requests of output.scheduled that have samples=True"
        )
    return ids


def _read_sampled(request_id: str, step: ScheduledRequest, sampled: Mapping[str, Sequence[int]]) -> list[int]:
    tokens = _read_tokens("sampled", request_id, sampled.get(request_id, ()))
    most = len(step.draft_token_ids) + 1
    if not 1 <= len(tokens) <= most:
        raise InvalidRequestError(
            f"request {request_id!r} got {len(tokens)} sampled tokens; this step gives 1 to {most}: "
            f"the accepted drafts and one more"
        )
    return tokens


def _read_tokens(name: str, request_id: str, token_ids: Sequence[int]) -> list[int]:
    try:
        return token_list(token_ids)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name} of request {request_id!r}: {error}") from None
