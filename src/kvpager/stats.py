"""What the cache did: hits per admitted request, and how long sampled blocks lived."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from .counts import as_integer, as_number
from .errors import ConfigError

__all__ = ["BlockResidency", "PrefixCacheStats", "ResidencySampler"]


@dataclass(kw_only=True)
class PrefixCacheStats:
    """Tokens queried and hit since the last call of ``make_prefix_cache_stats``.

    A request counts once, when it is admitted; one that returns after a preemption counts under
    ``preempted_*`` instead.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one admission of a request with ``num_tokens`` tokens, ``num_hits`` of them hit."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


@dataclass(frozen=True, kw_only=True)
class BlockResidency:
    """One sampled block's stay, told when it was evicted while cached. Seconds."""

    lifetime_seconds: float
    idle_seconds: float
    reuse_gaps_seconds: tuple[float, ...]


@dataclass
class _Stay:
    born: float
    last_use: float
    uses: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_USES))


_REMEMBERED_USES = 4


class ResidencySampler:
    """Follows a fraction ``sample_rate`` of allocated blocks until they are evicted.

    ``clock`` gives seconds; time and randomness come in by argument, so a replay is exact. The
    gaps are those between a block's last four uses.
    """

    def __init__(self, sample_rate: float, *, clock: Callable[[], float], seed: int = 0) -> None:
        self.sample_rate = as_number(sample_rate, "sample_rate")
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(f"sample_rate must be above 0 and at most 1, got {sample_rate!r}")
        if not callable(clock):
            raise ConfigError(f"clock must be a function that gives seconds, got {clock!r}")
        self._clock = clock
        self._random = random.Random(as_integer(seed, "seed"))
        self._stays: dict[int, _Stay] = {}
        self._finished: list[BlockResidency] = []

    def allocated(self, block_id: int) -> None:
        """A block got new content: perhaps follow it. O(1)."""
        self._stays.pop(block_id, None)
        if self._random.random() < self.sample_rate:
            now = self._clock()
            self._stays[block_id] = _Stay(now, now)

    def used(self, block_id: int) -> None:
        """A cached block served a hit. O(1)."""
        stay = self._stays.get(block_id)
        if stay is not None:
            stay.last_use = self._clock()
            stay.uses.append(stay.last_use)

    def evicted(self, block_id: int) -> None:
        """A cached block left the index. O(1)."""
        stay = self._stays.pop(block_id, None)
        if stay is not None:
            now = self._clock()
            gaps = tuple(later - earlier for earlier, later in pairwise(stay.uses))
            self._finished.append(
                BlockResidency(
                    lifetime_seconds=now - stay.born, idle_seconds=now - stay.last_use, reuse_gaps_seconds=gaps
                )
            )

    def reset(self) -> None:
        """Forget every block that is being followed, and what was not drained."""
        self._stays.clear()
        self._finished.clear()

    def drain(self) -> list[BlockResidency]:
        """The stays that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished
