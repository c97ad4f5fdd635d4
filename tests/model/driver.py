"""Random life cycles through the real manager and the naive one, side by side, over virtual tensors.

``Driver`` owns a seeded random source and one cache layout. Every operation does the same to both
managers, compares what they answer, and then ``after`` compares everything there is to see: block
ids of every table, free order, index, counts, events. The real manager is in lockstep with one in plain
Python. Steps of the "model" run in batches through ``Tensors``; up to two batches may be in flight.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvpager.check import check_manager
from kvpager.config import CacheConfig
from kvpager.hashing import BlockHasher
from kvpager.manager import Fit, KVCacheManager
from kvpager.request import Request, RequestStatus

from .naive import NULL, NaiveManager, Prefixes, Refusal, ceil_div
from .tensors import GARBAGE, Device, Item, Tensors

__all__ = ["OPERATIONS", "Driver", "Layout", "Mismatch"]

OPERATIONS: dict[str, int] = {
    # what is done, and how often it should come up
    "admit": 6,
    "admit, whole sequence must fit": 4,
    "admit, blocks reserved": 4,
    "admit with lookahead": 4,
    "admit with external tokens": 4,
    "prefill chunk": 6,
    "decode": 6,
    "decode with lookahead": 4,
    "speculative decode": 6,
    "in-flight decode": 4,
    "decode batch in one call": 4,
    "new step": 4,
    "preempt": 4,
    "abort": 3,
    "finish": 3,
    "delayed load, then cache_blocks": 4,
    "failed load": 3,
    "pop blocks, return later": 3,
    "evict_blocks": 3,
    "reset": 2,
    "lazy reset": 2,
    "remove_skipped_blocks": 3,
    "outsider takes and frees": 2,
    "probe": 4,
    "queries": 3,
    "take_events": 3,
}
BATCHES_IN_FLIGHT = 2


class Mismatch(AssertionError):
    """The manager and the model do not agree."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One cache and the options it is driven with."""

    name: str
    config: CacheConfig
    options: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 40
    batch: int = 12

    @property
    def kinds(self) -> list[str]:
        names = []
        for group in self.config.groups:
            mode = getattr(group.spec, "mode", "")
            names.append(f"{group.spec.kind} {mode}".strip())
        return sorted(set(names))


@dataclass(eq=False)
class Live:
    """A request that is not over."""

    request: Request
    device: Device
    num_encoder_tokens: int = 0
    items: list[Item] = field(default_factory=list)  # scheduled, results not processed yet
    load: range | None = None  # a transfer under way
    uncovered: bool = False  # runs on tokens of a load that cache_blocks has not covered
    rewritten: int | None = None  # the last token of a prompt that was loaded whole: computed again, the same
    tainted: bool = False  # recomputes after a failed load what sharers hold too

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def starts_at(self) -> int:
        return self.request.num_computed_tokens


class Driver:
    """One layout, one random source; ``step`` carries out one operation and compares."""

    def __init__(self, layout: Layout, rng: Random, *, deep_check_every: int = 5) -> None:
        self.layout, self.rng = layout, rng
        self.config = layout.config
        self.prefixes = Prefixes()
        shared = {"max_model_len": layout.max_model_len, "max_num_batched_tokens": layout.batch, **layout.options}
        self.model = NaiveManager(self.config, prefixes=self.prefixes, **shared)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.real = KVCacheManager(self.config, enable_kv_cache_events=True, log_stats=True, **shared)
        self.same("warns that it cannot hit", bool(caught), self.model.caching_is_on and not self.model.caching)
        self.hasher = BlockHasher.for_config(self.config)
        self.tensors = Tensors(self.model.groups, self.prefixes)
        self.has_states = any(g.kind == "mamba" for g in self.model.groups)
        self.has_cross = any(g.kind == "cross_attention" for g in self.model.groups)
        self.max_drafts = min([3, *(g.num_speculative for g in self.model.groups if g.kind == "mamba")])
        self.content = Random(0)  # token ids matter to nobody: they need not shrink
        self.documents = [self.tokens(layout.max_model_len) for _ in range(3)]

        self.waiting: list[Live] = []
        self.running: list[Live] = []
        self.loading: list[Live] = []
        self.popped: list[tuple[list[int], dict[int, Any]]] = []
        self.outside: list[int] = []
        self.open: list[Item] = []
        self.closed: list[list[Item]] = []
        self.owner: dict[int, Live] = {}  # id of an item -> who waits for its result
        self.node_of_hash: dict[bytes, int] = {}
        self.hash_of_node: dict[int, bytes] = {}
        self.replayed: set[tuple[bytes, int]] = set()
        self.num_logged = 0
        self.stats = [0] * 6
        self.weights = 1
        self.nobody_leaves = False
        self.num_requests = 0
        self.num_steps = 0
        self.deep_check_every = deep_check_every
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.num_hits = self.num_hit_tokens = self.num_preemptions = self.num_junctions = 0

    # -- running --------------------------------------------------------------------------------

    def step(self, operation: str | None = None) -> str:
        """One operation, then every comparison. Returns its name."""
        if operation is None:
            operation = self.rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        carried_out = self.methods()[operation]()
        (self.done if carried_out else self.refused)[operation] += 1
        self.num_steps += 1
        self.after()
        return operation

    def methods(self) -> dict[str, Callable[[], bool]]:
        return {
            "admit": self.admit,
            "admit, whole sequence must fit": lambda: self.admit(
                full_sequence=True, lookahead=self.rng.choice((0, 0, 1, 4))
            ),
            "admit, blocks reserved": lambda: self.admit(reserved=self.rng.randint(1, 4)),
            "admit with lookahead": lambda: self.admit(lookahead=self.rng.randint(1, 4)),
            "admit with external tokens": lambda: self.admit(external=True, full_sequence=self.rng.random() < 0.5),
            "prefill chunk": self.prefill,
            "decode": self.decode,
            "decode with lookahead": lambda: self.decode(lookahead=self.rng.randint(1, 4)),
            "speculative decode": lambda: self.decode(speculate=True),
            "in-flight decode": self.decode_in_flight,
            "decode batch in one call": self.decode_batch,
            "new step": self.new_step,
            "preempt": self.preempt,
            "abort": self.abort,
            "finish": self.finish,
            "delayed load, then cache_blocks": self.delayed_load,
            "failed load": self.failed_load,
            "pop blocks, return later": self.pop_blocks,
            "evict_blocks": self.evict_blocks,
            "reset": self.reset,
            "lazy reset": self.lazy_reset,
            "remove_skipped_blocks": self.remove_skipped_blocks,
            "outsider takes and frees": self.outsider,
            "probe": self.probe,
            "queries": self.queries,
            "take_events": self.take_events,
        }

    # -- requests -------------------------------------------------------------------------------

    def tokens(self, n: int) -> list[int]:
        return [self.content.randrange(50) for _ in range(n)]

    def add(self) -> Live:
        """A new request; most share a prefix with others."""
        rng, room = self.rng, self.layout.max_model_len - 2
        shared = rng.choice(self.documents)[: rng.randint(0, room)]
        tail = self.tokens(rng.choice((0, 1, 2, 5)))
        tokens = ([*shared, *tail] or [1])[:room]
        if rng.random() < 0.2:
            self.documents[rng.randrange(3)] = [*tokens, *self.tokens(room)]
        self.num_requests += 1
        name, salt = f"r{self.num_requests}", "salt" if rng.random() < 0.05 else None
        if salt:
            self.prefixes.salts[name] = salt
        request = Request(
            name,
            tokens,
            block_hasher=self.hasher,
            max_tokens=rng.choice((None, *range(1, 9))),
            cache_salt=salt,
            skip_reading_prefix_cache=rng.random() < 0.04,
        )
        encoder = rng.randint(1, 9) if self.has_cross else 0
        live = Live(request, self.new_device(request, encoder), encoder)
        self.waiting.append(live)
        return live

    def new_device(self, request: Request, encoder: int) -> Device:
        tokens = list(request.all_token_ids)
        return Device(tokens, self.prefixes.root(request.request_id), request.num_prompt_tokens, self.weights, encoder)

    def learn_hashes(self, request: Request) -> None:
        """Block hashes and prefixes must be one to one; ``after`` needs the way back."""
        nodes = self.prefixes.of(request)
        size = self.config.hash_size
        if len(request.block_hashes) != request.num_tokens // size:
            raise Mismatch(f"{request.request_id}: {len(request.block_hashes)} hashes, {request.num_tokens} tokens")
        for i, digest in enumerate(request.block_hashes):
            node = nodes[(i + 1) * size]
            if (
                self.node_of_hash.setdefault(digest, node) != node
                or self.hash_of_node.setdefault(node, digest) != digest
            ):
                raise Mismatch(f"{request.request_id}: hash {i} does not stand for its prefix")

    # -- allocation -----------------------------------------------------------------------------

    def allocate(self, live: Live, new: int, hit: Any = None, **options: Any) -> list[list[int]] | None:
        """The same allocation on both sides; None if both refuse."""
        request = live.request
        self.learn_hashes(request)
        blocks, num_hit = (None, 0)
        if hit is not None:
            blocks, num_hit = self.real.get_computed_blocks(request)
            self.same("hit length", num_hit, hit[1])
            self.same("junction", blocks.junction, hit[2])
            self.same(
                "hit blocks", [list(x) for x in blocks.get_block_ids()], hit[0] if num_hit else [[] for _ in hit[0]]
            )
        asked = self.ask(live, new, hit, options)
        answer = self.real.allocate_slots(
            request,
            new,
            num_hit,
            blocks,
            num_lookahead_tokens=options.get("lookahead", 0),
            num_external_computed_tokens=options.get("external", 0),
            delay_cache_blocks=options.get("delay", False),
            num_encoder_tokens=options.get("encoder", 0),
            full_sequence_must_fit=options.get("full_sequence", False),
            reserved_blocks=options.get("reserved", 0),
            has_scheduled_reqs=options.get("others_run", True),
        )
        try:
            grown = self.model.allocate(request, new, hit, **options)
        except Refusal as refusal:
            self.same(f"refusal ({refusal})", answer is None, True)
            fit = {"never": Fit.NEVER, "next step": Fit.NEXT_STEP, "not now": Fit.NOT_NOW}[refusal.args[0]]
            self.same("probe", asked.fit, fit)
            if fit is Fit.NOT_NOW:
                self.same("blocks short", asked.num_blocks_short, refusal.args[1])
                self.same("a group limits", asked.limiting_group is not None, True)
            return None
        if answer is None:
            raise Mismatch(f"{live.name}: the manager refuses, the model allocates {grown}; probe said {asked}")
        self.same("probe", asked.fit, Fit.NOW)
        self.same("blocks needed", asked.num_blocks_needed, self.model.last_need)
        self.same("positions appended", [list(x) for x in answer.get_block_ids()], grown)
        if not any(grown) and answer is not self.real.empty_kv_cache_blocks:
            raise Mismatch("an allocation that appends nothing should be the shared empty one")
        if hit is not None:
            self.count_admission(request, num_hit, hit[2])
        return grown

    def ask(self, live: Live, new: int, hit: Any, options: dict[str, Any]) -> Any:
        """``probe`` with the same words; it must change nothing, which ``after`` sees."""
        before = (self.real.block_pool.free_queue(), self.real.get_block_ids(live.name))
        asked = self.real.probe(
            live.request,
            new,
            num_lookahead_tokens=options.get("lookahead", 0),
            num_external_computed_tokens=options.get("external", 0),
            num_encoder_tokens=options.get("encoder", 0),
            full_sequence_must_fit=options.get("full_sequence", False),
            reserved_blocks=options.get("reserved", 0),
            has_scheduled_reqs=options.get("others_run", True),
        )
        self.same("probe changes", (self.real.block_pool.free_queue(), self.real.get_block_ids(live.name)), before)
        if hit is not None:
            self.same("probe's hit", (asked.num_hit_tokens, asked.junction), (hit[1], hit[2]))
        return asked

    def count_admission(self, request: Request, num_hit: int, junction: int) -> None:
        self.num_hits += num_hit > 0
        self.num_hit_tokens += num_hit
        self.num_junctions += junction > 0
        if self.model.caching_is_on and not request.skip_reading_prefix_cache:
            at = 3 if request.num_preemptions else 0
            for offset, amount in enumerate((1, request.num_tokens, num_hit)):
                self.stats[at + offset] += amount

    def scheduled(self, live: Live, count: int, *, load: range = range(0), drafts: tuple[int, ...] = ()) -> Item:
        """The allocated step goes into the open batch."""
        tables = [list(t) for t in self.model.books[live.name].tables]
        num_accepted = self.rng.randint(0, len(drafts))
        item = Item(
            live.device,
            live.name,
            tables,
            live.request.num_computed_tokens,
            count,
            drafts=drafts,
            num_accepted=num_accepted,
            next_token=self.content.randrange(50),
            load=load,
        )
        live.request.num_computed_tokens += count
        live.request.num_in_flight_tokens += count
        live.items.append(item)
        self.owner[id(item)] = live
        self.open.append(item)
        self.check_writes(live, item)
        return item

    def check_writes(self, live: Live, item: Item) -> None:
        """Invariant 5: nobody else holds a block that this step writes."""
        if live.tainted:
            return
        for group in self.model.groups:
            table = item.tables[group.index]
            if group.kind in ("mamba", "cross_attention"):
                continue
            for p in range(item.start, item.start + item.count):
                block = table[p // group.size]
                if p == live.rewritten:
                    continue
                if self.real.block_pool.ref_count(block) != 1:
                    raise Mismatch(f"{live.name} writes token {p} into block {block}, which others hold too")

    def admit(
        self, *, full_sequence: bool = False, reserved: int = 0, lookahead: int = 0, external: bool = False
    ) -> bool:
        live = self.rng.choice(self.waiting) if self.waiting and self.rng.random() < 0.8 else self.add()
        request = live.request
        live.device = self.new_device(request, live.num_encoder_tokens)
        hit = self.model.hit(request)
        room = request.num_tokens - 1 - hit[1]
        loaded = self.rng.randint(1, room) if external and room > 0 else 0
        if external and not loaded:
            return False
        new = self.rng.randint(1, min(self.layout.batch, request.num_tokens - hit[1] - loaded))
        new = self.limited(request, hit[1] + loaded, new, hit[2])
        delay = loaded > 0 and self.rng.random() < 0.3
        grown = self.allocate(
            live,
            new,
            hit,
            delay=delay,
            lookahead=lookahead,
            external=loaded,
            encoder=live.num_encoder_tokens,
            full_sequence=full_sequence,
            reserved=reserved,
            others_run=bool(self.running),
        )
        if grown is None:
            return self.give_way()
        self.start(live, hit[1])
        live.uncovered = delay
        request.num_computed_tokens = hit[1] + loaded
        self.scheduled(live, new, load=range(hit[1], hit[1] + loaded))
        return True

    def limited(self, request: Request, computed: int, new: int, junction: int) -> int:
        """Most prefill steps end where a state is worth keeping, as a scheduler should do it."""
        limit = self.real.limit_prefill_step(request, computed, new, junction)
        self.same("end of a prefill step", limit, self.model.prefill_step(request, computed, new, junction))
        return limit if self.rng.random() < 0.7 else new

    def start(self, live: Live, num_hit: int) -> None:
        self.waiting.remove(live)
        self.running.append(live)
        live.request.status = RequestStatus.RUNNING
        live.device.processed = num_hit

    def give_way(self) -> bool:
        """Refused: now and then somebody goes, so that pools do not stay full."""
        if self.nobody_leaves:
            return False
        if self.running and self.rng.random() < 0.4:
            self.retire(self.rng.choice(self.running), RequestStatus.FINISHED_ABORTED)
        elif self.waiting and self.rng.random() < 0.3:
            self.waiting.remove(self.rng.choice(self.waiting))
        return False

    def prefill(self) -> bool:
        ready = [x for x in self.running if not self.in_open(x) and self.num_unscheduled(x) > 1]
        if not ready:
            return False
        live = self.rng.choice(ready)
        new = self.rng.randint(1, min(self.layout.batch, self.num_unscheduled(live)))
        new = self.limited(live.request, live.request.num_computed_tokens, new, self.model.books[live.name].junction)
        if self.allocate(live, new, full_sequence=self.rng.random() < 0.3) is None:
            return self.give_way()
        self.scheduled(live, new)
        return True

    def num_unscheduled(self, live: Live) -> int:
        return live.request.num_tokens - live.request.num_computed_tokens

    def in_open(self, live: Live) -> bool:
        return any(item in self.open for item in live.items)

    def decode(self, *, lookahead: int = 0, speculate: bool = False) -> bool:
        ready = [x for x in self.running if not x.items and self.num_unscheduled(x) == 1]
        if not ready:
            self.settle()
            ready = [x for x in self.running if self.num_unscheduled(x) == 1]
        if not ready or (speculate and not self.max_drafts):
            return False
        live = self.rng.choice(ready)
        if not self.decode_step(live, lookahead, speculate):
            return False
        while speculate and self.rng.random() < 0.6:  # guess after guess, some across block boundaries
            self.settle()
            if live not in self.running or not self.decode_step(live, lookahead, speculate):
                break
        return True

    def decode_step(self, live: Live, lookahead: int = 0, speculate: bool = False) -> bool:
        room = self.layout.max_model_len - live.request.num_computed_tokens - 1
        if room < 1:
            self.retire(live, RequestStatus.FINISHED_LENGTH)
            return False
        drafts: tuple[int, ...] = ()
        if speculate:
            drafts = tuple(self.tokens(self.rng.randint(1, self.max_drafts)))[: room - 1]
        if self.allocate(live, 1 + len(drafts), lookahead=lookahead) is None:
            return self.give_way()
        self.scheduled(live, 1 + len(drafts), drafts=drafts)
        return True

    def decode_in_flight(self) -> bool:
        """A step on top of one whose result is not known yet."""
        ready = self.ready_in_flight()
        if not ready:
            self.decode(speculate=bool(self.max_drafts) and self.rng.random() < 0.5)
            self.close()
            ready = self.ready_in_flight()
        if not ready:
            return False
        return self.decode_step(self.rng.choice(ready), speculate=bool(self.max_drafts) and self.rng.random() < 0.5)

    def decode_batch(self) -> bool:
        """Several running requests in one call, one of which may be refused; some have steps in flight."""
        ready = [x for x in self.running if not self.in_open(x) and self.num_unscheduled(x) <= 1]
        ready = [x for x in ready if x.request.num_computed_tokens + 5 < self.layout.max_model_len]
        if not ready:
            return self.decode()
        batch = self.rng.sample(ready, min(len(ready), self.rng.randint(1, 4)))
        drafts = [tuple(self.tokens(self.rng.choice((0, 0, self.max_drafts)))) for _ in batch]
        lookahead, reserved = self.rng.choice((0, 0, 2)), self.rng.choice((0, 0, 1))
        for live in batch:
            self.learn_hashes(live.request)
        slots = self.real.allocate_decode_slots(
            [x.request for x in batch], [1 + len(d) for d in drafts], lookahead, reserved, bool(self.running)
        )
        refused = None
        for index, (live, guesses) in enumerate(zip(batch, drafts, strict=True)):
            try:
                grown = self.model.allocate(live.request, 1 + len(guesses), lookahead=lookahead, reserved=reserved)
            except Refusal:
                refused = index
                break
            self.same("who grew", index in slots.changed(), any(grown))
            if any(grown):
                self.same("positions appended", [list(x) for x in slots.block_ids(index)], grown)
            self.scheduled(live, 1 + len(guesses), drafts=guesses)
        self.same("who was refused", slots.refused, refused)
        if refused == 0:
            return self.give_way()
        return True

    def ready_in_flight(self) -> list[Live]:
        return [x for x in self.running if x.items and not self.in_open(x) and self.num_unscheduled(x) <= 0]

    # -- batches --------------------------------------------------------------------------------

    def new_step(self) -> bool:
        self.close()
        if self.closed and self.rng.random() < 0.5:
            self.execute()
        return True

    def close(self) -> None:
        """The open batch is launched; a new scheduling step starts."""
        if self.open:
            self.closed.append(self.open)
            self.open = []
        self.real.new_step_starts()
        self.model.new_step()
        while len(self.closed) > BATCHES_IN_FLIGHT:
            self.execute()

    def settle(self) -> None:
        self.close()
        while self.closed:
            self.execute()

    def execute(self) -> None:
        """The oldest batch runs, and its results are processed."""
        batch = self.closed.pop(0)
        self.tensors.run(batch)
        for item in batch:
            live = self.owner.pop(id(item), None)
            if live is None or item not in live.items:
                continue
            live.items.remove(item)
            request = live.request
            request.num_in_flight_tokens -= item.count
            if item.sampled:
                request.num_computed_tokens -= len(item.drafts) - item.num_accepted
                request.append_output_token_ids(item.sampled)
                self.learn_hashes(request)
            over = len(request.output_token_ids) >= (request.max_tokens or 8)
            if over and live in self.running and not self.nobody_leaves:
                self.retire(live, RequestStatus.FINISHED_LENGTH)

    # -- the ends of a life ---------------------------------------------------------------------

    def retire(self, live: Live, status: RequestStatus) -> None:
        """The request is over; its blocks go back."""
        if self.in_open(live):
            self.close()
        if live not in self.waiting + self.running + self.loading:
            return  # closing ran a batch in which it finished
        self.real.free(live.request)
        self.model.free(live.request)
        self.forget(live)
        live.request.status = status

    def forget(self, live: Live) -> None:
        for group in (self.waiting, self.running, self.loading):
            if live in group:
                group.remove(live)
        live.items, live.load, live.uncovered, live.rewritten = [], None, False, None

    def preempt(self) -> bool:
        if not self.running:
            return False
        live = self.rng.choice(self.running)
        if self.in_open(live):
            self.close()
        return live in self.running and self.preempt_one(live)

    def preempt_one(self, live: Live) -> bool:
        self.real.free(live.request)
        self.model.free(live.request)
        self.forget(live)
        request = live.request
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.num_preemptions += 1
        live.tainted = False
        self.waiting.append(live)
        self.num_preemptions += 1
        return True

    def abort(self) -> bool:
        everybody = self.waiting + self.running + self.loading
        if not everybody:
            return False
        self.retire(self.rng.choice(everybody), RequestStatus.FINISHED_ABORTED)
        return True

    def finish(self) -> bool:
        if not self.running:
            return False
        live = self.rng.choice(self.running)
        self.retire(live, RequestStatus.FINISHED_STOPPED)
        if self.rng.random() < 0.5:  # the next turn of the chat will start with all of this
            tokens = list(live.request.all_token_ids)
            self.documents[self.rng.randrange(3)] = [*tokens, *self.tokens(40)]
        return True

    # -- loads ----------------------------------------------------------------------------------

    def delayed_load(self) -> bool:
        """A transfer starts (nothing may be committed), or one that is under way arrives."""
        uncovered = [x for x in self.running if x.uncovered]
        if uncovered and self.rng.random() < 0.5:
            return self.cover(self.rng.choice(uncovered))
        arriving = [x for x in self.loading if not x.items]
        if arriving and self.rng.random() < 0.7:
            return self.arrive(self.rng.choice(arriving))
        live = self.start_load(delay=True)
        if live is None:
            return False
        return self.arrive(live) if self.rng.random() < 0.3 else True

    def start_load(self, delay: bool) -> Live | None:
        live = self.rng.choice(self.waiting) if self.waiting and self.rng.random() < 0.5 else self.add()
        request = live.request
        live.device = self.new_device(request, live.num_encoder_tokens)
        hit = self.model.hit(request)
        room = request.num_tokens - hit[1] - (1 if self.has_states or not delay else 0)
        if room < 1:
            return None
        loaded = room if self.rng.random() < 0.2 else self.rng.randint(1, room)
        grown = self.allocate(
            live, 0, hit, external=loaded, delay=delay, encoder=live.num_encoder_tokens, others_run=bool(self.running)
        )
        if grown is None:
            self.give_way()
            return None
        self.start(live, hit[1])
        self.running.remove(live)
        self.loading.append(live)
        request.status = RequestStatus.WAITING_FOR_LOAD
        live.load = range(hit[1], hit[1] + loaded)
        return live

    def cover(self, live: Live) -> bool:
        """A request that already runs on loaded tokens: now they may be committed, with what followed."""
        self.settle()
        if live not in self.running:
            return False
        n = min(live.request.num_computed_tokens, live.request.num_tokens)
        self.real.cache_blocks(live.request, n)
        self.model.commit(live.request, n)
        live.uncovered = False
        return True

    def arrive(self, live: Live) -> bool:
        """The transfer is over; the tail of it may be missing, then the host computes that itself."""
        assert live.load is not None
        self.settle()  # what was launched before must not write over it
        request, load = live.request, live.load
        n = self.rng.randrange(load.start, load.stop)
        if self.rng.random() < 0.7 or not self.model.can_go_on_from(live.name, n):
            n = load.stop
        self.tensors.load(live.device, self.model.books[live.name].tables, range(load.start, load.stop), ())
        self.tensors.spoil(live.device, self.model.books[live.name].tables, range(n, load.stop))
        request.num_computed_tokens = live.device.processed = min(n, request.num_tokens - 1)
        live.rewritten = n - 1 if n > request.num_computed_tokens else None
        told = self.rng.choice((n, request.num_computed_tokens))
        self.real.cache_blocks(request, told)
        self.model.commit(request, told)
        self.back_to_running(live)
        return True

    def back_to_running(self, live: Live) -> None:
        live.load = None
        if live in self.loading:
            self.loading.remove(live)
            self.running.append(live)
        live.request.status = RequestStatus.RUNNING

    def failed_load(self) -> bool:
        """Blocks of a load turn out to be garbage, after others may have used them."""
        self.settle()
        live = self.start_load(delay=self.rng.random() < 0.5)
        if live is None:
            return False
        assert live.load is not None
        tables = self.model.books[live.name].tables
        blocks = {
            t[p // g.size]
            for g, t in zip(self.model.groups, tables, strict=True)
            for p in live.load
            if g.shares and p // g.size < len(t)
        } - {NULL}
        failed = set(self.rng.sample(sorted(blocks), self.rng.randint(1, len(blocks)))) if blocks else set()
        if not failed:
            return self.arrive(live)
        self.tensors.garbage_allowed = self.nobody_leaves = True
        item = Item(live.device, live.name, [list(t) for t in tables], live.load.start, 0, load=live.load)
        item.failed = frozenset(failed)
        self.open.append(item)
        for _ in range(self.rng.randint(0, 2)):  # others may hit what has just been committed
            self.admit()
        self.settle()
        live.request.num_computed_tokens = live.load.stop
        if live in self.loading:
            self.back_to_running(live)
            self.report_failure(failed)
        self.tensors.garbage_allowed = self.nobody_leaves = False
        return True

    def report_failure(self, failed: set[int]) -> None:
        told = self.real.invalidate_blocks(sorted(failed))
        self.same("invalidate_blocks", told, self.model.invalidate(sorted(failed)))
        for name, first in told.items():
            live = next(x for x in self.running + self.loading if x.name == name)
            n = min(first, live.request.num_computed_tokens)
            live.device.processed = min(live.device.processed, n)
            live.device.tokens = list(live.request.all_token_ids)
            live.request.num_computed_tokens = n
            live.request.num_in_flight_tokens = 0
            live.tainted = True
            if live in self.loading:
                continue
            if not self.model.can_go_on_from(name, n):
                self.preempt_one(live)

    # -- other callers --------------------------------------------------------------------------

    def pop_blocks(self) -> bool:
        """A transfer keeps the blocks of a finished request, and returns them later."""
        if self.popped and (self.rng.random() < 0.5 or len(self.popped) > 2):
            return self.return_blocks()
        holding = self.running + self.loading
        if not holding:
            return False
        live = self.rng.choice(holding)
        if self.in_open(live):
            self.close()
        if live not in self.running + self.loading:
            return False
        ids = self.real.pop_blocks_for_free(live.request)
        self.same("popped blocks", ids, self.model.pop(live.request))
        self.forget(live)
        unwritten = self.pending_blocks()
        kept = {b: dict(self.tensors.memory.get(b, {})) for b in ids if b not in unwritten}
        kept = {b: memory for b, memory in kept.items() if GARBAGE not in memory.values()}
        self.popped.append((ids, kept))
        return True

    def return_blocks(self) -> bool:
        ids, kept = self.popped.pop(self.rng.randrange(len(self.popped)))
        for block, memory in kept.items():
            self.same(f"content of popped block {block}", self.tensors.memory.get(block, {}), memory)
        self.real.block_pool.free_blocks(reversed(ids))
        self.model.free_ids(reversed(ids))
        return True

    def evict_blocks(self) -> bool:
        cached = sorted(self.model.key)
        everything = range(1, self.config.num_blocks)
        ids = [self.rng.choice(cached if cached and self.rng.random() < 0.8 else everything) for _ in range(2)]
        self.real.evict_blocks(ids)
        self.model.evict(ids)
        return True

    def reset(self) -> bool:
        if any(self.model.count.values()) and self.rng.random() < 0.3:
            self.same("reset while blocks are held", self.real.reset_prefix_cache(), self.model.reset())
            return False
        self.settle()
        for live in self.running + self.loading:
            self.retire(live, RequestStatus.FINISHED_ABORTED)
        while self.popped:
            self.return_blocks()
        self.return_outside()
        self.same("blocks held", self.real.block_pool.num_held, 0)
        self.same("reset", self.real.reset_prefix_cache(), self.model.reset())
        self.same("index after reset", self.real.block_pool.index(), {})
        self.weights += 1
        return True

    def lazy_reset(self) -> bool:
        self.same("lazy reset", self.real.reset_prefix_cache(lazy=True), self.model.reset(lazy=True))
        self.weights += 1
        return True

    def remove_skipped_blocks(self) -> bool:
        ready = [x for x in self.running if not x.items]
        if not ready:
            return False
        live = self.rng.choice(ready)
        n, prompt = live.request.num_computed_tokens, live.request.num_prompt_tokens
        self.real.remove_skipped_blocks(live.name, n, prompt)
        self.model.release_dead(live.name, n, prompt)
        return True

    def outsider(self) -> bool:
        """Somebody takes blocks from the pool, or references to blocks that are held, and gives them back."""
        if self.outside:
            self.return_outside()
            return True
        if len(self.model.queue) < 4:
            return False
        ids = self.real.block_pool.allocate(2)
        self.same("outsider's blocks", ids, self.model.take(2))
        self.outside = ids
        if self.model.key:
            cached = self.rng.choice(sorted(self.model.key))
            self.real.block_pool.touch([cached])
            self.model.touch(cached)
            self.outside = [*ids, cached]
        return True

    def return_outside(self) -> None:
        if self.outside:
            self.real.block_pool.free_blocks(self.outside)
            self.model.free_ids(self.outside)
            self.outside = []

    # -- questions ------------------------------------------------------------------------------

    def probe(self) -> bool:
        """How much would fit, for any request and any words."""
        live = self.rng.choice(self.waiting + self.running) if self.waiting + self.running else self.add()
        waiting = live in self.waiting
        if not waiting and self.num_unscheduled(live) < 1:
            return False
        self.learn_hashes(live.request)
        hit = self.model.hit(live.request) if waiting else None
        left = self.num_unscheduled(live) - (hit[1] if hit else 0)
        new = self.rng.randint(1, left)
        options = {"lookahead": self.rng.randint(0, 2), "encoder": live.num_encoder_tokens if waiting else 0}
        asked = self.ask(live, new, hit, options)
        if new == min(left, self.layout.batch) and asked.fit is not Fit.NEXT_STEP:
            self.same(
                "probe without a number",
                self.real.probe(
                    live.request, num_lookahead_tokens=options["lookahead"], num_encoder_tokens=options["encoder"]
                ),
                asked,
            )
        if asked.fit is Fit.NEVER:
            self.check_never(live, options, asked)
        return True

    def check_never(self, live: Live, options: dict[str, Any], asked: Any) -> None:
        """The longest sequence that would fit, by trying every length."""

        def need(n: int) -> int:
            return self.model.need_from_nothing(live.request, n, options["lookahead"], options["encoder"])

        fits = [n for n in range(1, self.layout.max_model_len + 1) if need(n) <= self.model.capacity]
        self.same("tokens that would fit", asked.num_tokens_that_fit, max(fits, default=0))

    def queries(self) -> bool:
        holding = [x for x in self.running + self.loading if x.name in self.model.books]
        if not holding:
            return False
        live = self.rng.choice(holding)
        tables = [[*s, *t] for s, t in zip(self.model.sinks, self.model.books[live.name].tables, strict=True)]
        self.same("get_block_ids", [list(x) for x in self.real.get_block_ids(live.name)], tables)
        seen = [[(b.block_id, b.is_null) for b in row] for row in self.real.get_blocks(live.name).blocks]
        self.same("get_blocks", seen, [[(b, b == NULL) for b in t] for t in tables])
        n = self.rng.randint(0, live.request.num_computed_tokens)
        clipped = []
        for group, table, sinks in zip(self.model.groups, tables, self.model.sinks, strict=True):
            whole = group.kind in ("mamba", "cross_attention")
            clipped.append(table if whole else table[: len(sinks) + ceil_div(n, group.size)])
        got = self.real.get_block_ids_for_computed_tokens(live.name, n)
        self.same("get_block_ids_for_computed_tokens", [list(x) for x in got], clipped)
        common = self.real.get_num_common_prefix_blocks(live.name)
        self.same("common prefix", list(common), self.model.common_prefix(live.name))
        unhashed = [[b for b in t if b != NULL and b not in self.model.key] for t in self.model.books[live.name].tables]
        if not any(self.model.sinks):
            self.same("unhashed", self.real.get_blocks(live.name).get_unhashed_block_ids_all_groups(), unhashed)
        self.same("blocks to zero", sorted(set(self.real.take_new_block_ids())), sorted(set(self.model.fresh)))
        self.model.fresh.clear()
        self.check_stats()
        return True

    def check_stats(self) -> None:
        got = self.real.make_prefix_cache_stats()
        assert got is not None
        seen = [
            got.requests,
            got.queries,
            got.hits,
            got.preempted_requests,
            got.preempted_queries,
            got.preempted_hits,
        ]
        self.same("statistics", seen, self.stats)
        self.stats = [0] * 6

    def take_events(self) -> bool:
        """The events say exactly what changed, in order; replayed, they are the index."""
        seen: list[tuple[str, int, Any]] = []
        for event in self.real.take_events():
            name = type(event).__name__
            if name == "AllBlocksCleared":
                self.replayed.clear()
                seen.append(("cleared", -1, -1))
                continue
            for digest in event.block_hashes:
                key = (digest, event.group_idx)
                if name == "BlockStored":
                    self.replayed.add(key)
                else:
                    self.replayed.remove(key)
                seen.append(
                    ("stored" if name == "BlockStored" else "removed", event.group_idx, self.node_of_hash[digest])
                )
            if name == "BlockStored":
                self.check_stored(event)
        self.same("events", seen, self.model.log[self.num_logged :])
        self.num_logged = len(self.model.log)
        self.same("events replayed", self.replayed, set(self.real.block_pool.index()))
        return True

    def check_stored(self, event: Any) -> None:
        """Hashes, tokens and extra keys pair up, and the tokens are those of the hash's prefix."""
        group = self.model.groups[event.group_idx]
        self.same("event's block size", event.block_size, group.size)
        self.same("event's tokens", len(event.token_ids), group.size * len(event.block_hashes))
        self.same("event's kind", event.kv_cache_spec_kind, group.kind)
        self.same(
            "event's window",
            event.kv_cache_spec_sliding_window,
            group.window if group.kind == "sliding_window" else None,
        )
        if event.extra_keys is not None:
            self.same("event's extra keys", len(event.extra_keys), len(event.block_hashes))
        node = 0 if event.parent_block_hash is None else self.node_of_hash[event.parent_block_hash]
        for i, digest in enumerate(event.block_hashes):
            for token in event.token_ids[i * group.size : (i + 1) * group.size]:
                node = self.prefixes.child(node, token) if node else self.first_child(digest, group.size, token)
            self.same("event's tokens stand for its hash", self.node_of_hash[digest], node)

    def first_child(self, digest: bytes, size: int, token: int) -> int:
        """A prefix without a parent starts at one of the roots (a salt each)."""
        node = self.node_of_hash[digest]
        for _ in range(size):
            node = self.prefixes.parent[node]
        return self.prefixes.child(node, token)

    # -- comparison -----------------------------------------------------------------------------

    def same(self, what: str, real: Any, model: Any) -> None:
        if real != model:
            raise Mismatch(f"{what}: the manager says {real!r}, the model {model!r}")

    def after(self) -> None:
        """Everything there is to see, after every step."""
        pool = self.real.block_pool
        check_manager(self.real)
        self.same("free order", pool.free_queue(), self.model.queue)
        self.same("free", pool.num_free, len(self.model.queue))
        used = sum(count > 0 for count in self.model.count.values())
        self.same("held and popped", pool.num_held + pool.num_popped, used)
        self.same("reserved", pool.num_reserved, sum(len(s) for s in self.model.sinks))
        self.same("usage", round(self.real.usage, 9), round(used / self.model.capacity, 9))
        for name, books in self.model.books.items():
            tables = [[*s, *t] for s, t in zip(self.model.sinks, books.tables, strict=True)]
            self.same(f"tables of {name}", [list(x) for x in self.real.get_block_ids(name)], tables)
        if self.num_steps % self.deep_check_every == 0:
            self.deep_check()

    def deep_check(self) -> None:
        pool = self.real.block_pool
        counts = {b: pool.ref_count(b) for b in self.model.count if b not in pool.reserved_blocks()}
        self.same("counts", counts, {b: c for b, c in self.model.count.items() if b in counts})
        index = {(self.node_of_hash[digest], group): ids for (digest, group), ids in pool.index().items()}
        self.same("index", index, self.model.index)
        self.tensors.check_index(self.model, self.pending_blocks(), self.weights)

    def pending_blocks(self) -> set[int]:
        """Blocks that a batch not yet run will write."""
        items: Iterable[Item] = [item for batch in [*self.closed, self.open] for item in batch]
        return set().union(*(item.blocks_written(self.model.groups) for item in items))

    def wind_down(self) -> None:
        """Everybody leaves; nothing may stay behind (invariant 8), and the events are the index (9)."""
        self.settle()
        for live in self.waiting + self.running + self.loading:
            self.retire(live, RequestStatus.FINISHED_ABORTED)
        while self.popped:
            self.return_blocks()
        self.return_outside()
        self.same("blocks held at the end", self.real.block_pool.num_held, 0)
        self.same("blocks free at the end", self.real.block_pool.num_free, self.model.capacity)
        self.deep_check()
        self.take_events()
