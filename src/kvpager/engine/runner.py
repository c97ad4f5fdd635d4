"""The model runner: one scheduler output, one forward pass, one row of logits for each request that samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ..block_table import BlockTable
from ..config import CacheConfig
from ..scheduler import SchedulerOutput
from .attention import ATTENTION, LayerPages, PagedCache
from .layers import CachedLayer
from .states import wrap_state_layers
from .step import Step
from .storage import PagedStorage, TensorShape

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs ``model`` over the blocks of ``config``, at most ``max_num_running`` requests in a step.

    Between steps the model is as it was: it may be called, and other runners may use it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[CachedLayer],
        config: CacheConfig,
        *,
        max_num_running: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._specs = config.specs
        block_sizes = [spec.block_size for spec in config.specs]
        self._table = BlockTable(max_num_running, max_model_len, block_sizes)
        self.storage = PagedStorage(config, _pages(layers, config), model.device)
        where = {name: index for index, group in enumerate(config.groups) for name in group.layer_names}
        self._attention, self._states = (
            {
                layer.index: LayerPages(where[layer.name], self.storage.tensors(layer.name))
                for layer in layers
                if (layer.kind == "state") is states
            }
            for states in (False, True)
        )
        wrap_state_layers(model)

    def run(self, output: SchedulerOutput) -> torch.Tensor:
        """Compute a step; gives the logits ``[requests that sample, vocabulary]``, in the output's order."""
        step = Step(output, self._table, self._specs, self._model.device)
        cache = PagedCache(step, self._attention, self._states)
        with torch.inference_mode(), _attention(self._model, ATTENTION):
            result = self._model(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                cache=cache,
                paged=cache,
                use_cache=True,
                logits_to_keep=step.sampling_rows,
            )
        logits: torch.Tensor = result.logits[0]
        return logits


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let the model use the attention function of that name for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _pages(layers: Sequence[CachedLayer], config: CacheConfig) -> dict[str, tuple[TensorShape, ...]]:
    """What a page of each layer holds, in the config's block sizes."""
    sizes = {name: group.spec.block_size for group in config.groups for name in group.layer_names}
    return {layer.name: layer.page(sizes[layer.name]) for layer in layers if layer.name in sizes}
