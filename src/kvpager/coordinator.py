"""KVCacheCoordinator makes the groups agree: one hit length, one plan, one way in which a request's blocks change.

It owns the live requests and their tables; a `SingleTypeKVCacheManager` is what one group's attention kind means for
such a table. Both are compiled (``src/native/manager`` and ``groups``); here groups are made from a `CacheConfig`.
"""

from __future__ import annotations

from ._native import KVCacheCoordinator, SingleTypeKVCacheManager
from .attention import AttentionSpec, Mamba, ceil_div
from .config import CacheConfig, check_eagle

__all__ = ["KVCacheCoordinator", "SingleTypeKVCacheManager", "make_groups"]


def make_groups(config: CacheConfig, *, use_eagle: bool) -> tuple[SingleTypeKVCacheManager, ...]:
    """Each group's numbers. Raises ``ConfigError`` where EAGLE and a group's kind do not go together."""
    flagged = frozenset(i for i, group in enumerate(config.groups) if group.is_eagle)
    eagle_groups = flagged or frozenset(range(len(config.groups)) if use_eagle else ())
    check_eagle(config.specs, eagle_groups)
    # Where one group's tokens depend on where the prompt ended, the other layers' do too.
    limits = [spec.shareable_decoded for spec in config.specs if spec.shareable_decoded is not None]
    shareable = min(limits, default=None)
    return tuple(
        _make_group(config, group_id, spec, group_id in eagle_groups, shareable)
        for group_id, spec in enumerate(config.specs)
    )


def _make_group(
    config: CacheConfig, group_id: int, spec: AttentionSpec, is_eagle: bool, shareable_decoded: int | None
) -> SingleTypeKVCacheManager:
    # A state is all that a Mamba group needs at a hit's end, drafts or not.
    draft_lookahead = spec.block_size if is_eagle and not isinstance(spec, Mamba) else 0
    return SingleTypeKVCacheManager(
        spec.rule,
        group_id=group_id,
        hashes_per_block=spec.block_size // config.hash_size,
        alignment=config.alignment,
        commit_lookahead=spec.block_size if is_eagle else 0,
        draft_lookahead=draft_lookahead,
        shareable_decoded=shareable_decoded,
        interval=_interval(config, spec, draft_lookahead),
        zeroes_new=spec.reads_whole_blocks,
    )


def _interval(config: CacheConfig, spec: AttentionSpec, draft_lookahead: int) -> int | None:
    """Tokens between two hit lengths whose blocks are worth caching; None: all blocks are."""
    if config.retention_interval is not None and spec.sparse_retention:
        interval = config.retention_interval
    elif spec.caches_only_useful:
        interval = config.alignment
    else:
        return None
    if not spec.can_hit:
        return None
    far = config.alignment * (ceil_div(spec.lag or 0, config.alignment) + 2)
    needed = len(spec.needed_for_hit(far)) * spec.block_size + draft_lookahead
    return None if 0 < interval <= needed else interval
