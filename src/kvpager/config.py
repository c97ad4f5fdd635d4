"""What a cache looks like: groups of layers over one pool of blocks. Frozen, checked here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .attention import AttentionSpec, ChunkedLocalAttention, SinkAttention
from .counts import as_count
from .errors import ConfigError

__all__ = ["CacheConfig", "GroupSpec"]

_NEEDED_COUNTS = {"num_blocks": 1, "dcp_world_size": 1, "pcp_world_size": 1}
_COUNTS = _NEEDED_COUNTS | {"hash_block_size": 1, "retention_interval": 0}


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Layers that share one block table.

    ``is_eagle`` marks a group whose hits must leave one block more to recompute (EAGLE / MTP
    drafts need the last hidden state).
    """

    layer_names: tuple[str, ...]
    spec: AttentionSpec
    is_eagle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", _layer_names(self.layer_names))
        if not isinstance(self.spec, AttentionSpec):
            raise ConfigError(f"GroupSpec.spec must be an attention kind, got {self.spec!r}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """One pool of ``num_blocks`` equal blocks (block 0 is the null block) and its groups.

    ``hash_block_size`` (tokens; default: the greatest common divisor of the groups' effective block
    sizes) is what block hashes are made of. ``namespace`` names whatever changes K/V for equal
    tokens (model, weights version, dtype, layout). ``retention_interval`` (tokens) makes window
    and Mamba checkpoints sparser: None keeps all, 0 only the replay boundary.
    """

    num_blocks: int
    groups: tuple[GroupSpec, ...]
    hash_block_size: int | None = None
    dcp_world_size: int = 1
    pcp_world_size: int = 1
    namespace: str = ""
    retention_interval: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.num_reserved_blocks + 1 >= self.num_blocks and self.groups:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}, but the null block and {self.num_reserved_blocks} static sink "
                f"blocks leave none to allocate; give at least {self.num_reserved_blocks + 2}"
            )
        self._check_hash_block_size()
        self._check_retention_interval()

    @classmethod
    def uniform(cls, num_blocks: int, specs: Sequence[AttentionSpec], **options: object) -> CacheConfig:
        """A cache with one made-up layer a group, for when only the kinds matter."""
        groups = tuple(GroupSpec(layer_names=(f"layer.{i}",), spec=spec) for i, spec in enumerate(specs))
        return cls(num_blocks=num_blocks, groups=groups, **options)  # type: ignore[arg-type]

    @cached_property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The groups' kinds with *effective* block sizes: with context parallelism a block covers
        block_size x dcp x pcp tokens."""
        world = self.dcp_world_size * self.pcp_world_size
        return tuple(replace(g.spec, block_size=g.spec.block_size * world) for g in self.groups)

    @cached_property
    def alignment(self) -> int:
        """Tokens that every hit is a multiple of: the least common multiple of the block sizes."""
        return math.lcm(*(spec.block_size for spec in self.specs))

    @cached_property
    def hash_size(self) -> int:
        """Tokens in a hash block."""
        if self.hash_block_size is not None:
            return self.hash_block_size
        return math.gcd(*(spec.block_size for spec in self.specs)) or 1

    @cached_property
    def num_reserved_blocks(self) -> int:
        """Blocks that static sinks hold for good."""
        return sum(g.spec.num_sink_blocks for g in self.groups if isinstance(g.spec, SinkAttention))

    def _check_types(self) -> None:
        for name, at_least in _COUNTS.items():
            value = getattr(self, name)
            if value is not None or name in _NEEDED_COUNTS:
                object.__setattr__(self, name, as_count(value, f"CacheConfig.{name}", at_least))
        groups = self.groups
        if not isinstance(groups, (list, tuple)) or not all(isinstance(group, GroupSpec) for group in groups):
            raise ConfigError(f"CacheConfig.groups must be a list or tuple of GroupSpec, got {groups!r}")
        object.__setattr__(self, "groups", tuple(groups))
        if not isinstance(self.namespace, str):
            raise ConfigError(f"CacheConfig.namespace must be a string, got {self.namespace!r}")

    def _check_hash_block_size(self) -> None:
        for index, spec in enumerate(self.specs):
            if spec.block_size % self.hash_size:
                raise ConfigError(
                    f"hash_block_size {self.hash_size} does not divide the effective block size "
                    f"{spec.block_size} of group {index}; choose a common divisor of all of them"
                )

    def _check_retention_interval(self) -> None:
        interval = self.retention_interval
        if interval is None:
            return
        if interval % self.alignment:
            raise ConfigError(
                f"retention_interval must be 0 or a multiple of the alignment {self.alignment} tokens, got {interval}"
            )
        if not any(spec.sparse_retention for spec in self.specs):
            raise ConfigError(
                "retention_interval is set, but no sliding-window or Mamba group is there to heed it; leave it out"
            )


def _layer_names(names: object) -> tuple[str, ...]:
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"GroupSpec.layer_names must be a list or tuple of names, got {names!r}; put one in brackets")
    if not names:
        raise ConfigError("a group needs at least one layer, got none; name the layers it serves")
    return tuple(names)


def check_eagle(specs: Sequence[AttentionSpec], eagle_groups: frozenset[int]) -> None:
    """EAGLE and chunked local attention do not go together.

    Raises ``ConfigError``: the block after a chunk's end is in another chunk, so "one block more
    would hit too" says nothing about the hidden state that a draft needs.
    """
    if eagle_groups and any(isinstance(spec, ChunkedLocalAttention) for spec in specs):
        raise ConfigError(
            "EAGLE / MTP with a chunked-local group is not supported: turn speculative decoding off "
            "or give the chunked layers full attention"
        )
