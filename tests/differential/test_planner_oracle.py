"""The planner beside vLLM 0.25.1's own: the same groups of the same layers, blocks, pages and counts.

vLLM's models are built without weights (on the meta device), so that its layers say what they keep,
and its planner groups them. A tensor-parallel size is only told to it: no other rank is there.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpager.planner import Plan, PlanOptions, plan
from kvpager.planner.grouping import pipeline_ranks
from kvpager.planner.memory import StateMemory
from planner_configs import FURTHER, SHARED, WITHOUT_SHARED

from .conftest import MISSING, REPORT

pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.filterwarnings("ignore")]

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
MEMORY = 64 << 30
STEP = 2048

Groups = set[tuple[str, int, int, frozenset[int]]]
"""Kind, tokens in a block, bytes of a page, indices of the layers."""

# What vLLM needs to build the model: it has no part in the cache.
BUILD: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"architectures": ["LlamaForCausalLM"]},
    "llama-3.1-8b": {"architectures": ["LlamaForCausalLM"]},
    "llama-3.1-70b": {"architectures": ["LlamaForCausalLM"]},
    "mistral-7b-v0.1": {"architectures": ["MistralForCausalLM"]},
    "mistral-7b-v0.3": {"architectures": ["MistralForCausalLM"]},
    "qwen2-7b": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3-8b": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3-next-80b-a3b": {"architectures": ["Qwen3NextForCausalLM"]},
    "gemma-2-9b": {"architectures": ["Gemma2ForCausalLM"]},
    "gemma-3-4b": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "gemma-3-27b": {"architectures": ["Gemma3ForConditionalGeneration"]},
    "gpt-oss-20b": {"architectures": ["GptOssForCausalLM"], "torch_dtype": "bfloat16"},
    "llama-4-scout": {"architectures": ["Llama4ForConditionalGeneration"]},
    "phi-3-mini-4k": {"architectures": ["Phi3ForCausalLM"]},
    "jamba-v0.1": {"architectures": ["JambaForCausalLM"]},
    "granite-4.0-h-small": {"architectures": ["GraniteMoeHybridForCausalLM"]},
    "falcon-h1-0.5b": {"architectures": ["FalconH1ForCausalLM"]},
    "lfm2-1.2b": {"architectures": ["Lfm2ForCausalLM"], "block_dim": 2048, "block_ff_dim": 12288, "conv_dim_out": 2048},
    "nemotron-h-8b": {"architectures": ["NemotronHForCausalLM"]},
    "whisper-large-v3": {
        "architectures": ["WhisperForConditionalGeneration"],
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120,
    },
}
# Further families, and those of ../shared: what vLLM needs to build them.
MORE: dict[str, dict[str, Any]] = {
    "cohere": {"architectures": ["CohereForCausalLM"]},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"]},
    "granite": {"architectures": ["GraniteForCausalLM"]},
    "granitemoe": {"architectures": ["GraniteMoeForCausalLM"]},
    "glm": {"architectures": ["GlmForCausalLM"]},
    "glm4": {"architectures": ["Glm4ForCausalLM"]},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"]},
    "gemma": {"architectures": ["GemmaForCausalLM"]},
    "gemma4": {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}},
    "hunyuan_v1_dense": {"architectures": ["HunYuanDenseV1ForCausalLM"]},
    "hunyuan_v1_moe": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "num_experts": 8,
        "moe_topk": [1] * 32,
        "moe_intermediate_size": [64] * 32,
        "use_mixed_mlp_moe": False,
    },
    "minimax_m2": {"architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 64, "scoring_func": "sigmoid"},
    "olmo": {"architectures": ["OlmoForCausalLM"]},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmoe": {"architectures": ["OlmoeForCausalLM"]},
    "opt": {"architectures": ["OPTForCausalLM"]},
    "persimmon": {"architectures": ["PersimmonForCausalLM"]},
    "phi": {"architectures": ["PhiForCausalLM"]},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "stablelm": {"architectures": ["StableLmForCausalLM"]},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"]},
    "gpt2": {"architectures": ["GPT2LMHeadModel"]},
    "gpt_bigcode": {"architectures": ["GPTBigCodeForCausalLM"]},
    "falcon-40b": {"architectures": ["FalconForCausalLM"]},
    "zamba2": {"architectures": ["Zamba2ForCausalLM"]},
    "mamba2": {"architectures": ["Mamba2ForCausalLM"]},
    "mamba": {"architectures": ["MambaForCausalLM"]},
    "step3": {"architectures": ["Step3TextForCausalLM"], "moe_layers_enum": "1,2"},
    "step3p5": {"architectures": ["Step3p5ForCausalLM"], "max_seq_len": 32768},
    "ministral": {"architectures": ["MistralForCausalLM"]},
    "arcee": {"architectures": ["ArceeForCausalLM"]},
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"]},
    "shared/command-a-03-2025": {"architectures": ["Cohere2ForCausalLM"]},
    "shared/ernie-4.5-21b-a3b": {"architectures": ["Ernie4_5_MoeForCausalLM"]},
    "shared/glm-4.5-air": {"architectures": ["Glm4MoeForCausalLM"]},
    "shared/granite-4.0-h-tiny": {"architectures": ["GraniteMoeHybridForCausalLM"]},
    "shared/olmo-3-7b": {"architectures": ["Olmo3ForCausalLM"]},
    "shared/seed-oss-36b": {"architectures": ["SeedOssForCausalLM"]},
    "shared/smollm3-3b": {"architectures": ["SmolLM3ForCausalLM"]},
    "shared/falcon-7b": {"architectures": ["FalconForCausalLM"]},
    "shared/falcon-mamba-7b": {"architectures": ["FalconMambaForCausalLM"]},
    "shared/chatglm3-6b": {
        "architectures": ["ChatGLMModel"],
        "original_rope": True,
        "rmsnorm": True,
        "layernorm_epsilon": 1e-5,
        "padded_vocab_size": 65024,
        "ffn_hidden_size": 13696,
        "add_qkv_bias": True,
        "tie_word_embeddings": False,
    },
    "shared/nemotron-nano-9b-v2": {"architectures": ["NemotronHForCausalLM"]},
    "shared/qwen3-8b-yarn": {"architectures": ["Qwen3ForCausalLM"]},
}
_NO_MLA = "vLLM builds no MLA layers on CPU"
_NOT_KNOWN = "transformers 5.5.3, which vLLM 0.25.1 reads configurations with, doesn't know it"
_NO_MODEL = "vLLM 0.25.1 has no such model"
_NOT_SMALL = "its model needs more fields than what the cache is planned from"
NOT_ON_CPU = {
    "bamba-9b": _NO_MODEL,
    "deepseek-v2-lite": _NO_MLA,
    "deepseek-v3": _NO_MLA,
    **dict.fromkeys(("kimi_k2", "glm4_moe_lite", "mistral4", "deepseek_v32", "glm_moe_dsa"), _NO_MLA),
    **dict.fromkeys(("mimo", "mimo_v2"), _NOT_KNOWN),
    **dict.fromkeys(("helium", "minimax", "mllama", "t5gemma"), _NO_MODEL),
    **dict.fromkeys(("dbrx", "qwen3_5_moe"), _NOT_SMALL),
    "exaone4-small": "the same model as exaone4",
}
NUMBERED_OTHERWISE = {"zamba2"}
"""vLLM gives the attention of these models' layers numbers of its own."""


@pytest.fixture(scope="module")
def one_process() -> Iterator[None]:
    """vLLM's process groups, with this process alone in them."""
    import vllm.model_executor.models.registry as registry
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    inspect_in_subprocess = registry._run_in_subprocess
    registry._run_in_subprocess = lambda inspect: inspect()
    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        store = f"file://{directory}/store"
        init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=store, backend="gloo")
        initialize_model_parallel(1, 1)
        yield
    registry._run_in_subprocess = inspect_in_subprocess


def source(name: str) -> dict[str, Any]:
    """The fields of a configuration of examples/, of ../shared, or of a further family."""
    if name in FURTHER:
        return FURTHER[name].fields
    if name.startswith("shared/"):
        if SHARED is None:
            pytest.skip(WITHOUT_SHARED)
        return dict(json.loads((SHARED / f"{name.removeprefix('shared/')}.json").read_text()))
    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def published(name: str) -> dict[str, Any]:
    config = {**source(name), **BUILD.get(name, {}), **MORE.get(name, {})}
    if "nemotron" in name:  # transformers 5 knows no plain MLP in the pattern: leave out what keeps nothing
        pattern = config["hybrid_override_pattern"].replace("-", "")
        config |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    return config


def vllm_config(config: dict[str, Any], directory: Path, planned: Plan) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    (directory / "config.json").write_text(json.dumps(config))
    arguments = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        enable_prefix_caching=True,
        mamba_cache_mode=planned.options.state_mode,
        block_size=planned.options.block_size,
        max_model_len=planned.max_model_len,
        max_num_batched_tokens=STEP,
        limit_mm_per_prompt={"image": 0},
        mamba_ssm_cache_dtype=planned.options.state_dtype or "auto",
    )
    made = arguments.create_engine_config()
    made.parallel_config.tensor_parallel_size = planned.options.tensor_parallel
    return made


@contextmanager
def told_tensor_parallel(size: int) -> Iterator[None]:
    from vllm.distributed import get_tp_group

    get_tp_group().world_size = size
    yield
    get_tp_group().world_size = 1


def layers_of(config: Any) -> dict[str, Any]:
    """What each layer of the model keeps, as vLLM says it."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config):
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        layers = config.compilation_config.static_forward_context.items()
        specs = {
            name: layer.get_kv_cache_spec(config) for name, layer in layers if isinstance(layer, AttentionLayerBase)
        }
    return {name: spec for name, spec in specs.items() if spec is not None}


def vllm_plan(config: Any, *stages: dict[str, Any]) -> Any:
    """The plan of vLLM's first pipeline stage; block counts are the same on all."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    with set_current_vllm_config(config):
        return get_kv_cache_configs(config, list(stages), [MEMORY] * len(stages))[0]


def vllm_groups(theirs: Any, num_layers: int) -> Groups:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return {
        (
            get_kv_cache_spec_kind(group.kv_cache_spec).value,
            group.kv_cache_spec.block_size,
            group.kv_cache_spec.page_size_bytes,
            frozenset(
                _number(name) % num_layers for name in group.layer_names
            ),  # Falcon-H1's Mamba: from num_layers on
        )
        for group in theirs.kv_cache_groups
    }


def _number(name: str) -> int:
    """The number in a layer's name: its place in the model."""
    match = re.search(r"\d+", name)
    assert match is not None, name
    return int(match[0])


def our_groups(ours: Plan) -> Groups:
    return {
        (
            group.spec.kind,
            group.spec.block_size,
            group.spec.page_bytes,
            frozenset(layer.index for layer in group.layers),
        )
        for group in ours.grouping.groups
    }


def unnumbered(groups: Groups) -> list[tuple[str, int, int, int]]:
    return sorted((kind, block_size, page, len(layers)) for kind, block_size, page, layers in groups)


def num_layers(ours: Plan) -> int:
    return 1 + max(layer.index for layer in ours.layers)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", [*BUILD, *MORE])
def test_same_plan(name: str, ranks: int, tmp_path: Path) -> None:
    if (name, ranks) == ("shared/falcon-7b", 4):
        pytest.skip("71 heads can't be shared")
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    config = published(name)
    options = PlanOptions(memory_bytes=MEMORY, tensor_parallel=ranks, max_model_len=longest(name), max_step=STEP)
    ours = plan(config, options)
    made = vllm_config(config, tmp_path, ours)
    with told_tensor_parallel(ranks):
        theirs = vllm_plan(made, layers_of(made))

    if name in NUMBERED_OTHERWISE:
        assert unnumbered(our_groups(ours)) == unnumbered(vllm_groups(theirs, num_layers(ours)))
    else:
        assert our_groups(ours) == vllm_groups(theirs, num_layers(ours))
    assert ours.num_blocks == theirs.num_blocks
    for group in theirs.kv_cache_groups:
        kind = get_kv_cache_spec_kind(group.kv_cache_spec).value
        mine = next(g for g in ours.grouping.groups if g.spec.kind == kind)
        bound = group.kv_cache_spec.max_memory_usage_bytes(made) // group.kv_cache_spec.page_size_bytes
        need = ours.blocks_of_group(mine, ours.max_model_len, max_step=STEP)
        # Ours follows from what dies; theirs is an upper bound, for an encoder its budget of tokens in a step.
        assert need <= bound
        assert need >= bound - 1 or kind == "cross_attention"
    counts = f"{len(theirs.kv_cache_groups)} groups, {theirs.num_blocks} blocks"
    REPORT.append(f"planner beside vLLM: {name}, {ranks} ranks: {counts}")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b", "jamba-v0.1", "llama-4-scout"])
def test_same_number_of_blocks_with_pipeline_stages(name: str, stages: int, tmp_path: Path) -> None:
    from vllm.distributed.utils import get_pp_indices

    config = published(name)
    options = PlanOptions(memory_bytes=MEMORY, pipeline_parallel=stages, max_model_len=longest(name), max_step=STEP)
    ours = plan(config, options)
    made = vllm_config(config, tmp_path, ours)
    specs = layers_of(made)
    runs = [range(*get_pp_indices(num_layers(ours), rank, stages)) for rank in range(stages)]
    split = [{name: spec for name, spec in specs.items() if _number(name) in run} for run in runs]
    assert runs == pipeline_ranks(num_layers(ours), stages)
    assert ours.num_blocks == vllm_plan(made, *split).num_blocks


def test_same_bytes_for_int8_with_scales() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    theirs = FullAttentionSpec(
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.int8,
        kv_quant_mode=get_kv_quant_mode("int8_per_token_head"),
    )
    ours = plan(published("llama-3.1-8b"), PlanOptions(memory_bytes=MEMORY, kv_dtype="int8"))
    assert ours.grouping.page_bytes == theirs.page_size_bytes


def longest(name: str) -> int:
    """A length that is above every window and chunk where the model allows it, and that vLLM takes."""
    return min(65536, plan(source(name), PlanOptions(memory_bytes=1 << 50)).max_model_len)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_same_latent(name: str, ranks: int, tmp_path: Path) -> None:
    """vLLM builds no MLA layer on CPU; its model configuration and its spec still say what one keeps."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    architecture = {"deepseek-v2-lite": "DeepseekV2ForCausalLM", "deepseek-v3": "DeepseekV3ForCausalLM"}[name]
    config = published(name) | {"architectures": [architecture]}
    ours = plan(config, PlanOptions(memory_bytes=MEMORY, tensor_parallel=ranks, max_model_len=longest(name)))
    made = vllm_config(config, tmp_path, ours)
    model = made.model_config
    spec = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=model.get_num_kv_heads(made.parallel_config),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    specs = {f"model.layers.{i}.self_attn": spec for i in range(model.get_total_num_hidden_layers())}
    theirs = vllm_plan(made, specs)
    assert our_groups(ours) == vllm_groups(theirs, num_layers(ours))
    assert ours.num_blocks == theirs.num_blocks


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_same_blocks_with_an_index_beside_the_latent(name: str, tmp_path: Path) -> None:
    """vLLM keeps the index in layers of their own, with pages of their own, in the same group."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    ours = plan(source(name), PlanOptions(memory_bytes=MEMORY))
    made = vllm_config(source("qwen2-7b") | BUILD["qwen2-7b"], tmp_path, plan(source("qwen2-7b"), ours.options))
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, cache_dtype_str="auto"
    )
    index = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    layers = range(num_layers(ours))
    specs = {f"layers.{i}.attn": latent for i in layers} | {f"layers.{i}.indexer": index for i in layers}
    assert vllm_plan(made, specs).num_blocks == ours.num_blocks


@pytest.mark.parametrize(("dtype", "theirs"), [("nvfp4", "nvfp4"), ("int4_per_token_head", None), ("fp8_e5m2", None)])
def test_same_bytes_of_packed_values(dtype: str, theirs: str | None) -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode(theirs or dtype),
    )
    ours = plan(published("llama-3.1-8b"), PlanOptions(memory_bytes=MEMORY, kv_dtype=dtype))
    assert ours.grouping.page_bytes == spec.page_size_bytes


def test_same_bytes_of_a_latent_layout() -> None:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=576, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla"
    )
    ours = plan(published("deepseek-v3"), PlanOptions(memory_bytes=MEMORY, kv_dtype="fp8_ds_mla"))
    assert ours.grouping.page_bytes == spec.page_size_bytes


@pytest.mark.parametrize("drafted", [0, 3])
def test_same_states_with_drafted_tokens(drafted: int) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    options = {"speculative": f"mtp:{drafted}"} if drafted else {}
    ours = plan(source("qwen3-next-80b-a3b"), PlanOptions(memory_bytes=MEMORY, **options))  # type: ignore[arg-type]
    (state,) = {layer.memory for layer in ours.layers if isinstance(layer.memory, StateMemory)}
    theirs = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4, drafted)
    assert [tensor.shape for tensor in state.tensors] == [tuple(shape) for shape in theirs]


@pytest.mark.parametrize("name", sorted({*(path.stem for path in CONFIGS.glob("*.json")), *FURTHER}))
def test_every_config_is_compared_or_says_why_not(name: str) -> None:
    assert name in BUILD or name in MORE or NOT_ON_CPU[name]
