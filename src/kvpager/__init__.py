"""kvpager: the KV-cache manager of LLM inference engines, as a library."""

from .attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)
from .block_table import BlockTable
from .blocks import Block, KVCacheBlocks
from .check import check_manager
from .config import CacheConfig, GroupSpec
from .coordinator import KVCacheCoordinator, SingleTypeKVCacheManager
from .errors import (
    BlockStateError,
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    InvariantError,
    KVPagerError,
    OutOfBlocksError,
    RequestTooLargeError,
    TraceError,
    UnknownBlockError,
    UnknownRequestError,
)
from .events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from .hashing import BlockHasher, hash_blocks
from .manager import DecodeSlots, Fit, KVCacheManager, Probe
from .pool import BlockList, BlockPool
from .request import EventSource, Request, RequestLike, RequestStatus
from .stats import BlockResidency, PrefixCacheStats, ResidencySampler

__all__ = [
    "AllBlocksCleared",
    "AttentionSpec",
    "Block",
    "BlockHasher",
    "BlockList",
    "BlockPool",
    "BlockRemoved",
    "BlockResidency",
    "BlockStateError",
    "BlockStored",
    "BlockTable",
    "CacheConfig",
    "ChunkedLocalAttention",
    "ConfigError",
    "CrossAttention",
    "DecodeSlots",
    "DuplicateRequestError",
    "EventSource",
    "Fit",
    "FullAttention",
    "GroupSpec",
    "InvalidRequestError",
    "InvariantError",
    "KVCacheBlocks",
    "KVCacheCoordinator",
    "KVCacheEvent",
    "KVCacheManager",
    "KVPagerError",
    "MLAAttention",
    "Mamba",
    "OutOfBlocksError",
    "PrefixCacheStats",
    "Probe",
    "ReferenceWindow",
    "Request",
    "RequestLike",
    "RequestStatus",
    "RequestTooLargeError",
    "ResidencySampler",
    "SingleTypeKVCacheManager",
    "SinkAttention",
    "SlidingWindow",
    "TraceError",
    "UnknownBlockError",
    "UnknownRequestError",
    "check_manager",
    "hash_blocks",
]
