"""What layers cache is read off a model, whatever its architecture."""

from __future__ import annotations

import pytest

from kvpager.attention import ChunkedLocalAttention, FullAttention, Mamba, MLAAttention, SlidingWindow
from kvpager.engine import CachedLayer, cache_config_for
from kvpager.errors import ConfigError

from .harness import layers

KINDS = {
    "llama": ["full"] * 4,
    "mistral": ["window"] * 4,
    "qwen3": ["full"] * 4,
    "gemma3": ["window"] * 5 + ["full"],
    "gpt_oss": ["window", "full"] * 2,
    "llama4": ["chunked"] * 3 + ["full"],
    "deepseek_v3": ["latent"] * 4,
    "lfm2": ["state", "state", "full", "state", "full"],
    "qwen3_next": ["state"] * 3 + ["full"],
    "nemotron_h": ["state", "full", "state"],
    "falcon_h1": ["state", "full"] * 4,
}


@pytest.mark.parametrize("name", list(KINDS))
def test_kinds(name: str) -> None:
    assert [layer.kind for layer in layers(name)] == KINDS[name]


def test_names_windows_and_sizes() -> None:
    first, *_ = layers("mistral")
    assert (first.name, first.reach, [tensor.shape for tensor in first.tensors]) == (
        "layers.0.self_attn",
        13,
        [(2, 8), (2, 8)],
    )
    assert first.spec(4) == SlidingWindow(block_size=4, page_bytes=2 * 4 * 16 * 4, window=13)
    assert layers("llama4")[0].spec(4) == ChunkedLocalAttention(block_size=4, page_bytes=512, chunk_size=16)
    latent = layers("deepseek_v3")[0]
    assert [tensor.shape for tensor in latent.tensors] == [(1, 12), (1, 8)], "the latent and its rotary part"
    assert latent.spec(4) == MLAAttention(block_size=4, page_bytes=4 * (12 + 8) * 4)
    state = layers("falcon_h1")[0]
    assert [tensor.shape for tensor in state.page(4)] == [(48, 4), (4, 8, 8)], "a page holds one state"


def test_a_kind_with_many_layers_is_split_to_the_size_of_the_rarest() -> None:
    config = cache_config_for(layers("lfm2"), num_blocks=10, block_size=4, namespace="lfm2")
    assert [(type(group.spec), group.layer_names) for group in config.groups] == [
        (Mamba, ("layers.0.conv", "layers.1.conv")),
        (Mamba, ("layers.3.conv",)),
        (FullAttention, ("layers.2.self_attn", "layers.4.self_attn")),
    ]
    assert (config.num_blocks, config.namespace) == (10, "lfm2")


def test_a_model_that_caches_nothing_is_refused() -> None:
    no_layers: list[CachedLayer] = []
    with pytest.raises(ConfigError, match="caches nothing"):
        cache_config_for(no_layers, num_blocks=10)
