"""Paged attention for transformers' models: the cache they write to and the function they call.

A model's attention layer does two things that concern us. It hands its new keys and values to
``cache.update``, which writes them into pages by slot; then it calls the attention function registered under
`ATTENTION`, which reads whole pages by block table, request by request. No mask is ever built over the
pack: under a name without a registered mask function, transformers passes None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from .step import Read, Step

__all__ = ["ATTENTION", "LayerPages", "PagedCache", "paged_attention"]

ATTENTION = "kvpager"
"""The name under which transformers finds `paged_attention`."""


@dataclass(frozen=True)
class LayerPages:
    """A layer's tensors, ``[num_blocks, …]`` each, and the group whose block table leads to them."""

    group: int
    tensors: tuple[torch.Tensor, ...]


class PagedCache:
    """What a model sees as its cache during one step.

    ``attention`` and ``states`` have the pages of each layer index.
    """

    def __init__(self, step: Step, attention: Mapping[int, LayerPages], states: Mapping[int, LayerPages]) -> None:
        self.step = step
        self.attention = attention
        self.states = states

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pack's keys and values, ``[1, heads, tokens, size]``; they are given back unchanged."""
        pages = self.attention[layer_idx]
        for page, new in zip(pages.tensors, (keys, values), strict=True):
            page[self.step.slots[pages.group]] = new[0].transpose(0, 1)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Tokens before the pack, for each token: what ``arange`` lacks of its position."""
        positions = self.step.positions
        return positions - torch.arange(len(positions), device=positions.device)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedCache,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the pack's queries ``[1, heads, tokens, size]`` to what their requests have in pages.

    ``paged`` is an extra keyword of the model's ``forward``. ``s_aux`` are attention sinks, a logit a head.
    ``key`` and ``value`` have been written by `PagedCache.update`. Gives ``[1, tokens, heads, size]``.
    """
    pages = paged.attention[module.layer_idx]
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for read in paged.step.reads[pages.group]:
        keys, values = _keys_and_values(module, pages, read)
        output[read.rows] = attend(query[0, :, read.rows], keys, values, read.mask, scaling, s_aux)
    return output[None], None


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One request's attention: queries [heads, tokens, size], keys and values [KV heads, keys, size].

    Gives [tokens, heads, size]. A sink is a key that every token sees, whose score is a number the head has
    learnt and whose value is zero: one column more.
    """
    bias = mask
    if sinks is not None:
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
        bias = _sink_bias(mask, sinks.to(query.dtype), query.shape[1], keys.shape[1])
    out = F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=bias, scale=scaling, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _sink_bias(mask: torch.Tensor | None, sinks: torch.Tensor, num_tokens: int, num_keys: int) -> torch.Tensor:
    bias = sinks.new_zeros(len(sinks), num_tokens, num_keys)
    if mask is not None:
        bias[:, :, :-1].masked_fill_(~mask, float("-inf"))
    bias[:, :, -1] = sinks[:, None]
    return bias


def _keys_and_values(module: torch.nn.Module, pages: LayerPages, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's keys and values, [KV heads, keys, size]; latent ones (MLA) are expanded by their layer."""
    keys, values = (read.gather(page).transpose(0, 1) for page in pages.tensors)
    if hasattr(module, "expand_kv"):
        keys, values = module.expand_kv(keys[None], values[None])
        return keys[0], values[0]
    return keys, values


AttentionInterface.register(ATTENTION, paged_attention)
