"""Processor time spent inside the manager."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..manager import KVCacheManager

__all__ = ["StopWatch"]

_TIMED = [name for name, value in vars(KVCacheManager).items() if not name.startswith("_") and callable(value)]


class StopWatch:
    """Stands in for a manager in front of a scheduler and times each call.

    Calls that the manager makes of itself are inside and not counted twice; attributes are the
    manager's own. A look at the thread's processor time is a system call and costs as
    much as a decode step's work, so calls are timed by the wall clock, and the sum is scaled by the
    share of a processor that this thread got since the watch was made: on a busy machine the time
    in which others ran is spread over all code alike. The watch's own cost (some tenths of a
    microsecond a call) is included.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._nanoseconds = 0
        self._wall_start = time.perf_counter_ns()
        self._cpu_start = time.thread_time_ns()
        for name in _TIMED:
            setattr(self, name, self._timed(getattr(manager, name)))

    @property
    def cpu_seconds(self) -> float:
        """Processor time inside the manager so far."""
        cpu = time.thread_time_ns() - self._cpu_start
        wall = time.perf_counter_ns() - self._wall_start
        return self._nanoseconds / 1e9 * min(1.0, cpu / wall)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return method(*args, **kwargs)
            finally:
                self._nanoseconds += clock() - start

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
