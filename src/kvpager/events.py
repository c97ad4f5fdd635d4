"""What changed in the prefix-cache index, for routers and indexers.

The structs have vLLM's wire form (msgspec maps, tagged with the class name), so that a consumer of
its events reads these too. Order of events = order of changes: whoever applies them to a set
of (hash, group) always holds exactly what is in the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .attention import AttentionSpec
from .request import EventSource, RequestLike

__all__ = [
    "MEDIUM_GPU",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "KVCacheEvent",
    "StoredEvents",
    "apply_events",
]

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


class StoredEvents:
    """Makes the `BlockStored` events of one call that may enter ``tokens`` of a request into the index.

    What they tell of the request is read here, before the call changes anything: a request that fails to say it
    raises now. O(tokens).
    """

    def __init__(
        self, request: RequestLike, source: EventSource, tokens: range, specs: Sequence[AttentionSpec], hash_size: int
    ) -> None:
        self._specs = specs
        self._hash_size = hash_size
        self._first = tokens.start
        self._token_ids = list(request.all_token_ids[tokens.start : tokens.stop])
        self._hashes = request.block_hashes
        self._lora = (source.lora_id, source.lora_name)
        has_keys = source.extra_keys(tokens.start, tokens.stop) is not None  # nearly never
        self._extra_keys = {
            size: {
                p: source.extra_keys(p * size, (p + 1) * size) for p in range(tokens.start // size, tokens.stop // size)
            }
            for size in {spec.block_size for spec in specs}
            if has_keys
        }

    def event(self, group: int, run: range) -> BlockStored:
        """The blocks of these positions of a group are in the index now. O(tokens of the run)."""
        spec = self._specs[group]
        size, stride = spec.block_size, spec.block_size // self._hash_size
        keys = self._extra_keys.get(size, {})
        return BlockStored(
            block_hashes=list(self._hashes[(run.start + 1) * stride - 1 : run.stop * stride : stride]),
            parent_block_hash=self._hashes[run.start * stride - 1] if run.start else None,
            token_ids=self._token_ids[run.start * size - self._first : run.stop * size - self._first],
            block_size=size,
            lora_id=self._lora[0],
            medium=MEDIUM_GPU,
            lora_name=self._lora[1],
            extra_keys=[keys.get(position) for position in run],
            group_idx=group,
            kv_cache_spec_kind=spec.kind,
            kv_cache_spec_sliding_window=spec.sliding_window,
        )


def apply_events(index: set[tuple[bytes, int | None]], events: Iterable[KVCacheEvent]) -> None:
    """Bring a consumer's ``index`` of (hash, group) up to date. O(hashes in the events)."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            index.clear()
        elif isinstance(event, BlockStored):
            index.update((block_hash, event.group_idx) for block_hash in event.block_hashes)
        else:
            index.difference_update((block_hash, event.group_idx) for block_hash in event.block_hashes)
