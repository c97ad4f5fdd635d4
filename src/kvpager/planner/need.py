"""How many blocks of a group a request holds at a given length: the manager's own answer."""

from __future__ import annotations

from ..attention import AttentionSpec
from ..config import CacheConfig
from ..coordinator import KVCacheCoordinator
from ..pool import BlockPool

__all__ = ["blocks_of_request"]


def blocks_of_request(spec: AttentionSpec, num_tokens: int, max_step: int, num_encoder_tokens: int) -> int:
    """Blocks that a request holds at most on its way to ``num_tokens`` tokens in steps of ``max_step``. O(log span).

    With ``max_step`` 1 that is what it holds while it decodes.
    """
    config = CacheConfig.uniform(2, [spec])
    alone = KVCacheCoordinator(config, BlockPool(2, 1), max_num_batched_tokens=max_step, use_eagle=False, caching=True)
    return alone.plan_alone(num_tokens, num_tokens, num_encoder_tokens)
