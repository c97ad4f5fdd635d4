"""All invariants of a manager, in one place. Tests, ``replay --check`` and debuggers call it.

Every block is in exactly one state: null, reserved, held, popped or free.
"""

from __future__ import annotations

from collections import Counter

from .errors import InvariantError
from .manager import KVCacheManager
from .pool import NULL_BLOCK, BlockPool

__all__ = ["check_manager"]


def check_manager(manager: KVCacheManager) -> None:
    """Raise ``InvariantError``, with both sides of the equation, if an invariant does not hold. O(pool + tables)."""
    pool = manager.block_pool
    held = _held_positions(manager)
    _check_counts(pool)
    _check_references(pool, held)
    _check_queue(pool)
    _check_index(pool)
    _check_tables(manager)
    if not manager.live_requests():
        _equal(pool.num_held, 0, "blocks held while no request is live")


def _equal(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise InvariantError(f"{what}: {found} is not {expected}")


def _held_positions(manager: KVCacheManager) -> Counter[int]:
    return Counter(
        block_id
        for request_id in manager.coordinator.request_ids()
        for table in manager.coordinator.tables(request_id)
        for block_id in table.ids()
        if block_id != NULL_BLOCK
    )


def _check_counts(pool: BlockPool) -> None:
    total = pool.num_free + pool.num_held + pool.num_popped + pool.num_reserved + 1
    _equal(total, pool.num_blocks, "free + held + popped + reserved + the null block = all blocks")


def _check_references(pool: BlockPool, held: Counter[int]) -> None:
    states: Counter[str] = Counter()
    for block_id in range(1, pool.num_blocks):
        refs, outside = pool.ref_count(block_id), pool.outside_count(block_id)
        if block_id in pool.reserved_blocks():
            states["reserved"] += 1
            _equal((refs, held[block_id]), (1, 0), f"references and table positions of reserved block {block_id}")
            continue
        _equal(refs - outside, held[block_id], f"references of requests to block {block_id} and its table positions")
        states["held" if held[block_id] else "popped" if outside else "free"] += 1
    for state in ("free", "held", "popped", "reserved"):
        _equal(states[state], getattr(pool, f"num_{state}"), f"blocks counted as {state}")


def _check_queue(pool: BlockPool) -> None:
    queue = pool.free_queue()
    _equal(len(queue), pool.num_free, "length of the free queue")
    _equal(len(set(queue)), len(queue), "distinct blocks in the free queue")
    for block_id in queue:
        _equal(pool.ref_count(block_id), 0, f"references to block {block_id} in the free queue")


def _check_index(pool: BlockPool) -> None:
    indexed: dict[int, bytes] = {}
    for (block_hash, group), block_ids in pool.index().items():
        for block_id in block_ids:
            if block_id in indexed:
                raise InvariantError(f"block {block_id} is in the index twice, the second time for group {group}")
            indexed[block_id] = block_hash
    for block_id in range(pool.num_blocks):
        _equal(pool.block_hash(block_id), indexed.get(block_id), f"hash of block {block_id} and its index entry")
    if NULL_BLOCK in indexed or indexed.keys() & pool.reserved_blocks():
        raise InvariantError("the null block or a reserved block is in the index")


def _check_tables(manager: KVCacheManager) -> None:
    requests = {request.request_id: request for request in manager.live_requests()}
    coordinator, config = manager.coordinator, manager.kv_cache_config
    _equal(set(coordinator.request_ids()), set(requests), "ids that have tables and ids of live requests")
    writers: dict[int, object] = {}
    for request_id, request in requests.items():
        tables, committed = coordinator.tables(request_id), coordinator.num_committed_blocks(request_id)
        for group, (spec, table) in enumerate(zip(config.specs, tables, strict=True)):
            ids = [block_id for block_id in table.ids() if block_id != NULL_BLOCK]
            _equal(len(set(ids)), len(ids), f"distinct blocks of request {request_id!r} in group {group}")
            stride, hashes = spec.block_size // config.hash_size, request.block_hashes
            for position in range(committed[group], len(table)):
                block_id = table[position]
                if block_id == NULL_BLOCK or manager.block_pool.block_hash(block_id) is not None:
                    continue
                # The request may still write it. Two may only where a load that both had failed, and both
                # write the same again.
                end = (position + 1) * stride
                content = (group, position, hashes[end - 1] if end <= len(hashes) else request_id)
                _equal(writers.setdefault(block_id, content), content, f"content that is written to block {block_id}")
