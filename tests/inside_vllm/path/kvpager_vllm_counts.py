"""Counts the managers that vLLM builds, kvpager's and its own, and what the last one did.

Patches both classes in place.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager as VLLM

from kvpager.integrations.vllm.v0_25_1 import KVCacheManager as KVPAGER

counts: dict[str, int] = {"kvpager": 0, "vLLM": 0, "refused": 0, "steps": 0, "checks": 0, "held": 0}


def count(after_step: Any = lambda: None) -> None:
    """Begin to count; ``after_step`` is called when a scheduler is done with its manager for a step. Idempotent."""
    for name, cls in (("kvpager", KVPAGER), ("vLLM", VLLM)):
        if not hasattr(cls, "is_counted"):
            cls.is_counted = True
            _count_built(name, cls)
            _count_steps(cls, after_step)


def _count_built(name: str, cls: Any) -> None:
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        counts.update({name: counts[name] + 1, "refused": 0, "steps": 0, "checks": 0, "held": 0})
        allocate = self.allocate_slots

        def allocate_slots(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            counts["refused"] += blocks is None
            return blocks

        self.allocate_slots = allocate_slots

    cls.__init__ = __init__


def _count_steps(cls: Any, after_step: Any) -> None:
    take_events = cls.take_events

    def counting_take_events(self: Any) -> Any:
        pool = self.block_pool
        counts["steps"] += 1
        counts["held"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if cls is KVPAGER and (counts["steps"] % 8 == 0 or not counts["held"]):
            self.check()
            counts["checks"] += 1
        after_step()
        return take_events(self)

    cls.take_events = counting_take_events
