"""What changed in the prefix-cache index, for routers and indexers.

The structs have vLLM's wire form (msgspec maps, tagged with the class name), so that a consumer of
its events reads these too. Order of events = order of changes: whoever applies them to a set
of (hash, group) always holds exactly what is in the index.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

__all__ = ["MEDIUM_GPU", "AllBlocksCleared", "BlockRemoved", "BlockStored", "KVCacheEvent", "apply_events"]

MEDIUM_GPU = "GPU"
"""Where the blocks of the pool live, as events name it."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """One unbroken run of blocks entered the index, each the first copy of its hash.

    ``block_hashes``, the ``token_ids`` (``block_size`` a block; empty where the request's tokens are
    unknown) and ``extra_keys`` pair up one to one. ``parent_block_hash`` is the hash of the
    block before the run, None at the start of a sequence.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The last copies of these hashes left the index, one after the other."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Every hash left the index at once."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def apply_events(index: set[tuple[bytes, int | None]], events: Iterable[KVCacheEvent]) -> None:
    """Bring a consumer's ``index`` of (hash, group) up to date. O(hashes in the events)."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            index.clear()
        elif isinstance(event, BlockStored):
            index.update((block_hash, event.group_idx) for block_hash in event.block_hashes)
        else:
            index.difference_update((block_hash, event.group_idx) for block_hash in event.block_hashes)
