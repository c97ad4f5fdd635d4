"""Estimated weights beside the published sizes of checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from kvpager.planner import PlanOptions, plan
from planner_configs import LATENT, plain

UNTIED = {"tie_word_embeddings": False}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    # "total_size" of model.safetensors.index.json, or parameters x 2 bytes
    "Llama 3.1 8B": (
        plain("llama", 32, 4096, 32, 8, vocab_size=128256, intermediate_size=14336, **UNTIED),
        16_060_522_496,
    ),
    "Qwen2.5 7B": (
        plain("qwen2", 28, 3584, 28, 4, vocab_size=152064, intermediate_size=18944, **UNTIED),
        15_231_233_024,
    ),
    "Mixtral 8x7B": (
        plain("mixtral", 32, 4096, 32, 8, vocab_size=32000, intermediate_size=14336, num_local_experts=8, **UNTIED),
        93_405_585_408,
    ),
    "Qwen3 30B A3B": (
        plain(
            "qwen3_moe", 48, 2048, 32, 4, head_dim=128, vocab_size=151936, intermediate_size=6144,
            moe_intermediate_size=768, num_experts=128, decoder_sparse_step=1, mlp_only_layers=[], **UNTIED,
        ),
        61_064_245_248,
    ),
    "gpt-oss 20B, MXFP4": (
        plain(
            "gpt_oss", 24, 2880, 64, 8, head_dim=64, vocab_size=201088, intermediate_size=2880, num_local_experts=32,
            sliding_window=128, quantization_config={"quant_method": "mxfp4"}, **UNTIED,
        ),
        13_761_264_768,
    ),
    "DeepSeek V3, without MTP": (  # 671,026,419,200 parameters
        plain(
            "deepseek_v3", 61, 7168, 128, 128, vocab_size=129280, intermediate_size=18432, moe_intermediate_size=2048,
            n_routed_experts=256, n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=1536, **LATENT, **UNTIED,
        ),
        2 * 671_026_419_200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_within_three_percent_of_the_published_size(name: str, ranks: int) -> None:
    fields, published = PUBLISHED[name]
    weights = plan(fields, PlanOptions(memory_bytes=1 << 42, weights_bytes=None, tensor_parallel=ranks)).weights
    assert weights.is_estimate and weights.num_bytes is not None
    assert weights.num_bytes * ranks == pytest.approx(published, rel=0.003)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "gptq", "bits": 4}, 4.25),
        ({"quant_method": "awq", "bits": 4}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4.25),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, 8),
    ],
)  # fmt: skip
def test_quantized_weights(quantization: dict[str, Any], bits: float) -> None:
    fields = {**PUBLISHED["Llama 3.1 8B"][0], "quantization_config": quantization}
    embeddings = 2 * 128256 * 4096
    others = 8_029_995_008 - embeddings
    weights = plan(fields, PlanOptions(memory_bytes=1 << 42, weights_bytes=None)).weights
    assert weights.num_bytes == round(embeddings * 2 + others * bits / 8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"quantization_config": {"quant_method": "magic"}}, "magic"),
    ],
)
def test_what_cannot_be_estimated_is_not_known(changes: dict[str, Any], why: str) -> None:
    fields = {**PUBLISHED["Llama 3.1 8B"][0], **changes}
    weights = plan(fields, PlanOptions(memory_bytes=1 << 42, weights_bytes=None)).weights
    assert weights.num_bytes is None and why in weights.why and "n/a" in weights.why
