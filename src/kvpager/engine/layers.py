"""What each layer of a model keeps between two steps, and the cache that fits it.

Nothing here knows an architecture: the model computes one token with transformers' own cache, and
what lies in that cache afterwards says which layers keep keys and values (in which window) and which
keep a state, and in what shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from ..attention import AttentionSpec, ChunkedLocalAttention, FullAttention, Mamba, MLAAttention, SlidingWindow
from ..config import CacheConfig, GroupSpec
from ..errors import ConfigError
from .storage import TensorShape

__all__ = ["CachedLayer", "cache_config_for", "cached_layers", "is_attention_layer", "is_state_layer"]

LayerKind = Literal["full", "latent", "window", "chunked", "state"]


@dataclass(frozen=True, kw_only=True)
class CachedLayer:
    """One thing that one layer keeps: keys and values, or a state.

    A layer that has both (Falcon-H1) is listed twice. ``name`` is what a cache configuration (``kvpager plan`` too)
    calls it: its module, as in ``layers.3.self_attn``. ``reach`` is the window or the chunk in tokens.
    ``tensors`` are what is kept for one token (attention) or the whole state.
    """

    index: int
    name: str
    kind: LayerKind
    tensors: tuple[TensorShape, ...]
    reach: int = 0

    def page(self, block_size: int) -> tuple[TensorShape, ...]:
        """The tensors of a block: ``block_size`` tokens of each, or one state."""
        if self.kind == "state":
            return self.tensors
        return tuple(TensorShape(shape=(block_size, *t.shape), dtype=t.dtype) for t in self.tensors)

    def spec(self, block_size: int) -> AttentionSpec:
        """The layer's kind, as the manager knows it."""
        page_bytes = sum(tensor.num_bytes for tensor in self.page(block_size))
        match self.kind:
            case "full":
                return FullAttention(block_size=block_size, page_bytes=page_bytes)
            case "latent":
                return MLAAttention(block_size=block_size, page_bytes=page_bytes)
            case "window":
                return SlidingWindow(block_size=block_size, page_bytes=page_bytes, window=self.reach)
            case "chunked":
                return ChunkedLocalAttention(block_size=block_size, page_bytes=page_bytes, chunk_size=self.reach)
            case "state":
                return Mamba(block_size=block_size, page_bytes=page_bytes, mode="align")


def cached_layers(model: PreTrainedModel) -> tuple[CachedLayer, ...]:
    """What ``model`` keeps, layer by layer. Costs one forward pass of one token.

    Raises ``ConfigError`` for a model whose attention is more than softmax over scores and sinks.
    """
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        raise ConfigError(
            f"{type(model).__name__} caps its attention logits, which kvpager's attention function doesn't do"
        )
    cache = DynamicCache(config=config)
    one_token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=one_token, cache=cache, use_cache=True)
    kinds = getattr(config, "layer_types", None) or [""] * len(cache.layers)
    state_modules, attention_modules = _modules(model, is_state_layer), _modules(model, is_attention_layer)
    layers: list[CachedLayer] = []
    for index, layer in enumerate(cache.layers):
        if states := _states(layer):
            layers.append(CachedLayer(index=index, name=state_modules[index][0], kind="state", tensors=states))
        if getattr(layer, "keys", None) is not None:
            name, module = attention_modules[index]
            kind, reach = _attention_kind(layer, kinds[index], is_latent=hasattr(module, "expand_kv"))
            layers.append(CachedLayer(index=index, name=name, kind=kind, tensors=_keys_and_values(layer), reach=reach))
    return tuple(layers)


def is_state_layer(module: torch.nn.Module) -> bool:
    """Whether this is a layer with a state: all of them begin with a short convolution."""
    return hasattr(module, "layer_idx") and any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def is_attention_layer(module: torch.nn.Module) -> bool:
    """Whether this is a layer that calls an attention function."""
    return hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")


def cache_config_for(
    layers: Sequence[CachedLayer], *, num_blocks: int, block_size: int = 16, namespace: str = ""
) -> CacheConfig:
    """A cache of ``num_blocks`` blocks of ``block_size`` tokens for these layers.

    Layers of one kind share a block table. A kind with more layers than the rarest one is split into groups of
    that size, so that all groups use about as much of a page.
    """
    by_spec: dict[AttentionSpec, list[str]] = {}
    for layer in layers:
        by_spec.setdefault(layer.spec(block_size), []).append(layer.name)
    if not by_spec:
        raise ConfigError("the model caches nothing: none of its layers keeps keys and values or a state")
    size = min(map(len, by_spec.values()))
    groups = tuple(
        GroupSpec(layer_names=tuple(names[first : first + size]), spec=spec)
        for spec, names in by_spec.items()
        for first in range(0, len(names), size)
    )
    return CacheConfig(num_blocks=num_blocks, groups=groups, namespace=namespace)


def _modules(
    model: torch.nn.Module, is_wanted: Callable[[torch.nn.Module], bool]
) -> dict[int, tuple[str, torch.nn.Module]]:
    """By layer index: the module and its name from ``layers.`` on."""
    return {
        module.layer_idx: (name[name.index("layers.") :], module)
        for name, module in model.named_modules()
        if is_wanted(module)
    }


def _attention_kind(layer: object, layer_type: str, *, is_latent: bool) -> tuple[LayerKind, int]:
    reach = getattr(layer, "sliding_window", None)
    if reach is None:
        return ("latent" if is_latent else "full"), 0
    return ("chunked" if layer_type == "chunked_attention" else "window"), int(reach)


def _keys_and_values(layer: object) -> tuple[TensorShape, ...]:
    """Shapes for one token: transformers keeps ``[batch, heads, tokens, head size]``."""
    tensors: list[torch.Tensor] = [layer.keys, layer.values]  # type: ignore[attr-defined]
    return tuple(TensorShape(shape=(t.shape[1], t.shape[3]), dtype=t.dtype) for t in tensors)


def _states(layer: object) -> tuple[TensorShape, ...]:
    """Shapes of the convolution's state and, where there is one, of the recurrent state."""
    states = [getattr(layer, name, {}).get(0) for name in ("conv_states", "recurrent_states")]
    return tuple(TensorShape(shape=tuple(s.shape[1:]), dtype=s.dtype) for s in states if s is not None)
