"""Cache layouts as text: ``full``, ``full+5xsliding:1024``, ``full+3xmamba``."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..attention import (
    AttentionSpec,
    ChunkedLocalAttention,
    FullAttention,
    Mamba,
    MLAAttention,
    ReferenceWindow,
    SinkAttention,
    SlidingWindow,
)
from ..config import CacheConfig
from ..counts import MAX_BYTES, as_count
from ..errors import ConfigError
from ..planner.units import parse_bytes

__all__ = ["DEFAULT_NUM_BLOCKS", "cache_config", "num_blocks_in", "parse_groups"]

DEFAULT_NUM_BLOCKS = 20_000

_TERM = re.compile(r"(?:(\d{1,4})x)?([a-z_]+)(?::([a-z0-9]+))?")
_FORMS = "full, mla, sliding:WINDOW, chunked:CHUNK, mamba[:none|all|align], reference:WINDOW, sink:TOKENS"


def cache_config(
    groups: str,
    block_size: int,
    *,
    num_blocks: int | None = None,
    kv_memory: str | None = None,
    kv_bytes_per_token: int | None = None,
) -> CacheConfig:
    """A cache of a given layout, its size either in blocks or as memory (see `num_blocks_in`).

    Raises ``ConfigError``.
    """
    specs = parse_groups(groups, block_size)
    if (kv_memory is None) != (kv_bytes_per_token is None):
        raise ConfigError("kv-memory and kv-bytes-per-token go together; give both, or num-blocks instead")
    if kv_memory is None or kv_bytes_per_token is None:
        return CacheConfig.uniform(DEFAULT_NUM_BLOCKS if num_blocks is None else num_blocks, specs)
    if num_blocks is not None:
        raise ConfigError("give the cache's size once: either num-blocks, or kv-memory with kv-bytes-per-token")
    memory_bytes = parse_bytes(kv_memory)
    return CacheConfig.uniform(num_blocks_in(memory_bytes, kv_bytes_per_token, block_size, len(specs)), specs)


def parse_groups(text: str, block_size: int) -> tuple[AttentionSpec, ...]:
    """The groups of a layout, all of ``block_size`` tokens.

    Terms are joined by ``+``; ``5xsliding:1024`` is five groups of one kind. Raises ``ConfigError``.
    """
    block_size = as_count(block_size, "block_size", 1)
    if not isinstance(text, str):
        raise ConfigError(f"groups must be text; a layout is made of {_FORMS}, joined by +, got {text!r}")
    specs: list[AttentionSpec] = []
    for term in text.split("+"):
        match = _TERM.fullmatch(term.strip())
        make = _KINDS.get(match[2]) if match else None
        if match is None or make is None:
            raise ConfigError(f"groups {text!r}: {term!r} is not a group; a layout is made of {_FORMS}, joined by +")
        count = int(match[1] or 1)
        if not count:
            raise ConfigError(f"groups {text!r}: {term!r} is no group at all; give a count of at least 1")
        specs += [make(term, block_size, match[3])] * count
    return tuple(specs)


def num_blocks_in(memory_bytes: int, kv_bytes_per_token: int, block_size: int, num_groups: int) -> int:
    """Blocks that fit into ``memory_bytes``.

    ``kv_bytes_per_token`` is that of all layers together. A block belongs to one group, so it holds its
    tokens for one of ``num_groups`` equal shares of the layers. Raises ``ConfigError``.
    """
    memory_bytes = as_count(memory_bytes, "memory_bytes", at_most=MAX_BYTES)
    kv_bytes_per_token = as_count(kv_bytes_per_token, "kv_bytes_per_token", 1)
    block_size, num_groups = as_count(block_size, "block_size", 1), as_count(num_groups, "num_groups", 1)
    num_blocks = memory_bytes * num_groups // (kv_bytes_per_token * block_size)
    if num_blocks < 2:
        raise ConfigError(
            f"{memory_bytes} bytes hold {num_blocks} blocks of {block_size} tokens at {kv_bytes_per_token} bytes a "
            f"token; a cache needs at least 2: give it more memory or smaller blocks"
        )
    return num_blocks


_Maker = Callable[[str, int, "str | None"], AttentionSpec]


def _plain(kind: type[FullAttention] | type[MLAAttention]) -> _Maker:
    def make(term: str, block_size: int, argument: str | None) -> AttentionSpec:
        if argument is not None:
            raise ConfigError(f"group {term!r} takes nothing behind the colon; leave it out")
        return kind(block_size=block_size)

    return make


def _with_tokens(kind: Callable[[int, int], AttentionSpec]) -> _Maker:
    def make(term: str, block_size: int, argument: str | None) -> AttentionSpec:
        if argument is None or not argument.isdecimal():
            raise ConfigError(f"group {term!r} needs a number of tokens behind a colon, as in sliding:1024")
        return kind(block_size, int(argument))

    return make


def _mamba(term: str, block_size: int, argument: str | None) -> AttentionSpec:
    return Mamba(block_size=block_size, mode=argument or "align")  # type: ignore[arg-type]


_KINDS: dict[str, _Maker] = {
    "full": _plain(FullAttention),
    "mla": _plain(MLAAttention),
    "sliding": _with_tokens(lambda block_size, tokens: SlidingWindow(block_size=block_size, window=tokens)),
    "chunked": _with_tokens(lambda block_size, tokens: ChunkedLocalAttention(block_size=block_size, chunk_size=tokens)),
    "mamba": _mamba,
    "reference": _with_tokens(lambda block_size, tokens: ReferenceWindow(block_size=block_size, window=tokens)),
    "sink": _with_tokens(lambda block_size, tokens: SinkAttention(block_size=block_size, sink_len=tokens)),
}
