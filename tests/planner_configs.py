"""Configurations the planner is tested with: those of examples/, those of ../shared, and one for each further family.

A further family's bytes are worked out by hand; fields are the defaults of transformers 5.24's class
(``models/<type>/configuration_<type>.py``) unless said otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "configs"
SHARED = next((p for p in (Path(__file__).parents[2] / "shared" / "configs",) if p.is_dir()), None)
WITHOUT_SHARED = "needs ../shared/configs, which is absent"


def expected_of_shared() -> dict[str, dict[str, Any]]:
    """Name of a configuration -> its bytes per token, ``long`` and ``short``; empty where ../shared is absent."""
    return {} if SHARED is None else json.loads((SHARED / "expected.json").read_text())


@dataclass(frozen=True, kw_only=True)
class Further:
    """``long`` and ``short``: bytes of one more token, padding of pages included. ``source``: of fields and rule."""

    fields: dict[str, Any]
    long: int
    short: int
    source: str


def plain(model_type: str, layers: int, hidden: int, heads: int, kv: int | None, **more: Any) -> dict[str, Any]:
    fields = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        **({} if kv is None else {"num_key_value_heads": kv}),
    }
    return {**fields, **more}


def full(model_type: str, layers: int, hidden: int, heads: int, kv: int | None, per_layer: int, **more: Any) -> Further:
    """Full attention in every layer; ``per_layer``: bytes of a token in one of them."""
    fields = plain(model_type, layers, hidden, heads, kv, **more)
    return Further(fields=fields, long=layers * per_layer, short=layers * per_layer, source=f"{model_type} defaults")


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

FURTHER = {
    "arcee": full("arcee", 32, 2560, 32, 32, 2 * 32 * 80 * 2),
    "cohere": full("cohere", 40, 8192, 64, 64, 2 * 64 * 128 * 2),
    "ernie4_5": full("ernie4_5", 18, 1024, 16, 2, 2 * 2 * 128 * 2, head_dim=128),
    "gemma": full("gemma", 28, 3072, 16, 16, 2 * 16 * 256 * 2, head_dim=256),
    "glm": full("glm", 40, 4096, 32, 2, 2 * 2 * 128 * 2, head_dim=128),
    "glm4": full("glm4", 40, 4096, 32, 2, 2 * 2 * 128 * 2, head_dim=128),
    "gpt_neox": full("gpt_neox", 44, 6144, 64, None, 2 * 64 * 96 * 2),
    "granite": full("granite", 32, 4096, 32, 32, 2 * 32 * 128 * 2),
    "granitemoe": full("granitemoe", 32, 4096, 32, 32, 2 * 32 * 128 * 2),
    "helium": full("helium", 24, 2560, 20, 20, 2 * 20 * 128 * 2, head_dim=128),
    "hunyuan_v1_dense": full("hunyuan_v1_dense", 32, 4096, 32, 32, 2 * 32 * 128 * 2),
    "hunyuan_v1_moe": full("hunyuan_v1_moe", 32, 4096, 32, 32, 2 * 32 * 128 * 2),
    "minimax_m2": full("minimax_m2", 62, 3072, 48, 8, 2 * 8 * 128 * 2, head_dim=128),
    "mimo": full("mimo", 36, 4096, 32, 8, 2 * 8 * 128 * 2),  # vLLM 0.25.1 models/mimo.py: as Qwen2
    "olmo": full("olmo", 32, 4096, 32, 32, 2 * 32 * 128 * 2),
    "olmo2": full("olmo2", 32, 4096, 32, 32, 2 * 32 * 128 * 2),
    "olmoe": full("olmoe", 16, 2048, 16, 16, 2 * 16 * 128 * 2),
    "opt": full("opt", 12, 768, 12, None, 2 * 12 * 64 * 2),
    "persimmon": full("persimmon", 36, 4096, 64, None, 2 * 64 * 64 * 2),
    "phi": full("phi", 24, 2048, 32, 32, 2 * 32 * 64 * 2),
    "phimoe": full("phimoe", 32, 4096, 32, 8, 2 * 8 * 128 * 2),
    "stablelm": full("stablelm", 32, 2560, 32, 32, 2 * 32 * 80 * 2),
    # one K/V head of 256 (vLLM 0.25.1 models/step3_text.py 239)
    "step3": full("step3_text", 61, 7168, 64, None, 2 * 256 * 2, head_dim=256, max_position_embedding=32768),
    "kimi_k2": full("kimi_k2", 61, 7168, 64, 64, 576 * 2, **LATENT),  # vLLM 0.25.1: DeepseekV3Config
    "glm4_moe_lite": full("glm4_moe_lite", 47, 2048, 20, 20, 576 * 2, **LATENT),
    "mistral4": full("mistral4", 36, 4096, 32, 32, (256 + 64) * 2, **{**LATENT, "kv_lora_rank": 256}),
    # beside the latent, an index key of 128 in fp8 with a scale of 4 bytes (vLLM 0.25.1 models/deepseek_v2.py 695)
    "deepseek_v32": full("deepseek_v32", 61, 7168, 128, 128, 576 * 2 + 132, index_head_dim=128, **LATENT),
    "glm_moe_dsa": full("glm_moe_dsa", 78, 6144, 64, 64, 576 * 2 + 132, index_head_dim=128, **LATENT),
    # falcon-40b: 8 K/V heads of 64 (transformers modeling_falcon.py 241)
    "falcon-40b": full(
        "falcon", 60, 8192, 128, None, 2 * 8 * 64 * 2, new_decoder_architecture=True, num_kv_heads=8
    ),
    "starcoder2": Further(
        fields=plain("starcoder2", 30, 3072, 24, 2, sliding_window=4096),
        long=0,
        short=30 * 2 * 2 * 128 * 2,
        source="transformers modeling_starcoder2.py 358: windows in every layer where the file names one",
    ),
    "ministral": Further(
        fields=plain("ministral", 32, 4096, 32, 8, sliding_window=4096),
        long=0,
        short=32 * 2 * 8 * 128 * 2,
        source="transformers MinistralConfig: layer_types all sliding",
    ),
    "exaone4": Further(
        fields=plain("exaone4", 64, 5120, 40, 8, head_dim=128, sliding_window=4096, sliding_window_pattern=4),
        long=16 * 4096,
        short=64 * 4096,
        source="transformers Exaone4Config: every fourth layer full",
    ),
    "exaone4-small": full("exaone4", 30, 2048, 32, 8, 2 * 8 * 64 * 2, sliding_window=None),
    "gemma4": Further(  # 30 layers, every sixth full with heads of 512, the others with heads of 256; pages are equal
        fields={
            "model_type": "gemma4",
            "dtype": "bfloat16",
            "text_config": {
                **plain("gemma4_text", 30, 2304, 8, 4, head_dim=256, global_head_dim=512, sliding_window=512),
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
                "num_kv_shared_layers": 0,
            },
        },
        long=5 * 8192,
        short=5 * 8192 + 25 * 4096,
        source="transformers Gemma4TextConfig, configuration_gemma4.py 208-222",
    ),
    "mimo_v2": Further(
        # full: 4 heads of 192 + 128; window: 8 of them, so that a block of 16 window tokens is as large as 32 full ones
        fields=plain(
            "mimo_v2_flash", 12, 4096, 64, 4, head_dim=192, v_head_dim=128, swa_num_key_value_heads=8,
            swa_head_dim=192, swa_v_head_dim=128, sliding_window_size=128, hybrid_layer_pattern=[0, 1, 1, 1, 1, 1] * 2,
        ),
        long=2 * 4 * 320 * 2,
        short=2 * 4 * 320 * 2 + 10 * 8 * 320 * 2,
        source="vLLM 0.25.1 models/mimo_v2.py 374-410, 464",
    ),
    "step3p5": Further(
        fields={
            **plain("step3p5", 4, 4096, 64, None, head_dim=128, num_attention_groups=8, sliding_window=512),
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96,
                                        "num_attention_groups": 8, "head_dim": 128},
        },
        long=4096,
        short=4 * 4096,
        source="vLLM 0.25.1 models/step3p5.py 430-470; configs/step3p5.py: layer_types goes on behind the layers",
    ),
    "minimax": Further(  # every eighth layer full; the others one matrix a head: 64 x 128 x 128
        fields=plain(
            "minimax", 16, 6144, 64, 8, head_dim=128, attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 2
        ),
        long=2 * 4096,
        short=2 * 4096,
        source="transformers modeling_minimax.py; vLLM 0.25.1 mamba_utils.py 130-137",
    ),
    "qwen3_5_moe": Further(
        fields=plain(
            "qwen3_5_moe_text", 8, 2048, 16, 2, head_dim=256, full_attention_interval=4, linear_num_key_heads=16,
            linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        ),
        long=2 * 2048,
        short=2 * 2048,
        source="vLLM 0.25.1 configs/qwen3_5_moe.py",
    ),
    "zamba2": Further(  # two of six layers are hybrid: 32 K/V heads of 160 = 2 x 2560 / 32
        fields=plain(
            "zamba2", 6, 2560, 32, 32, mamba_d_state=64, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=1,
            n_mamba_heads=80, layers_block_type=["mamba", "mamba", "hybrid"] * 2,
        ),
        long=2 * 2 * 32 * 160 * 2,
        short=2 * 2 * 32 * 160 * 2,
        source="transformers Zamba2Config; vLLM 0.25.1 models/zamba2.py 843-870",
    ),
    "mamba2": Further(
        fields={"model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "state_size": 128, "expand": 2,
                "num_heads": 128, "head_dim": 64, "n_groups": 8, "conv_kernel": 4, "dtype": "bfloat16",
                "max_position_embeddings": 8192},
        long=0,
        short=0,
        source="transformers Mamba2Config; vLLM 0.25.1 models/mamba2.py 187-213",
    ),
    "mamba": Further(
        fields={"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16,
                "intermediate_size": 1536, "conv_kernel": 4, "dtype": "bfloat16", "max_position_embeddings": 2048},
        long=0,
        short=0,
        source="transformers MambaConfig; vLLM 0.25.1 models/mamba.py 235-247",
    ),
    "mllama": Further(  # 32 of 40 layers keep text; 8 keep 4 tiles of 1601 image tokens
        fields={
            "model_type": "mllama",
            "torch_dtype": "bfloat16",
            "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
            "text_config": plain(
                "mllama_text_model", 40, 4096, 32, 8, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]
            ),
        },
        long=32 * 4096,
        short=32 * 4096,
        source="transformers MllamaTextConfig; modeling_mllama.py 123-146: a class token a tile",
    ),
    "t5gemma": Further(  # Gemma 2's decoder, windows and full in turn, with cross attention in each layer
        fields={
            "model_type": "t5gemma",
            "dtype": "bfloat16",
            "encoder": {"max_position_embeddings": 8192},
            "decoder": plain("t5_gemma_module", 26, 2304, 8, 4, head_dim=256, sliding_window=4096),
        },
        long=13 * 4096,
        short=26 * 4096,
        source="transformers T5GemmaModuleConfig",
    ),
    "gpt2": Further(
        fields={"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
                "torch_dtype": "float16"},
        long=12 * 2 * 768 * 2,
        short=12 * 2 * 768 * 2,
        source="transformers GPT2Config",
    ),
    "gpt_bigcode": Further(
        fields={"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_positions": 8192,
                "multi_query": True, "torch_dtype": "float16"},
        long=40 * 2 * 128 * 2,
        short=40 * 2 * 128 * 2,
        source="transformers GPTBigCodeConfig",
    ),
    "dbrx": Further(
        fields={"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
                "attn_config": {"kv_n_heads": 8}, "torch_dtype": "bfloat16"},
        long=40 * 2 * 8 * 128 * 2,
        short=40 * 2 * 8 * 128 * 2,
        source="transformers DbrxConfig",
    ),
}  # fmt: skip
