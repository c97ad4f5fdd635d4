"""Processor time spent inside the manager."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..manager import KVCacheManager

__all__ = ["StopWatch"]

_TIMED = (
    "allocate_slots",
    "free",
    "get_block_ids",
    "get_computed_blocks",
    "limit_prefill_step",
    "new_step_starts",
    "probe",
    "take_events",
)


class StopWatch:
    """Stands in for a manager in front of a scheduler and times each call.

    ``cpu_seconds`` is this thread's processor time between a call's start and its end, the watch's own look
    at the clock included (some tenths of a microsecond a call). Calls that the manager makes of
    itself are inside and not counted twice. Everything else is the manager's.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._nanoseconds = 0
        for name in _TIMED:
            setattr(self, name, self._timed(getattr(manager, name)))

    @property
    def cpu_seconds(self) -> float:
        """The time so far."""
        return self._nanoseconds / 1e9

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                self._nanoseconds += clock() - start

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
