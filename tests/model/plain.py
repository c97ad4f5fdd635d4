"""A manager whose state is all plain Python: the twin of one on the compiled part.

What a manager takes from ``kvpager._native`` has a class of the same name here, in `pool` or in `rules`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvpager import blocks, coordinator, manager, pool, single_type
from kvpager.config import CacheConfig
from kvpager.manager import KVCacheManager
from kvpager.request import RequestLike

from .pool import BlockList, BlockPool
from .rules import UNBOUNDED, GroupRule

__all__ = ["PLAIN", "DecodeSlots", "Holding", "Holdings", "Stepper", "plain_manager", "plain_python"]


class Holding:
    def __init__(self, request: RequestLike, tables: Sequence[BlockList]) -> None:
        self.request, self.tables = request, list(tables)
        self.junction = self.load_end = self.lowest = 0
        self.is_stale = False
        self.commit_limit: int | None = None
        self.quiet_until = -1


class Holdings:
    def __init__(self) -> None:
        self._by_id: dict[str, Holding] = {}

    def add(self, request_id: str, holding: Holding) -> None:
        assert request_id not in self._by_id
        self._by_id[request_id] = holding

    def get(self, request_id: str) -> Holding | None:
        return self._by_id.get(request_id)

    def remove(self, request_id: str) -> None:
        self._by_id.pop(request_id, None)

    def request_ids(self) -> list[str]:
        return list(self._by_id)

    def values(self) -> list[Holding]:
        return list(self._by_id.values())


class DecodeSlots:
    def __init__(self) -> None:
        self.refused: int | None = None
        self._ids: dict[int, tuple[list[int], ...]] = {}

    def add(self, index: int, lists: Sequence[BlockList]) -> None:
        if any(map(len, lists)):
            self._ids[index] = tuple(blocks.ids() for blocks in lists)

    def changed(self) -> list[int]:
        return list(self._ids)

    def block_ids(self, index: int) -> tuple[list[int], ...]:
        return self._ids.get(index, ())


class Stepper:
    """Leaves every step to the manager's Python; it finds the bounds, and frees."""

    def __init__(
        self,
        pool: BlockPool,
        holdings: Holdings,
        rules: Sequence[GroupRule],
        tables: Sequence[dict[str, BlockList]],
        *,
        commits: bool,
        **_: object,
    ) -> None:
        self._pool, self._holdings, self._rules, self._tables = pool, holdings, rules, tables
        self._commits = commits

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        """Whatever else may be served shortly takes the long way."""
        return lambda *_, **__: NotImplemented

    def step_all(
        self, requests: Any, counts: Any, lookahead: int, reserved: int, runs: bool, start: int, _: Any
    ) -> int:
        return start

    def free(self, request: RequestLike) -> None:
        """What is dead is so as seen from the longest hit that the request leaves behind."""
        holding = self._holdings.get(request.request_id)
        if holding is None or holding.request is not request:
            return
        prompt, junction = request.num_prompt_tokens, holding.junction
        processed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        margin = max((rule.hit_margin for rule in self._rules), default=0)
        dead, useful = [], []
        for rule in self._rules:
            longest_hit = max(0, rule.num_shareable(processed, prompt) - margin) // rule.alignment * rule.alignment
            dead.append(rule.dead(longest_hit, prompt))
            useful.append(rule.needed_for_hit(junction) if junction else range(0))
        self._pool.free_tables(holding.tables, [rule.block_size for rule in self._rules], dead, useful)
        for tables in self._tables:
            del tables[request.request_id]
        self._holdings.remove(request.request_id)

    def find_bounds(self, holding: Holding, num_prompt_tokens: int) -> None:
        commits = self._commits and not holding.is_stale
        groups = list(zip(self._rules, holding.tables, strict=True))
        quiet = [rule.quiet_until(table, num_prompt_tokens, commits) for rule, table in groups]
        loads = holding.commit_limit is not None  # then each call may be the one that computes what did not come
        holding.quiet_until = -1 if loads else min(quiet, default=UNBOUNDED)
        holding.lowest = max((rule.lowest_computed(table, num_prompt_tokens) for rule, table in groups), default=0)


PLAIN = {plain.__name__: plain for plain in (BlockList, BlockPool, DecodeSlots, GroupRule, Holding, Holdings, Stepper)}
_NAMES = [(m, name) for m in (blocks, coordinator, manager, pool, single_type) for name in PLAIN if hasattr(m, name)]


@contextmanager
def plain_python() -> Iterator[None]:
    """Within it, a manager's modules find the plain classes under the names of the compiled ones."""
    compiled = [(module, name, getattr(module, name)) for module, name in _NAMES]
    for module, name in _NAMES:
        setattr(module, name, PLAIN[name])
    try:
        yield
    finally:
        for module, name, value in compiled:
            setattr(module, name, value)


def plain_manager(config: CacheConfig, **options: Any) -> KVCacheManager:
    """Its verbs are to be called within `plain_python`. It does not warn: its twin does."""
    with plain_python(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return KVCacheManager(config, **options)
