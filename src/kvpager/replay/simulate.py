"""The replay itself: scheduler and manager on a simulated clock, without a model."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from ..check import check_manager
from ..errors import InvariantError, RequestTooLargeError
from ..events import KVCacheEvent
from ..manager import KVCacheManager
from ..request import Request
from ..scheduler import Scheduler, SchedulerOutput
from .arrivals import Arrival, Arrivals, ClosedLoop, TraceClock
from .content import PromptMaker
from .options import ReplayOptions
from .records import Session
from .report import QueueTime, ReplayOutcome, ReplayReport
from .stopwatch import StopWatch
from .timeline import Sample, Timeline

__all__ = ["EventSink", "Progress", "replay"]

EventSink = Callable[[Sequence[KVCacheEvent]], None]
Progress = Callable[[int], None]

_STEPS_PER_PROGRESS = 64
_MOST_IDLE_STEPS = 1000
_SAMPLED = (0,)  # what a request generates is never looked at: nobody knows it


def replay(
    sessions: Iterable[Session],
    options: ReplayOptions,
    *,
    progress: Progress | None = None,
    event_sink: EventSink | None = None,
) -> ReplayOutcome:
    """Drive a scheduler and a manager through ``sessions`` and tell what came of it.

    Streams: holds the prompts that run and those next in line, not those that have arrived behind them.
    ``progress`` is called now and then with the number of requests that are over, ``event_sink`` with
    the events of each step. Equal input gives equal results but for the measured times. Raises
    ``ConfigError``, ``TraceError``, and ``InvariantError`` if a check fails.
    """
    run = _Replay(sessions, options, progress, event_sink)
    run.run()
    return run.outcome()


class _Replay:
    def __init__(
        self,
        sessions: Iterable[Session],
        options: ReplayOptions,
        progress: Progress | None,
        event_sink: EventSink | None,
    ) -> None:
        self._started = time.perf_counter()
        self._options = options
        self._progress = progress
        self._event_sink = event_sink
        self._manager = _manager(options, enable_events=event_sink is not None)
        self._watch = StopWatch(self._manager)
        self._scheduler = _scheduler(options, self._watch)
        self._arrivals = _arrivals(options, sessions)
        self._prompts = PromptMaker(options.config.hash_size, expand=options.expand_ids)
        self._backlog: deque[Arrival] = deque()
        self._slots: dict[str, int] = {}
        self._silent: set[str] = set()  # who generates nothing: of its one sample only the end is wanted
        self._tally = _Tally(options.config.alignment)
        self._timeline = Timeline()
        self._clock = 0.0
        self._num_idle_steps = 0
        self._num_checks = 0

    def run(self) -> None:
        """Step until nobody is left, letting time pass while nobody is there."""
        while True:
            self._admit()
            if self._scheduler.has_unfinished:
                self._step()
            elif (next_time := self._arrivals.next_time) is not None:
                self._pause_until(next_time)
            else:
                break
        self._report_progress()

    def _pause_until(self, time: float) -> None:
        """Nobody is there; the timeline is told where the pause begins."""
        self._tally.last_usage = 0.0
        if self._timeline.wants(self._tally.steps):
            self._timeline.add(self._sample())
        self._clock = max(self._clock, time)

    def _admit(self) -> None:
        """Hand arrivals to the scheduler, first come first served, as many as it may look at in a step."""
        while True:
            self._backlog.extend(self._arrivals.poll(self._clock))
            if not self._backlog or self._scheduler.num_waiting >= self._options.max_num_running:
                return
            self._add(self._backlog.popleft())

    def _add(self, arrival: Arrival) -> None:
        """Prompts of an impossible length are not even made: they could fill the memory."""
        record = arrival.request
        request_id = str(self._tally.requests)
        if record.num_prompt_tokens >= self._options.max_model_len:
            self._tally.arrived(record.num_prompt_tokens, 0)
            self._refuse(arrival)
            return
        prompt = self._prompts.make(record)
        self._tally.arrived(record.num_prompt_tokens, prompt.num_known_tokens)
        request = Request.from_hashes(
            request_id,
            record.num_prompt_tokens,
            prompt.block_hashes,
            max_tokens=max(1, record.num_output_tokens),
            arrival_time=arrival.time,
        )
        request.num_encoder_tokens = self._options.num_encoder_tokens
        try:
            self._scheduler.add(request)
        except RequestTooLargeError:
            self._refuse(arrival)
        else:
            self._slots[request_id] = arrival.slot
            if not record.num_output_tokens:
                self._silent.add(request_id)

    def _refuse(self, arrival: Arrival) -> None:
        self._tally.refused += 1
        self._arrivals.finish(arrival.slot)

    def _step(self) -> None:
        output = self._scheduler.schedule()
        usage = self._manager.usage
        sampled, seconds = self._account(output)
        self._clock += seconds
        num_generated = len(sampled) - len(self._silent & sampled.keys())
        self._tally.step(seconds, usage, num_generated, len(output.preempted))
        for request in self._scheduler.update(output, sampled):
            self._tally.finished += 1
            self._silent.discard(request.request_id)
            self._arrivals.finish(self._slots.pop(request.request_id))
        self._watch_over(output)

    def _account(self, output: SchedulerOutput) -> tuple[dict[str, Sequence[int]], float]:
        """What the step samples, and how long it takes."""
        num_prefill_tokens = num_decoding = 0
        sampled: dict[str, Sequence[int]] = {}
        for step in output.scheduled:
            if step.is_prefill:
                num_prefill_tokens += step.num_tokens
            else:
                num_decoding += 1
            if step.samples:
                sampled[step.request.request_id] = _SAMPLED
            if step.num_cached_tokens is not None and not step.request.num_preemptions:
                queue_seconds = self._clock - step.request.arrival_time
                self._tally.admitted(step.request.num_prompt_tokens, step.num_cached_tokens, queue_seconds)
        return sampled, self._options.step_time.seconds(num_prefill_tokens, num_decoding)

    def _watch_over(self, output: SchedulerOutput) -> None:
        """What is done beside the step: events, checks, samples, progress."""
        tally, steps = self._tally, self._tally.steps
        if self._event_sink is not None:
            self._event_sink(self._watch.take_events())
        if self._options.check_every and steps % self._options.check_every == 0:
            check_manager(self._manager)
            self._num_checks += 1
        if self._timeline.wants(steps):
            self._timeline.add(self._sample())
        if steps % _STEPS_PER_PROGRESS == 0:
            self._report_progress()
        self._num_idle_steps = 0 if output.scheduled else self._num_idle_steps + 1
        if self._num_idle_steps > _MOST_IDLE_STEPS:
            raise InvariantError(
                f"{self._num_idle_steps} steps in a row scheduled nothing, but {self._scheduler.num_waiting} requests "
                f"wait and {self._scheduler.num_running} run (after {tally.finished} finished)"
            )

    def _sample(self) -> Sample:
        num_waiting = self._scheduler.num_waiting + len(self._backlog)
        usage, hit_rate = self._tally.last_usage, self._tally.hit_rate_so_far
        return Sample(self._clock, usage, self._scheduler.num_running, num_waiting, hit_rate)

    def _report_progress(self) -> None:
        if self._progress is not None:
            self._progress(self._tally.finished + self._tally.refused)

    def outcome(self) -> ReplayOutcome:
        tally = self._tally
        report = ReplayReport(
            requests=tally.requests,
            prompt_tokens=tally.prompt_tokens,
            hit_tokens=tally.hit_tokens,
            hit_rate=_ratio(tally.hit_tokens, tally.prompt_tokens),
            ideal_hit_rate=_ratio(tally.ideal_tokens, tally.prompt_tokens),
            generated_tokens=tally.generated_tokens,
            evicted_blocks=self._manager.block_pool.num_evictions,
            preemptions=tally.preemptions,
            refused=tally.refused,
            peak_usage=tally.peak_usage,
            mean_usage=_ratio(tally.usage_seconds, self._clock),
            steps=tally.steps,
            simulated_seconds=self._clock,
            manager_cpu_seconds=self._watch.cpu_seconds,
            wall_seconds=time.perf_counter() - self._started,
            peak_rss_bytes=_peak_rss_bytes(),
        )
        num_admitted = tally.num_admitted
        queue_time = QueueTime(mean=_ratio(tally.queue_seconds, num_admitted), longest=tally.longest_queue_seconds)
        return ReplayOutcome(report=report, queue_time=queue_time, num_checks=self._num_checks, timeline=self._timeline)


def _manager(options: ReplayOptions, *, enable_events: bool) -> KVCacheManager:
    return KVCacheManager(
        options.config,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_kv_cache_events=enable_events,
        watermark=options.watermark,
        eviction_order=options.eviction_order,
    )


def _scheduler(options: ReplayOptions, manager: StopWatch) -> Scheduler:
    return Scheduler(
        cast(KVCacheManager, manager),
        max_num_running=options.max_num_running,
        num_lookahead_tokens=options.num_lookahead_tokens,
        enable_chunked_prefill=options.enable_chunked_prefill,
        full_sequence_must_fit=options.full_sequence_must_fit,
    )


def _arrivals(options: ReplayOptions, sessions: Iterable[Session]) -> Arrivals:
    if options.num_in_flight is None:
        return TraceClock(sessions, options.limit)
    return ClosedLoop(sessions, options.num_in_flight, options.limit)


class _Tally:
    """Counts as they come in."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self.requests = self.prompt_tokens = self.ideal_tokens = self.refused = self.finished = 0
        self.num_admitted = self.hit_tokens = self.generated_tokens = self.preemptions = self.steps = 0
        self.queue_seconds = self.longest_queue_seconds = 0.0
        self.peak_usage = self.last_usage = self.usage_seconds = 0.0
        self._queried_tokens = 0

    def arrived(self, num_tokens: int, num_known_tokens: int) -> None:
        """A prompt with ``num_known_tokens`` leading tokens that some earlier prompt had."""
        self.requests += 1
        self.prompt_tokens += num_tokens
        self.ideal_tokens += min(num_known_tokens, num_tokens - 1) // self._alignment * self._alignment

    def admitted(self, num_tokens: int, num_hit_tokens: int, queue_seconds: float) -> None:
        """A request starts to run for the first time."""
        self.num_admitted += 1
        self._queried_tokens += num_tokens
        self.hit_tokens += num_hit_tokens
        self.queue_seconds += queue_seconds
        self.longest_queue_seconds = max(self.longest_queue_seconds, queue_seconds)

    def step(self, seconds: float, usage: float, num_generated: int, num_preempted: int) -> None:
        """A step of ``seconds`` during which ``usage`` of the pool was held."""
        self.steps += 1
        self.last_usage = usage
        self.peak_usage = max(self.peak_usage, usage)
        self.usage_seconds += usage * seconds
        self.generated_tokens += num_generated
        self.preemptions += num_preempted

    @property
    def hit_rate_so_far(self) -> float:
        """Of the requests admitted so far."""
        return _ratio(self.hit_tokens, self._queried_tokens)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _peak_rss_bytes() -> int:
    """The most memory this process has had so far; macOS counts in bytes, others in KiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
