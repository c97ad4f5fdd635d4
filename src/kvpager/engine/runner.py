"""The model runner: one scheduler output, one forward pass, one row of logits for each request that samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..attention import FullAttention
from ..block_table import BlockTable
from ..config import CacheConfig
from ..errors import ConfigError
from ..scheduler import SchedulerOutput
from .attention import ATTENTION, LayerPages, PagedCache
from .layers import CachedLayer
from .states import wrap_state_layers
from .step import Step
from .storage import PagedStorage, TensorShape

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs ``model`` over the blocks of ``config``, at most ``max_num_running`` requests in a step.

    Between steps the model is as it was: it may be called, and other runners may use it. Raises ``ConfigError`` when
    the cache is not one for this model.
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
        _check_fit(layers, config, max_model_len)
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


def _check_fit(layers: Sequence[CachedLayer], config: CacheConfig, max_model_len: int) -> None:
    """The cache must keep exactly what the layers read: masks are made from its kinds."""
    specs = {name: group.spec for group in config.groups for name in group.layer_names}
    for layer in layers:
        given = specs.get(layer.name)
        if given is None:
            raise ConfigError(f"the cache has no place for the model's {layer.name}; it has {', '.join(specs)}")
        wanted = layer.spec(given.block_size)
        never_outgrown = isinstance(given, FullAttention) and layer.reach >= max_model_len
        if replace(given, page_bytes=wanted.page_bytes) != wanted and not never_outgrown:
            raise ConfigError(f"{layer.name} of the model is {wanted}, but the cache has {given} for it")


def _pages(layers: Sequence[CachedLayer], config: CacheConfig) -> dict[str, tuple[TensorShape, ...]]:
    """What a page of each layer holds, in the config's block sizes."""
    sizes = {name: group.spec.block_size for group in config.groups for name in group.layer_names}
    return {layer.name: layer.page(sizes[layer.name]) for layer in layers if layer.name in sizes}
