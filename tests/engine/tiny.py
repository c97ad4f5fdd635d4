"""Small random-weight models of every architecture that the engine is shown on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 199
BASE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)


def _llama() -> PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**BASE))


def _mistral() -> PreTrainedModel:
    return tf.MistralForCausalLM(tf.MistralConfig(**BASE, sliding_window=13))


def _qwen3() -> PreTrainedModel:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**BASE, head_dim=16))


def _gemma3() -> PreTrainedModel:
    config = tf.Gemma3TextConfig(**{**BASE, "num_hidden_layers": 6}, head_dim=16, sliding_window=10)
    return tf.Gemma3ForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    config = tf.GptOssConfig(
        **BASE, head_dim=8, sliding_window=9, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None
    )
    return tf.GptOssForCausalLM(config)


def _llama4() -> PreTrainedModel:
    config = tf.Llama4TextConfig(
        **BASE,
        intermediate_size_mlp=48,
        head_dim=8,
        attention_chunk_size=16,
        num_local_experts=2,
        floor_scale=8,
        no_rope_layers=[1, 1, 1, 0],
    )
    return tf.Llama4ForCausalLM(config)


def _deepseek_v3() -> PreTrainedModel:
    config = tf.DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=2,
    )
    return tf.DeepseekV3ForCausalLM(config)


def _lfm2() -> PreTrainedModel:
    config = tf.Lfm2Config(
        **{**BASE, "num_hidden_layers": 5},
        block_multiple_of=8,
        layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
    )
    return tf.Lfm2ForCausalLM(config)


def _qwen3_next() -> PreTrainedModel:
    config = tf.Qwen3NextConfig(
        **BASE,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    )
    return tf.Qwen3NextForCausalLM(config)


def _nemotron_h() -> PreTrainedModel:
    config = tf.NemotronHConfig(
        **{**BASE, "num_hidden_layers": 5},
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
    )
    return tf.NemotronHForCausalLM(config)


def _falcon_h1() -> PreTrainedModel:
    config = tf.FalconH1Config(
        **BASE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
    )
    return tf.FalconH1ForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "deepseek_v3": _deepseek_v3,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
}


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, large enough that its greedy answers are not all alike."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return model
