"""What a module of a layer keeps on one rank: each is a function of the configuration and the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..memory import AttentionKind, AttentionMemory, Rank, StateMemory
from ..model_config import ModelConfig
from .numbers import HEADS, KV_HEADS, Number, field, head_size

__all__ = ["Kept", "Module", "heads_of", "latent"]

Kept = Callable[[ModelConfig, Rank], "AttentionMemory | StateMemory"]


class Module(NamedTuple):
    """A module of a layer, by its name in the layer, and what it keeps."""

    name: str
    keeps: Kept


def heads_of(
    heads: Number = KV_HEADS,
    size: Number | None = None,
    *,
    value_size: Number | None = None,
    kind: AttentionKind = "full",
    extent: Number | None = None,
    query_heads: Number = HEADS,
) -> Kept:
    """Ordinary attention: a key and a value for each KV head. Ranks share the query heads evenly."""
    size = size or head_size()

    def keep(config: ModelConfig, rank: Rank) -> AttentionMemory:
        rank.share(query_heads(config), "attention heads")
        return AttentionMemory(
            kind=kind,
            num_heads=rank.kv_heads(heads(config)),
            head_size=size(config),
            value_size=value_size(config) if value_size else None,
            dtype=rank.kv_dtype,
            extent=extent(config) if extent else None,
        )

    return keep


def latent(*, index: Number | None = None) -> Kept:
    """MLA: a latent vector and a rotary key a token, for all heads, so that every rank keeps them whole.

    ``index``: the size of the key that a sparse model's indexer keeps beside it, in fp8 with a 4-byte scale for each
    128 values (vLLM 0.25.1, models/deepseek_v2.py, Indexer).
    """
    size = field("kv_lora_rank"), field("qk_rope_head_dim")

    def keep(config: ModelConfig, rank: Rank) -> AttentionMemory:
        rank.share(HEADS(config), "attention heads")
        index_size = index(config) if index else 0
        return AttentionMemory(
            kind="mla",
            num_heads=1,
            head_size=sum(part(config) for part in size),
            dtype=rank.kv_dtype,
            index_bytes=index_size + index_size // 128 * 4,
        )

    return keep
