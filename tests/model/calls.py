"""A small manager with requests beside it, and calls on both that can be told apart from their arguments.

A `Call` names what it needs of a `World` (`Of`), so that the same call can be made in two worlds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvpager import (
    BlockHasher,
    CacheConfig,
    FullAttention,
    InvariantError,
    KVCacheManager,
    KVPagerError,
    Mamba,
    Request,
    SlidingWindow,
)

NUM_BLOCKS = 16
NAMES = ("a", "b", "c", "plain", "unhashed", "twin")
"""The requests of a world. The first three share a prefix; ``twin`` has the id of ``a``; ``plain`` is a `Request`, the
others are a host's own."""

LAYOUTS = (
    [FullAttention(block_size=4), SlidingWindow(block_size=4, window=7)],
    [FullAttention(block_size=4), Mamba(block_size=4)],
    [FullAttention(block_size=4)],
    [SlidingWindow(block_size=2, window=5), FullAttention(block_size=4)],
)


BAD = (None, True, -1, 2**31, 2**63, 2**70, math.nan, 1.5, "x", b"", [], {}, np.int64(3), np.float32(1), object())
OF_A_HOST = {"request", "requests", "manager"}
"""Any object with the right attributes will do; one without says which it lacks."""


def says(error: BaseException, names: tuple[str, ...]) -> bool:
    """Whether it is the package's own error, or Python's and says which parameter is of a wrong type."""
    text = str(error)
    if isinstance(error, KVPagerError):
        return not isinstance(error, InvariantError)
    if isinstance(error, AttributeError):
        return bool(OF_A_HOST & set(names)) and "has no attribute" in text
    is_python = isinstance(error, (TypeError, ValueError)) and "incompatible function arguments" not in text
    return is_python and any(name in text for name in names)


class Boom(Exception):
    """What a host's request raises while it is read."""


class Meter:
    """Counts what is read of a host's requests; the read of number ``fails_at`` fails."""

    def __init__(self) -> None:
        self.reads = 0
        self.fails_at = 0
        self.last = ""

    def arm(self, fails_at: int) -> None:
        self.reads, self.fails_at, self.last = 0, fails_at, ""

    def read(self, name: str) -> None:
        self.reads += 1
        self.last = name
        if self.reads == self.fails_at:
            raise Boom(name)


class HostStatus:
    def __init__(self, inner: Any, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    @property
    def name(self) -> str:
        self._meter.read("status.name")
        return self._inner.name  # type: ignore[no-any-return]


class Host:
    """A host's own request: whatever is read of it is metered."""

    def __init__(self, inner: Request, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        self._meter.read(name)
        value = getattr(self._inner, name)
        if name == "status":
            return HostStatus(value, self._meter)
        return self._extra_keys if name == "extra_keys" else value

    def _extra_keys(self, start: int, stop: int) -> Any:
        self._meter.read("extra_keys()")
        return self._inner.extra_keys(start, stop)

    def __repr__(self) -> str:
        return f"Host({self._inner!r})"


class World:
    """A manager, its requests, hits that were looked up before, and blocks that outsiders hold."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)
        config = CacheConfig.uniform(NUM_BLOCKS, rng.choice(LAYOUTS))
        options: dict[str, Any] = {"log_stats": rng.random() < 0.7, "enable_kv_cache_events": rng.random() < 0.7}
        options["watermark"] = rng.choice([0.0, 0.1])
        self.manager = KVCacheManager(config, max_model_len=40, max_num_batched_tokens=16, **options)
        self.other = KVCacheManager(config, max_model_len=40)
        self.meter = Meter()
        self.inner = {name: self._request(name, config, rng) for name in NAMES}
        self.requests: dict[str, Any] = {
            name: inner if name == "plain" else Host(inner, self.meter) for name, inner in self.inner.items()
        }
        self.saved: dict[str, tuple[Any, int]] = {}
        self.popped: list[int] = []
        self.given: dict[str, Any] = {}

    @staticmethod
    def _request(name: str, config: CacheConfig, rng: Random) -> Request:
        shared, own = list(range(rng.choice([0, 8, 12]))), [100 * ord(name[0]) + i for i in range(rng.randint(1, 14))]
        hasher = None if name == "unhashed" else BlockHasher.for_config(config)
        salt = "salt" if name == "c" and rng.random() < 0.3 else None
        request_id = "a" if name == "twin" else name
        return Request(request_id, shared + own, block_hasher=hasher, max_tokens=rng.choice([None, 4]), cache_salt=salt)

    def state(self) -> object:
        """All that can be seen, but for what `take` hands out."""
        pool, coordinator = self.manager.block_pool, self.manager.coordinator
        tables = [
            (name, [table.ids() for table in coordinator.tables(name)], coordinator.num_committed_blocks(name))
            for name in coordinator.request_ids()
        ]
        refs = [(pool.ref_count(i), pool.outside_count(i)) for i in range(NUM_BLOCKS)]
        stats = self.manager.prefix_cache_stats
        told = (pool.num_evictions, pool.reserved_blocks(), stats and replace(stats))
        return tables, pool.free_queue(), pool.index(), refs, told

    def take(self) -> tuple[list[Any], list[int]]:
        """Events and new blocks since the last call."""
        return self.manager.take_events(), self.manager.take_new_block_ids()

    def progress(self, name: str, num_new: int, token: int) -> None:
        """A step has been computed: what a scheduler writes to a request."""
        request = self.inner[name]
        request.num_computed_tokens = min(request.num_tokens, request.num_computed_tokens + num_new)
        if token and request.num_computed_tokens == request.num_tokens < 38:
            request.append_output_token_ids(token)


class Of(NamedTuple):
    """Something of the world in which a call is made."""

    what: str
    name: str = ""

    def in_world(self, world: World) -> Any:
        return _LOOK_UP[self.what](world, self.name)


_LOOK_UP: dict[str, Callable[[World, str], Any]] = {
    "request": lambda world, name: world.requests[name],
    "requests": lambda world, name: [world.requests[each] for each in name.split()],
    "hit": lambda world, name: world.manager.get_computed_blocks(world.inner[name])[0],
    "num_hit": lambda world, name: world.manager.get_computed_blocks(world.inner[name])[1],
    "saved": lambda world, name: world.saved.get(name, (None, 0))[0],
    "num_saved": lambda world, name: world.saved.get(name, (None, 0))[1],
    "foreign": lambda world, _: world.other.empty_kv_cache_blocks,
    "ids": lambda world, name: [i for ids in world.manager.get_block_ids(name) for i in ids],
    "popped": lambda world, name: list(reversed(world.popped)),
    "views": lambda world, name: world.manager.get_blocks(name).blocks,
}


class Call(NamedTuple):
    """A public call; ``bad`` names arguments that are bad, ``token`` is sampled when it ends a step (0: none is)."""

    method: str
    arguments: dict[str, Any]
    bad: tuple[str, ...] = ()
    token: int = 0

    def make(self, world: World, fails_at: int = 0) -> Any:
        target: Any = world.manager
        for name in self.method.split("."):
            target = getattr(target, name)
        given = {k: v.in_world(world) if isinstance(v, Of) else v for k, v in self.arguments.items()}
        world.given = given
        world.meter.arm(fails_at)
        try:
            return target(*given.values()) if self.method.startswith("block_pool.") else target(**given)
        finally:
            world.meter.fails_at = 0

    def settle(self, world: World, answer: Any) -> None:
        """What the host does after a call that was good."""
        request = self.arguments.get("request")
        name = request.name if isinstance(request, Of) else ""
        if name and self.method in ("free", "pop_blocks_for_free"):
            world.inner[name].num_computed_tokens = 0
        if self.method in ("pop_blocks_for_free", "block_pool.allocate"):
            world.popped += answer
        if self.method == "block_pool.free_blocks" and not self.bad:
            world.popped = []
        if name and self.method == "get_computed_blocks":
            world.saved[name] = answer
        if name and self.method == "allocate_slots" and answer is not None:
            counts = ("num_new_tokens", "num_new_computed_tokens", "num_external_computed_tokens")
            world.progress(name, sum(world.given[count] for count in counts), self.token)


def draw_call(rng: Random, world: World, method: str) -> Call:
    """The call with arguments as a host gives them, more or less."""
    arguments = _ARGUMENTS[method](rng, rng.choice(NAMES))
    call = Call(method, arguments)
    if method != "allocate_slots":
        return call
    name = arguments["request"].name
    if world.manager.coordinator.is_live(world.requests[name]):
        arguments |= {"num_new_computed_tokens": 0, "new_computed_blocks": None, "num_external_computed_tokens": 0}
        arguments["delay_cache_blocks"] = False
        left = max(1, world.inner[name].num_tokens - world.inner[name].num_computed_tokens)
        arguments["num_new_tokens"] = rng.randint(1, left)
    return call._replace(token=rng.choice([0, 7, 8]))


def _allocate(rng: Random, name: str) -> dict[str, Any]:
    hit = rng.choice(["hit", "hit", "hit", "saved", ""])
    external = rng.choice([0, 0, 0, 4])
    return {
        "request": Of("request", name),
        "num_new_tokens": rng.randint(1, 8),
        "num_new_computed_tokens": Of(f"num_{hit}", rng.choice(NAMES) if rng.random() < 0.05 else name) if hit else 0,
        "new_computed_blocks": Of(hit, name) if hit else None,
        "num_lookahead_tokens": rng.choice([0, 0, 2]),
        "num_external_computed_tokens": external,
        "delay_cache_blocks": bool(external) and rng.random() < 0.5,
        "num_encoder_tokens": 0,
        "full_sequence_must_fit": rng.random() < 0.2,
        "reserved_blocks": rng.choice([0, 0, 1]),
        "has_scheduled_reqs": rng.random() < 0.5,
    }


def _probe(rng: Random, name: str) -> dict[str, Any]:
    names = ("new_computed_blocks", "num_new_computed_tokens", "delay_cache_blocks")
    return {k: v for k, v in _allocate(rng, name).items() if k not in names}


def _decode(rng: Random, name: str) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 3))
    return {
        "requests": Of("requests", " ".join(names)),
        "num_new_tokens": rng.choice([None, [1] * len(names)]),
        "num_lookahead_tokens": 0,
        "reserved_blocks": 0,
        "has_scheduled_reqs": True,
    }


def _some_ids(rng: Random, name: str) -> Any:
    return rng.choice([Of("ids", name), [rng.randrange(NUM_BLOCKS) for _ in range(rng.randint(0, 3))]])


_Arguments = Callable[[Random, str], dict[str, Any]]


def _of_request(rng: Random, name: str) -> dict[str, Any]:
    return {"request": Of("request", name)}


def _of_id(rng: Random, name: str) -> dict[str, Any]:
    return {"request_id": name}


def _of_block(rng: Random, name: str) -> dict[str, Any]:
    return {"block_id": rng.randrange(NUM_BLOCKS)}


def _nothing(rng: Random, name: str) -> dict[str, Any]:
    return {}


_ARGUMENTS: dict[str, _Arguments] = {
    "get_computed_blocks": _of_request,
    "probe": _probe,
    "fits_alone": lambda r, n: _of_request(r, n) | {"num_lookahead_tokens": 2, "num_encoder_tokens": 0},
    "longest_that_fits": lambda r, n: {"num_lookahead_tokens": 2, "num_encoder_tokens": 0},
    "allocate_slots": _allocate,
    "allocate_decode_slots": _decode,
    "limit_prefill_step": lambda r, n: (
        _of_request(r, n) | {"num_computed_tokens": 4, "num_new_tokens": r.randint(1, 9), "junction": r.choice([0, 8])}
    ),
    "cache_blocks": lambda r, n: _of_request(r, n) | {"num_computed_tokens": r.randint(0, 20)},
    "remove_skipped_blocks": lambda r, n: (
        _of_id(r, n) | {"total_computed_tokens": r.randint(0, 12), "num_prompt_tokens": r.choice([None, 8])}
    ),
    "new_step_starts": _nothing,
    "invalidate_blocks": lambda r, n: {"block_ids": _some_ids(r, n)},
    "free": _of_request,
    "pop_blocks_for_free": _of_request,
    "evict_blocks": lambda r, n: {"block_ids": _some_ids(r, n)},
    "reset_prefix_cache": lambda r, n: {"lazy": r.random() < 0.5},
    "get_blocks": _of_id,
    "get_block_ids": _of_id,
    "get_block_ids_for_computed_tokens": lambda r, n: _of_id(r, n) | {"num_computed_tokens": r.randint(0, 12)},
    "get_num_common_prefix_blocks": lambda r, n: {"running_request_id": n},
    "take_new_block_ids": _nothing,
    "take_events": _nothing,
    "make_prefix_cache_stats": _nothing,
    "create_kv_cache_blocks": lambda r, n: {"blocks": Of("views", n)},
    "live_requests": _nothing,
    "block_pool.allocate": lambda r, n: {"num_blocks": r.randint(0, 2)},
    "block_pool.touch": lambda r, n: {"block_ids": []},
    "block_pool.free_blocks": lambda r, n: {"block_ids": Of("popped")},
    "block_pool.evict_blocks": lambda r, n: {"block_ids": _some_ids(r, n)},
    "block_pool.reserve": lambda r, n: {"num_blocks": int(r.random() < 0.02)},
    "block_pool.block_group": _of_block,
    "block_pool.block_hash": _of_block,
    "block_pool.outside_count": _of_block,
    "block_pool.ref_count": _of_block,
    "block_pool.free_queue": _nothing,
    "block_pool.index": _nothing,
    "block_pool.new_step_starts": _nothing,
    "block_pool.reserved_blocks": _nothing,
    "block_pool.reset_prefix_cache": _nothing,
    "block_pool.take_events": _nothing,
    "block_pool.take_new_block_ids": _nothing,
}

METHODS = tuple(_ARGUMENTS)
OF_REQUESTS = tuple(m for m, draw in _ARGUMENTS.items() if {"request", "requests"} & draw(Random(0), "a").keys())
IN_EVERY_ORDER = (
    *("allocate_slots",) * 6,
    *("allocate_decode_slots", "get_computed_blocks", "probe", "cache_blocks", "remove_skipped_blocks") * 2,
    *("free", "pop_blocks_for_free", "invalidate_blocks", "evict_blocks", "reset_prefix_cache", "new_step_starts"),
    *("block_pool.allocate", "block_pool.free_blocks"),
)
