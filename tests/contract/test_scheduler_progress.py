"""The scheduler always makes progress, and what it runs reads what it should.

Hypothesis draws a cache (any attention kinds, a tiny pool), a scheduler and requests that arrive,
are aborted or stop. A toy engine runs the steps: it "computes" for every token the prefix that ends
there, keeps that in the slots of the block tables and looks, before each token, whether the tokens it
attends to are there: a false hit, a block given away too early or a rejected draft left in the
cache is seen at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvpager.attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)
from kvpager.check import check_manager
from kvpager.config import CacheConfig
from kvpager.errors import RequestTooLargeError
from kvpager.hashing import BlockHasher
from kvpager.manager import KVCacheManager
from kvpager.request import Request, RequestStatus
from kvpager.scheduler import ScheduledRequest, Scheduler, SchedulerOutput

pytestmark = pytest.mark.filterwarnings("ignore:prefix caching is on but can never hit")

MAX_MODEL_LEN = 40
NUM_TOKEN_IDS = 5

FULL = FullAttention(block_size=4)
WINDOW = SlidingWindow(block_size=4, window=6)
CHUNK = ChunkedLocalAttention(block_size=4, chunk_size=8)
ALIGN = Mamba(block_size=4, mode="align")
KINDS: dict[str, list[AttentionSpec]] = {
    "full": [FULL],
    "MLA": [MLAAttention(block_size=2)],
    "window": [WINDOW],
    "chunked": [CHUNK],
    "mamba none": [Mamba(block_size=4, mode="none")],
    "mamba all": [Mamba(block_size=4, mode="all")],
    "mamba align": [ALIGN],
    "reference window": [ReferenceWindow(block_size=4, window=5)],
    "sinks + window": [SinkAttention(block_size=4, sink_len=4), WINDOW],
    "full + window": [FULL, WINDOW],
    "full + two windows": [FULL, WINDOW, SlidingWindow(block_size=4, window=13)],
    "full + chunked": [FULL, CHUNK],
    "full + align": [FULL, ALIGN],
    "full + window + align": [FULL, WINDOW, ALIGN],
    "unequal blocks": [FullAttention(block_size=2), SlidingWindow(block_size=4, window=7)],
    "unequal blocks with states": [FullAttention(block_size=2), Mamba(block_size=8, mode="align")],
}


@dataclass(frozen=True, kw_only=True)
class Visitor:
    """A request to come: a prompt of ``length`` tokens, the first ``shared`` of them like everybody's."""

    arrival: int
    length: int
    shared: int
    max_tokens: int | None
    priority: int
    abort: int | None
    abort_during_step: bool


@dataclass(frozen=True, kw_only=True)
class Scenario:
    kind: str
    num_blocks: int
    sparse: bool
    """Whether windows and states are retained at few places only."""
    manager_options: dict[str, Any]
    options: dict[str, Any]
    visitors: list[Visitor]
    stop_chance: float
    outsider: tuple[int, int, int]
    """Somebody else holds so many blocks, from this step, for so many steps."""
    seed: int


def visitors() -> st.SearchStrategy[Visitor]:
    return st.builds(
        Visitor,
        arrival=st.integers(0, 12),
        length=st.integers(1, 30),
        shared=st.sampled_from([0, 9, 20, 30]),
        max_tokens=st.one_of(st.integers(1, 16), st.none()),
        priority=st.integers(0, 2),
        abort=st.one_of(st.none(), st.none(), st.integers(0, 30)),
        abort_during_step=st.booleans(),
    )


@st.composite
def scenarios(draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), policy: str | None = None) -> Scenario:
    kind = draw(st.sampled_from(kinds))
    chunked_prefill = draw(st.booleans())
    budget = draw(st.integers(1, 2 * MAX_MODEL_LEN)) if chunked_prefill else MAX_MODEL_LEN
    eagle = kind not in ("chunked", "full + chunked") and draw(st.booleans())
    return Scenario(
        kind=kind,
        num_blocks=draw(st.integers(2, 12 * len(KINDS[kind]))),
        sparse=draw(st.sampled_from([False, False, True])),
        manager_options={
            "max_num_batched_tokens": budget + draw(st.integers(0, 10)),
            "use_eagle": eagle,
            "enable_caching": draw(st.sampled_from([True, True, True, False])),
            "watermark": draw(st.sampled_from([0.0, 0.0, 0.1, 0.9])),
            "eviction_order": draw(st.sampled_from(["dead_first", "recency"])),
        },
        options={
            "max_num_scheduled_tokens": budget,
            "max_num_running": draw(st.sampled_from([5, 3, 2, 1])),
            "policy": policy or draw(st.sampled_from(["fcfs", "priority"])),
            "num_lookahead_tokens": draw(st.sampled_from([0, 0, 1, 3])),
            "enable_chunked_prefill": chunked_prefill,
            "full_sequence_must_fit": draw(st.booleans()),
        },
        visitors=draw(st.lists(visitors(), min_size=2, max_size=8)),
        stop_chance=draw(st.sampled_from([0.0, 0.0, 0.1])),
        outsider=draw(st.just((0, 0, 0)) | st.tuples(st.integers(1, 8), st.integers(0, 20), st.integers(1, 9))),
        seed=draw(st.integers(0, 2**16)),
    )


def next_token(tokens: Sequence[int]) -> int:
    """The toy model: what follows depends on the last tokens and the position."""
    return (3 * tokens[-1] + sum(tokens[-4:]) + len(tokens) // 7) % NUM_TOKEN_IDS


@dataclass
class ToyEngine:
    """Keeps, in the slots of each group, the prefix that was computed there."""

    specs: Sequence[AttentionSpec]
    states_are_simple: bool
    memory: list[dict[int, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = [{} for _ in self.specs]

    def run(self, output: SchedulerOutput) -> None:
        steps = [(step, self._tokens(step), step.block_ids) for step in output.scheduled]
        for group, spec in enumerate(self.specs):
            memory = self.memory[group]
            if isinstance(spec, Mamba):
                if self.states_are_simple:
                    self._run_states(spec, memory, [(step, tokens, table[group]) for step, tokens, table in steps])
                continue
            for step, tokens, table in steps:
                for position in range(step.start, len(tokens)):
                    memory[self._slot(spec, table[group], position)] = tokens[: position + 1]
            for step, tokens, table in steps:
                for position in {step.start, len(tokens) - 1}:
                    for read in self._reads(spec, position, step.request.num_prompt_tokens):
                        found = memory.get(self._slot(spec, table[group], read))
                        assert found == tokens[: read + 1], (step.request, group, position, read)

    @staticmethod
    def _tokens(step: ScheduledRequest) -> tuple[int, ...]:
        return tuple([*step.request.all_token_ids, *step.draft_token_ids])[: step.start + step.num_tokens]

    @staticmethod
    def _slot(spec: AttentionSpec, table: list[int], position: int) -> int:
        num_sink_blocks = spec.num_sink_blocks if isinstance(spec, SinkAttention) else 0
        block = table[num_sink_blocks + position // spec.block_size]
        assert block != 0, f"position {position} is read or written, but null in the table"
        return block * spec.block_size + position % spec.block_size

    @staticmethod
    def _reads(spec: AttentionSpec, position: int, num_prompt_tokens: int) -> Iterator[int]:
        for read in range(position + 1):
            if isinstance(spec, SlidingWindow):
                seen = position - read < spec.window
            elif isinstance(spec, ChunkedLocalAttention):
                seen = read // spec.chunk_size == position // spec.chunk_size
            elif isinstance(spec, ReferenceWindow):
                seen = read < num_prompt_tokens or position - read <= spec.window
            else:
                seen = True
            if seen:
                yield read

    @staticmethod
    def _run_states(
        spec: Mamba,
        memory: dict[int, tuple[int, ...]],
        steps: list[tuple[ScheduledRequest, tuple[int, ...], list[int]]],
    ) -> None:
        def block(table: list[int], num_tokens: int) -> int:
            found = table[0 if spec.mode == "none" else (num_tokens - 1) // spec.block_size]
            assert found != 0, f"the state after {num_tokens} tokens is null in the table"
            return found

        for step, tokens, table in steps:  # every state is read before this step writes any
            if step.start:
                assert memory.get(block(table, step.start)) == tokens[: step.start], (step.request, step.start)
        for step, tokens, table in steps:
            ends = [len(tokens)]
            if spec.mode == "all":
                ends += range((step.start // spec.block_size + 1) * spec.block_size, len(tokens), spec.block_size)
            for end in ends:
                memory[block(table, end)] = tokens[:end]


class World:
    """Runs a scenario and checks every step."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        lookahead = scenario.options["num_lookahead_tokens"]
        specs = [
            Mamba(block_size=spec.block_size, mode=spec.mode, num_speculative_states=lookahead)
            if isinstance(spec, Mamba)
            else spec
            for spec in KINDS[scenario.kind]
        ]
        sparse = scenario.sparse and any(spec.sparse_retention for spec in specs)
        options = {"retention_interval": 16} if sparse else {}
        num_sink_blocks = sum(spec.num_sink_blocks for spec in specs if isinstance(spec, SinkAttention))
        config = CacheConfig.uniform(scenario.num_blocks + 1 + num_sink_blocks, specs, **options)
        self.alignment = config.alignment
        self.hasher = BlockHasher.for_config(config)
        self.manager = KVCacheManager(config, max_model_len=MAX_MODEL_LEN, **scenario.manager_options)
        self.scheduler = Scheduler(self.manager, **scenario.options)
        self.engine = ToyEngine(specs, states_are_simple=lookahead == 0)
        self.requests: list[Request] = []
        self.refused = 0
        self.finished: list[Request] = []
        self.aborted: list[Request] = []
        self.computed: dict[str, int] = {}
        self.outsiders_blocks: list[int] = []
        self.seen: set[str] = set()

    def run(self) -> None:
        coming = sorted(enumerate(self.scenario.visitors), key=lambda pair: pair[1].arrival)
        step = 0
        while coming or self.scheduler.has_unfinished:
            while coming and coming[0][1].arrival <= step:
                self._add(*coming.pop(0))
            self._abort(step, during_step=False)
            self._be_an_outsider(step)
            self._step(step)
            step += 1
            assert step <= self._most_steps(), "no progress"
        self._check_the_end()

    def _add(self, index: int, visitor: Visitor) -> None:
        source = random.Random(index + 1)
        shared = [i * i % NUM_TOKEN_IDS for i in range(min(visitor.shared, visitor.length))]
        own = [source.randrange(NUM_TOKEN_IDS) for _ in range(visitor.length - len(shared))]
        request = Request(
            str(index),
            shared + own,
            block_hasher=self.hasher,
            max_tokens=visitor.max_tokens,
            priority=visitor.priority,
            arrival_time=float(visitor.arrival),
        )
        try:
            self.scheduler.add(request)
        except RequestTooLargeError as error:
            self.refused += 1
            assert error.num_tokens > error.num_tokens_that_fit
            return
        self.requests.append(request)

    def _abort(self, step: int, during_step: bool) -> None:
        for request in self.requests:
            visitor = self.scenario.visitors[int(request.request_id)]
            if visitor.abort == step and visitor.abort_during_step == during_step and not request.status.is_finished:
                self.seen.add(f"abort {request.status.name}")
                assert self.scheduler.abort(request.request_id) is request
                self.aborted.append(request)
                check_manager(self.manager)

    def _be_an_outsider(self, step: int) -> None:
        num_blocks, start, num_steps = self.scenario.outsider
        pool = self.manager.block_pool
        if start <= step < start + num_steps and not self.outsiders_blocks:
            self.outsiders_blocks = pool.allocate(min(num_blocks, pool.num_free))
        elif step == start + num_steps:
            pool.free_blocks(self.outsiders_blocks)
            self.outsiders_blocks = []

    def _step(self, step: int) -> None:
        output = self.scheduler.schedule()
        self._check_step(output)
        self.engine.run(output)
        check_manager(self.manager)
        self._abort(step, during_step=True)
        sampled, drafts = self._sample(output)
        for scheduled in output.scheduled:
            rejected = len(scheduled.draft_token_ids) + 1 - len(sampled.get(scheduled.request.request_id, "x"))
            rejected = rejected if scheduled.samples else 0
            self.computed[scheduled.request.request_id] = scheduled.start + scheduled.num_tokens - rejected
        stopped = {request_id for request_id in sampled if self.random.random() < self.scenario.stop_chance}
        for request in self.scheduler.update(output, sampled, drafts, stopped):
            assert (request.status is RequestStatus.FINISHED_STOPPED) == (request.request_id in stopped)
            self.finished.append(request)
        check_manager(self.manager)

    def _sample(self, output: SchedulerOutput) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The drafts that are right and the token after them; new drafts, most of them right."""
        sampled, drafts = {}, {}
        for step in output.scheduled:
            if not step.samples:
                continue
            tokens, new = list(step.request.all_token_ids), []
            for draft in (*step.draft_token_ids, None):
                new.append(next_token(tokens + new))
                if new[-1] != draft:
                    break
            sampled[step.request.request_id] = new
            guesses: list[int] = []
            for _ in range(self.random.randint(0, self.scenario.options["num_lookahead_tokens"])):
                right = next_token(tokens + new + guesses)
                guesses.append(right if self.random.random() < 0.7 else self.random.randrange(NUM_TOKEN_IDS))
            drafts[step.request.request_id] = guesses
        return sampled, drafts

    def _check_step(self, output: SchedulerOutput) -> None:
        options = self.scenario.options
        steps = output.scheduled
        assert output.num_scheduled_tokens == sum(s.num_tokens for s in steps) <= options["max_num_scheduled_tokens"]
        assert len({s.request.request_id for s in steps}) == len(steps)
        assert self.scheduler.num_running <= options["max_num_running"]
        for request in output.preempted:
            self.seen.add("preemption")
            assert request.status is RequestStatus.PREEMPTED
            assert request.num_computed_tokens == 0
            self.computed.pop(request.request_id)
        for s in steps:
            assert s.request.status is RequestStatus.RUNNING
            assert s.num_tokens >= 1
            assert s.request not in output.preempted
            assert (s.num_cached_tokens is not None) == (s.request.request_id not in self.computed)
            assert s.start == self.computed.get(s.request.request_id, s.num_cached_tokens)
            assert s.start + s.num_tokens <= MAX_MODEL_LEN
            if s.num_cached_tokens:
                self.seen.add("hit")
                assert s.num_cached_tokens % self.alignment == 0
                assert s.num_cached_tokens < s.request.num_tokens
        self._check_that_the_first_runs(steps)

    def _check_that_the_first_runs(self, steps: tuple[ScheduledRequest, ...]) -> None:
        """Under fcfs the oldest live request gets tokens in every step, so nobody starves."""
        live = [request for request in self.requests if not request.status.is_finished]
        if self.scenario.options["policy"] == "fcfs" and live and not self.outsiders_blocks:
            assert steps
            assert steps[0].request is live[0]

    def _most_steps(self) -> int:
        """Each step brings the most important running request a token further; it is never set back
        but by a more important one, of which there are fewer than requests."""
        total = sum(min(MAX_MODEL_LEN, v.length + (v.max_tokens or MAX_MODEL_LEN)) for v in self.scenario.visitors)
        rounds = 1 if self.scenario.options["policy"] == "fcfs" else len(self.scenario.visitors)
        return 12 + sum(self.scenario.outsider) + rounds * total + MAX_MODEL_LEN

    def _check_the_end(self) -> None:
        assert len(self.finished) + len(self.aborted) == len(self.requests)
        assert self.refused + len(self.requests) == len(self.scenario.visitors)
        for request in self.finished:
            room = MAX_MODEL_LEN - request.num_prompt_tokens
            if request.status is RequestStatus.FINISHED_LENGTH and request.max_tokens is not None:
                assert request.num_output_tokens == min(request.max_tokens, room)
            tokens = list(request.all_token_ids)
            for end in range(request.num_prompt_tokens, len(tokens)):
                assert tokens[end] == next_token(tokens[:end])
        self.manager.block_pool.free_blocks(self.outsiders_blocks)
        assert self.manager.usage == 0
        assert self.manager.block_pool.num_held == 0
        assert self.manager.reset_prefix_cache()
        check_manager(self.manager)


def run(scenario: Scenario) -> None:
    world = World(scenario)
    world.run()
    for what in world.seen:
        event(what)


MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(scenarios(policy="fcfs"))
def test_first_come_first_served(scenario: Scenario) -> None:
    run(scenario)


@MANY
@given(scenarios(policy="priority"))
def test_by_priority(scenario: Scenario) -> None:
    run(scenario)


def eight_that_want_it_all(kind: str, num_blocks: int, lookahead: int) -> World:
    visitor = Visitor(arrival=0, length=14, shared=9, max_tokens=16, priority=0, abort=None, abort_during_step=False)
    return World(
        Scenario(
            kind=kind,
            num_blocks=num_blocks,
            sparse=False,
            manager_options={"max_num_batched_tokens": 10},
            options={
                "max_num_scheduled_tokens": 10,
                "max_num_running": 8,
                "policy": "fcfs",
                "num_lookahead_tokens": lookahead,
            },
            visitors=[visitor] * 8,
            stop_chance=0.0,
            outsider=(0, 0, 0),
            seed=0,
        )
    )


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_smallest_pool_that_takes_one_of_them_serves_all(kind: str, lookahead: int) -> None:
    for num_blocks in range(1, 40):
        world = eight_that_want_it_all(kind, num_blocks, lookahead)
        world.run()
        assert world.refused in (0, 8)
        if not world.refused:
            assert [request.num_output_tokens for request in world.finished] == [16] * 8
            return
    pytest.fail("nothing ever fitted")
