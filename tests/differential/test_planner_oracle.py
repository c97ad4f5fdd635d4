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
NOT_ON_CPU = {
    "bamba-9b": "vLLM 0.25.1 has no Bamba model",
    "deepseek-v2-lite": "vLLM builds no MLA layers on CPU",
    "deepseek-v3": "vLLM builds no MLA layers on CPU",
}


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


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text()) | BUILD.get(name, {})
    if name == "nemotron-h-8b":  # transformers 5 knows no plain MLP in the pattern: leave out what keeps nothing
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


def num_layers(ours: Plan) -> int:
    return 1 + max(layer.index for layer in ours.layers)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("name", BUILD)
def test_same_plan(name: str, ranks: int, tmp_path: Path) -> None:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    config = published(name)
    options = PlanOptions(memory_bytes=MEMORY, tensor_parallel=ranks, max_model_len=longest(name), max_step=STEP)
    ours = plan(config, options)
    made = vllm_config(config, tmp_path, ours)
    with told_tensor_parallel(ranks):
        theirs = vllm_plan(made, layers_of(made))

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
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    text = config.get("text_config", config)
    return min(65536, int(text.get("max_position_embeddings") or text.get("max_target_positions") or 65536))


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


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_config_is_compared_or_says_why_not(name: str) -> None:
    assert name in BUILD or NOT_ON_CPU[name]
