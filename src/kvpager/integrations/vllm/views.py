"""What vLLM's scheduler and its connectors touch below the manager, as views of kvpager's own parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...blocks import Block, GroupBlocks, KVCacheBlocks
from ...manager import KVCacheManager
from ...pool import BlockList, BlockPool

__all__ = ["ConnectorBlockPool", "Coordinator", "GroupView", "HostBlocks"]


class ConnectorBlockPool:
    """The block pool as connectors know it. Blocks are given as views or as ids."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._pool = manager.block_pool
        self.num_gpu_blocks = self._pool.num_blocks
        self.enable_caching = manager.enable_caching
        self.blocks: Sequence[PoolBlock] = _AllBlocks(self._pool)
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeBlockQueue(self._pool)

    def get_num_free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self._pool.num_free

    def get_usage(self) -> float:
        """The part of the blocks that is in use, 0 to 1."""
        return self._pool.usage

    def touch(self, blocks: Iterable[Block | int]) -> None:
        """Take a reference to each block; null blocks are passed over."""
        self._pool.touch(_ids(blocks))

    def free_blocks(self, ordered_blocks: Iterable[Block | int]) -> None:
        """Return blocks that were popped or touched; null blocks are passed over."""
        self._pool.free_blocks(_ids(ordered_blocks))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take blocks out of the index."""
        self._pool.evict_blocks(block_ids)


def _ids(blocks: Iterable[Block | int]) -> list[int]:
    ids = (block if isinstance(block, int) else block.block_id for block in blocks)
    return [block_id for block_id in ids if block_id]


class _AllBlocks(Sequence["PoolBlock"]):
    """Block i of the pool, for i in order."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.num_blocks

    def __getitem__(self, index: Any) -> Any:
        ids = range(len(self))[index]
        if isinstance(ids, int):
            return PoolBlock(self._pool, ids)
        return [PoolBlock(self._pool, block_id) for block_id in ids]


@dataclass(frozen=True)
class PoolBlock(Block):
    """A block as vLLM shows it: its hash has the group behind it, as four bytes, most significant first."""

    @property
    def block_hash(self) -> bytes | None:
        """The key under which it can be hit, if it can. O(1)."""
        block_hash, group = self._pool.block_hash(self.block_id), self._pool.block_group(self.block_id)
        return None if block_hash is None or group is None else block_hash + group.to_bytes(4, "big")


class HostBlocks(KVCacheBlocks):
    """Answers whose blocks are those of the pool that connectors see."""

    __slots__ = ()

    block_class = PoolBlock


class FreeBlockQueue:
    """How many blocks are free now; anything else of vLLM's queue is refused by name."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return self._pool.num_free

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"block_pool.free_block_queue.{name}: kvpager's free queue is not a list of vLLM's block objects; a "
            f"connector that walks it needs KVPAGER_VLLM=0"
        )


class Coordinator:
    """The coordinator as vLLM's scheduler knows it. ``classes`` are those of vLLM that its groups pass for."""

    def __init__(self, manager: KVCacheManager, classes: Sequence[type]) -> None:
        self._manager = manager
        self.block_pool = manager.block_pool
        self.num_uncached_common_prefix_tokens = 0
        self.single_type_managers = tuple(GroupView(manager, group, cls) for group, cls in enumerate(classes))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Sequence[Block]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that reaching ``num_tokens`` takes: at once, or (with the cap) at most on the way."""
        needs = self._manager.coordinator.plan(
            request_id,
            [BlockList(block.block_id for block in blocks) for blocks in new_computed_blocks],
            num_computed_tokens=total_computed_tokens,
            num_main_tokens=num_tokens_main_model,
            num_slots=num_tokens,
            num_encoder_tokens=num_encoder_tokens,
            on_the_way=apply_admission_cap,
        )
        return sum(needs)

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[bytes], max_cache_hit_length: int
    ) -> tuple[tuple[Sequence[Block], ...], tuple[int, ...]]:
        """Each group's longest hit on its own: for connectors that bring what the other groups lack."""
        matches = self._manager.coordinator.match_each(block_hashes, max_cache_hit_length)
        views = tuple(GroupBlocks(self._manager.block_pool, blocks, PoolBlock) for blocks, _ in matches)
        return views, tuple(num_tokens for _, num_tokens in matches)


class GroupView:
    """One group's manager as vLLM's tests and connectors look at it. It passes for vLLM's class of that kind."""

    def __init__(self, manager: KVCacheManager, group: int, passes_for: type) -> None:
        self._passes_for = passes_for
        self.block_size = manager.kv_cache_config.specs[group].block_size
        self.kv_cache_group_id = group
        coordinator, pool = manager.coordinator, manager.block_pool
        self.req_to_blocks = ByRequest(
            manager, lambda name: GroupBlocks(pool, coordinator.tables(name)[group], PoolBlock)
        )
        self.num_cached_block = ByRequest(manager, lambda name: coordinator.num_committed_blocks(name)[group])

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance asks here
        return self._passes_for


class ByRequest(Mapping[str, Any]):
    """Request id to something that is read now."""

    def __init__(self, manager: KVCacheManager, read: Callable[[str], Any]) -> None:
        self._coordinator, self._read = manager.coordinator, read

    def __getitem__(self, request_id: str) -> Any:
        if request_id not in self._coordinator.request_ids():
            raise KeyError(request_id)
        return self._read(request_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._coordinator.request_ids())

    def __len__(self) -> int:
        return len(self._coordinator.request_ids())
