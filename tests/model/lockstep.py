"""A manager that is two: the real one, and its twin in plain Python, which gets the same calls.

After each call what they answer, and then all of their state, has to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from kvpager import _native
from kvpager.blocks import KVCacheBlocks
from kvpager.config import CacheConfig
from kvpager.manager import KVCacheManager

from . import plain, pool

__all__ = ["Drift", "lockstep_manager"]

ONLY_ANSWERS = {"get_block_ids", "get_block_ids_for_computed_tokens", "get_blocks", "live_requests"}
"""Verbs of the manager that are asked all the time and change nothing: the state is not compared after them."""
ONLY_REAL = ("block_hash", "free_queue", "index", "is_computing", "outside_count", "ref_count", "reserved_blocks")
"""Questions to the pool that the comparison of the state asks on both sides anyway."""
COUNTS = ("num_free", "num_held", "num_popped", "num_reserved", "num_evictions", "generation", "usage")
OF_A_TABLE = ("num_committed", "num_released", "is_running")
OF_A_HOLDING = ("request", "junction", "is_stale", "commit_limit", "load_end", "lowest", "quiet_until")


class Drift(AssertionError):
    """The compiled part and plain Python do not agree."""


def lockstep_manager(config: CacheConfig, **options: Any) -> KVCacheManager:
    """To be used like the real one: the answers are the real one's."""
    return cast(KVCacheManager, _Lockstep(config, **options))


class _Both:
    """Looks like ``real``, but all of its verbs go through ``call``."""

    def __init__(self, real: Any, call: Callable[..., Any]) -> None:
        self._real, self._call = real, call

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return partial(self._call, name) if callable(value) else value


class _Lockstep(_Both):
    def __init__(self, config: CacheConfig, **options: Any) -> None:
        super().__init__(KVCacheManager(config, **options), self._call_managers)
        self._plain = plain.plain_manager(config, **options)
        self.block_pool = _Both(self._real.block_pool, self._call_pools)
        for question in ONLY_REAL:
            setattr(self.block_pool, question, getattr(self._real.block_pool, question))
        self._compare("before any call")

    def _call_managers(self, verb: str, *given: Any, **options: Any) -> Any:
        return self._call_both((self._real, self._plain), verb, given, options)

    def _call_pools(self, verb: str, *given: Any, **options: Any) -> Any:
        return self._call_both((self._real.block_pool, self._plain.block_pool), verb, given, options)

    def _call_both(self, sides: tuple[Any, Any], verb: str, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = tuple(list(value) if isinstance(value, Iterator) else value for value in given)
        answer = _outcome(getattr(sides[0], verb), given, options)
        twins_given = tuple(self._counterpart(value) for value in given)
        twins_options = {name: self._counterpart(value) for name, value in options.items()}
        with plain.plain_python():
            twins_answer = _outcome(getattr(sides[1], verb), twins_given, twins_options)
        try:
            _same("the answer", _told(self._real, answer), _told(self._plain, twins_answer))
            if verb not in ONLY_ANSWERS:
                self._compare("the state")
        except Drift as drift:
            words = [*map(repr, given), *(f"{name}={value!r}" for name, value in options.items())]
            drift.args = (f"{verb}({', '.join(words)}): {drift}",)
            raise drift from (answer if isinstance(answer, Exception) else None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _counterpart(self, value: Any) -> Any:
        """The twin's blocks for the real one's; their ids are the same."""
        if value is self._real.empty_kv_cache_blocks:
            return self._plain.empty_kv_cache_blocks
        if not isinstance(value, KVCacheBlocks) or value._pool is not self._real.block_pool:
            return value
        lists: Any = [pool.BlockList(blocks.ids()) for blocks in value._lists]
        twins = KVCacheBlocks(self._plain.block_pool, lists, value.junction)
        twins._generation = value._generation
        return twins

    def _compare(self, when: str) -> None:
        real, twin = _state(self._real), _state(self._plain)
        for what in real:
            _same(f"{when}: {what}", real[what], twin[what])


def _state(manager: KVCacheManager) -> dict[str, Any]:
    """Everything that later answers depend on. Events and blocks to zero are compared when somebody takes them."""
    pool = manager.block_pool
    blocks = range(pool.num_blocks)
    return {
        "counts": {name: getattr(pool, name) for name in COUNTS},
        "free queue": pool.free_queue(),
        "index": pool.index(),
        "reserved": pool.reserved_blocks(),
        "references": {block: (pool.ref_count(block), pool.outside_count(block)) for block in blocks},
        "states being computed": [block for block in blocks if pool.is_computing(block)],
        "tables (group, request)": {
            (group.group_id, name): (table.ids(), _of(table, OF_A_TABLE), sorted(table.step_ends))
            for group in manager.coordinator.single_type_managers
            for name, table in group.tables.items()
        },
        "statistics": manager.prefix_cache_stats,
        "order of admission": manager._holdings.request_ids(),
        "holdings": {one.request.request_id: _of(one, OF_A_HOLDING) for one in manager._holdings.values()},
    }


def _of(one: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def _outcome(verb: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return verb(*given, **options)
    except Exception as error:
        return error


def _told(manager: KVCacheManager, answer: Any) -> Any:
    """What an answer says, whichever side says it."""
    if isinstance(answer, Exception):
        return type(answer)
    if isinstance(answer, KVCacheBlocks):
        return answer is manager.empty_kv_cache_blocks, answer.junction, answer.get_block_ids()
    if isinstance(answer, (_native.DecodeSlots, plain.DecodeSlots)):
        return answer.refused, [(index, answer.block_ids(index)) for index in answer.changed()]
    return tuple(_told(manager, part) for part in answer) if isinstance(answer, tuple) else answer


def _same(what: str, real: Any, twin: Any) -> None:
    if real != twin:
        raise Drift(f"{what}: {_apart(real, twin)!r}, but in plain Python {_apart(twin, real)!r}")


def _apart(one: Any, other: Any) -> Any:
    """Of a dict, only what is not the same in the other one."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one
    return {k: _apart(v, other[k]) if k in other else v for k, v in one.items() if k not in other or other[k] != v}
