"""State layers (Mamba 2, gated delta net, short convolution) over blocks.

Such a layer takes a batch of sequences, not a pack. So its ``forward`` is wrapped: the pack is cut into
batches of segments that are alike, each batch's states are gathered from the blocks they are in, and what
the layer leaves behind is scattered to the blocks that the manager gave for it::

    block table   │ null │ null │ 23 │ 8 │        block 23 has the state at its end, 8 gets the running one
                                  │    ▲
                            gather└────┘scatter   23 stays as it is: a checkpoint that others can hit
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .attention import LayerPages, PagedCache
from .layers import is_state_layer
from .step import StateBatch

__all__ = ["wrap_state_layers"]


class StateView:
    """What a state layer sees as its cache: the states of one batch of sequences.

    ``conv`` is ``[batch, channels, kernel size]``, ``recurrent`` is the layer's own shape; None: the sequences begin.
    """

    def __init__(self, conv: torch.Tensor | None = None, recurrent: torch.Tensor | None = None) -> None:
        self.conv = conv
        self.recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of the convolution; layers may change it in place."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent state; layers may change it in place."""
        return self.recurrent

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: object
    ) -> torch.Tensor:
        """Take in the inputs ``[batch, channels, tokens]``; gives what the convolution runs over."""
        seen = new if self.conv is None else torch.cat([self.conv, new], dim=-1)
        seen = F.pad(seen, (max(0, conv_kernel_size - seen.shape[-1]), 0))
        self.conv = seen[..., -conv_kernel_size:]
        return seen

    def update_recurrent_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Take in the state after the last token."""
        self.recurrent = new
        return new

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: rejected tokens aren't rolled back."""
        return False

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """The states that there are, convolution first."""
        return tuple(state for state in (self.conv, self.recurrent) if state is not None)


def wrap_state_layers(model: torch.nn.Module) -> None:
    """Let the model's state layers work on packs when their cache is a `PagedCache`. Once is enough."""
    for module in model.modules():
        if is_state_layer(module) and not hasattr(module.forward, "takes_packs"):
            module.forward = _on_packs(module.forward, module.layer_idx)


def _on_packs(forward: Callable[..., torch.Tensor], layer_idx: int) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def packed_forward(hidden_states: torch.Tensor, cache: object = None, **kwargs: Any) -> torch.Tensor:
        if not isinstance(cache, PagedCache):
            return forward(hidden_states, cache=cache, **kwargs)
        pages = cache.states[layer_idx]
        output = torch.empty_like(hidden_states)
        for batch in cache.step.state_batches[pages.group]:
            view = _load(pages, batch)
            output[0, batch.rows] = forward(hidden_states[0, batch.rows], cache=view)
            _store(pages, batch, view)
        return output

    packed_forward.takes_packs = True  # type: ignore[attr-defined]
    return packed_forward


def _load(pages: LayerPages, batch: StateBatch) -> StateView:
    if batch.sources is None:
        return StateView()
    return StateView(*(tensor.index_select(0, batch.sources) for tensor in pages.tensors))


def _store(pages: LayerPages, batch: StateBatch, view: StateView) -> None:
    for tensor, state in zip(pages.tensors, view.states, strict=True):
        tensor[batch.targets] = state.to(tensor.dtype)
