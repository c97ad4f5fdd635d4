"""Make wrong reads visible: blocks that hold nothing of use are filled with NaN."""

from __future__ import annotations

from ..attention import ceil_div
from ..manager import KVCacheManager
from ..scheduler import ScheduledRequest, SchedulerOutput
from .storage import PagedStorage

__all__ = ["Poison"]


class Poison:
    """Fills a block with NaN when it is handed out, and when it is neither held nor in the index any more.

    An evictable block keeps what it has, since it may be hit. Whoever reads a block that isn't the request's own, or
    a slot before it is written, gets NaN logits.
    """

    def __init__(self, manager: KVCacheManager, storage: PagedStorage) -> None:
        self._manager = manager
        self._storage = storage
        self._useless: set[int] = set()

    def before(self, output: SchedulerOutput) -> None:
        """To be called between ``schedule`` and the forward pass. O(pool): a check, not for production."""
        fresh = {block for scheduled in output.scheduled for block in self._without_content(scheduled)}
        pool = self._manager.block_pool
        useless = {
            block for block in range(pool.num_blocks) if not pool.ref_count(block) and pool.block_hash(block) is None
        }
        self._storage.poison(fresh | (useless - self._useless))
        self._useless = useless

    def _without_content(self, scheduled: ScheduledRequest) -> set[int]:
        """The request's blocks behind what is computed: this step is the first to write there."""
        specs = self._manager.kv_cache_config.specs
        return {
            block
            for spec, table in zip(specs, scheduled.block_ids, strict=True)
            for block in table[ceil_div(scheduled.start, spec.block_size) :]
            if block
        }
