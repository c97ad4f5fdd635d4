"""The configurations of ../shared, whose bytes others worked out; and what used to be silently wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpager.errors import ConfigError
from kvpager.planner import Plan, PlanOptions, plan
from kvpager.planner.ecosystem import attribute, class_of
from kvpager.planner.families import FAMILIES
from kvpager.planner.memory import StateMemory
from planner_configs import FURTHER, SHARED, WITHOUT_SHARED, expected_of_shared, plain

needs_shared = pytest.mark.skipif(SHARED is None, reason=WITHOUT_SHARED)
needs_transformers = pytest.mark.skipif(class_of("llama") is None, reason="needs transformers (kvpager[plan])")
HYBRID_27B = plain(  # 64 layers, every fourth full; measured elsewhere with MTP k=3: 17 K/V layers, 3 x (2 + 3) states
    "qwen3_5_text", 64, 5120, 24, 4, head_dim=256, full_attention_interval=4, linear_num_key_heads=16,
    linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    mamba_ssm_dtype="float32", mtp_num_hidden_layers=1,
)  # fmt: skip


def planned(config: str | dict[str, Any], **options: Any) -> Plan:
    source = config if isinstance(config, dict) else (SHARED or Path()) / config
    return plan(source, PlanOptions(**{"memory_bytes": 1 << 41, **options}))


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpager.planner.ecosystem.class_of", lambda model_type: None)


@needs_shared
@pytest.mark.parametrize("name", expected_of_shared())
def test_bytes_of_a_shared_configuration(name: str) -> None:
    result, expected = planned(f"{name}.json"), expected_of_shared()[name]
    assert (result.bytes_per_token, result.bytes_per_first_token) == (expected["long"], expected["short"])


@needs_shared
@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("name", expected_of_shared())
def test_without_transformers_the_same_or_the_missing_field(name: str) -> None:
    try:
        result = planned(f"{name}.json")
    except ConfigError as error:
        assert "is missing" in str(error)
    else:
        expected = expected_of_shared()[name]
        assert (result.bytes_per_token, result.bytes_per_first_token) == (expected["long"], expected["short"])


@pytest.mark.parametrize("name", FURTHER)
def test_bytes_of_a_further_family(name: str) -> None:
    result, expected = planned(FURTHER[name].fields), FURTHER[name]
    assert (result.bytes_per_token, result.bytes_per_first_token) == (expected.long, expected.short), expected.source


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("name", FURTHER)
def test_further_families_need_no_transformers(name: str) -> None:
    assert planned(FURTHER[name].fields).bytes_per_token == FURTHER[name].long


@needs_transformers
@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family.defaults])
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    """Each value of a row is what transformers' class has where the file is silent; another field's name: as that."""
    found = class_of(model_type)
    if found is None:
        pytest.skip("transformers doesn't know it: the row follows vLLM 0.25.1")
    for field, value in FAMILIES[model_type].defaults.items():
        if field in ("sliding_window_pattern", "no_rope_layer_interval", "global_head_dim", "num_global_heads"):
            continue  # the class keeps it in layer_types or per_layer_config only
        if isinstance(value, str):  # as many as another field says, whatever that is
            odd = {"num_attention_heads": 24, "hidden_size": 24 * 64}
            config = found[0](**(odd if value in odd else {value: 24}))
            assert attribute(config, field) == attribute(config, value), field
        else:
            assert (per_layer(getattr(found[0](), "text_config", found[0]()), field) or None) == (value or None), field


def per_layer(config: Any, field: str) -> Any:
    """A field that may differ between layers, where the first layer is an ordinary one."""
    try:
        return attribute(config, field)
    except AttributeError:
        return getattr(getattr(config, "per_layer_config", [None])[0], field, None)


@needs_shared
@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("qwen3-8b-yarn", 131072),
        ("llama-2-7b-32k-linear", 32768),
        ("olmo-3-7b", 65536),
        ("phi-4-mini", 131072),
        ("gemma-3-12b", 131072),
        ("kimi-linear-48b", 1048576),
        ("chatglm3-6b", 8192),
        ("falcon-7b", 2048),
    ],
)
def test_longest_length(name: str, longest: int) -> None:
    assert planned(f"{name}.json").max_model_len == longest


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 65536),
        ({"type": "linear", "factor": 4.0}, 131072),
        ({"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, 32768),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0}, 131072),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 32768),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, 32768),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}}, 65536),
        ({"type": "yarn", "factor": None}, 32768),
    ],
)
def test_rotary_scaling_stretches_the_length(rope: dict[str, Any], longest: int) -> None:
    result = planned(plain("llama", 2, 256, 4, 2, rope_scaling=rope))
    assert result.max_model_len == longest
    assert any("rotary scaling" in note for note in result.notes) == (longest != 32768)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "awq", "bits": 4}, "bf16"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, "bf16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 3, "type": "int"}}, "bf16"),
    ],
)
def test_the_checkpoint_names_its_kv_dtype(quantization: dict[str, Any], dtype: str) -> None:
    fields = plain("llama", 2, 512, 4, 2, quantization_config=quantization)
    result = planned(fields)
    assert result.kv_dtype.name == dtype
    assert planned({"model_type": "llava", "text_config": fields}).kv_dtype.name == dtype
    assert planned(fields, kv_dtype="bf16").kv_dtype.name == "bf16"
    said = bool(quantization.get("kv_cache_scheme")) or dtype != "bf16"
    assert any("K/V" in note for note in result.notes) == said


@needs_shared
def test_nemotron_super_as_a_real_engine_logs_it() -> None:
    result = planned("nemotron-super-nvfp4")
    assert {group.spec.block_size for group in result.grouping.groups} == {8320}
    assert result.bytes_per_token == 4096
    assert result.kv_dtype.name == "fp8"  # hf_quant_config.json
    assert result.weights.num_bytes == 0
    estimated = planned("nemotron-super-nvfp4", weights_bytes=None).weights
    assert estimated.is_estimate and "120.7 billion parameters in nvfp4" in estimated.why


@needs_shared
@pytest.mark.filterwarnings("ignore:prefix caching is on but can never hit")
def test_an_alignment_that_no_sequence_reaches_never_hits() -> None:
    short = planned("nemotron-super-nvfp4", max_model_len=4096)
    assert "prefix caching can never hit" in " ".join(short.notes)
    assert short.no_hits_because == "hits are multiples of 8,320 tokens and no sequence is longer than 4,096"
    assert planned("nemotron-super-nvfp4", max_model_len=8321).no_hits_because is None
    assert planned("nemotron-super-nvfp4", state_mode="none").no_hits_because == "states are kept in mode none"
    assert "an encoder" in str(planned("whisper-large-v3-turbo.json").no_hits_because)


def test_drafting_layers_and_their_states() -> None:
    alone, drafted = planned(HYBRID_27B), planned(HYBRID_27B, speculative="mtp:3")
    assert [len(group.layers) for group in alone.growing] == [16]
    assert alone.states_per_request == 3 * 2
    assert [len(group.layers) for group in drafted.growing] == [17]
    assert drafted.states_per_request == 3 * (2 + 3)
    assert drafted.fixed_bytes_per_request == 15 * drafted.block_bytes
    assert [group.is_eagle for group in drafted.cache_config.groups] == [False] * 3 + [True]
    # the convolution keeps 3 + 3 inputs of 2 x 16 x 128 + 48 x 128 channels (vLLM 0.25.1 mamba_utils.py 180)
    states = {layer.memory.state_bytes for layer in drafted.layers if isinstance(layer.memory, StateMemory)}
    assert states == {6 * 10240 * 2 + 48 * 128 * 128 * 4}


@needs_shared
def test_states_of_kimi_linear_rwkv_and_falcon_mamba() -> None:
    def states(name: str) -> set[int]:
        memories = [layer.memory for layer in planned(name).layers]
        return {memory.state_bytes for memory in memories if isinstance(memory, StateMemory)}

    assert states("kimi-linear-48b.json") == {3 * 12288 * 2 + 32 * 128 * 128 * 4}
    assert states("rwkv-4-7b.json") == {2 * 4096 * 2 + 3 * 4096 * 4}
    assert states("falcon-mamba-7b.json") == {3 * 8192 * 2 + 8192 * 16 * 2}


def test_states_know_no_limit() -> None:
    fields = {name: value for name, value in FURTHER["mamba2"].fields.items() if name != "max_position_embeddings"}
    result = planned(fields)
    assert result.max_model_len == 2048
    assert any("ASSUMED: longest sequence 2,048 tokens" in note for note in result.notes)


def test_an_unknown_family_is_assumed_only_when_asked() -> None:
    fields = plain("brandnew", 4, 512, 8, 2)
    with pytest.raises(ConfigError, match=r"'brandnew' is not a family.*--assume full"):
        planned(fields)
    result = planned(fields, assume_full=True)
    assert result.bytes_per_token == 4 * 2 * 2 * 64 * 2
    assert any(note.startswith("ASSUMED: nothing is known of model type 'brandnew'") for note in result.notes)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (plain("llama", 2, 256, 4, 2, layer_types=["full_attention", "ring"]), "file says: full_attention, ring"),
        (plain("hunyuan_v1_moe", 2, 256, 4, 2, use_cla=True), "use_cla changes what"),
        (plain("mimo_v2", 3, 256, 4, 2, hybrid_layer_pattern=[0, 1]), "names 2 layers.*full_attention, sliding"),
        (plain("mimo_v2", 2, 256, 4, 2, hybrid_layer_pattern=[0, 7]), "of kind '7'"),
        (plain("mllama_text_model", 4, 256, 4, 2, cross_attention_layers=[5]), r"names layers \[5\]"),
        (plain("gemma3n_text", 3, 256, 4, 2, num_kv_shared_layers=3), "leaves no layer"),
        ({"model_type": "t5gemma", "decoder": FURTHER["t5gemma"].fields["decoder"]}, "encoder.max_position"),
        (plain("minimax", 2, 256, 4, 2, attn_type_list="01"), "must be a list of integers"),
        (plain("nemotron_h", 2, 256, 4, 2, hybrid_override_pattern=7), "must be a string with a letter"),
    ],
)
def test_what_a_row_does_not_explain_is_shown(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        planned(fields)


@needs_transformers
def test_what_the_class_fills_in_is_noted() -> None:
    result = planned({"model_type": "olmo2", "num_hidden_layers": 2, "torch_dtype": "bfloat16"})
    assert result.bytes_per_token == 2 * 2 * 32 * 128 * 2
    for field in ("hidden_size = 4096", "max_position_embeddings = 2048"):
        assert any(f"{field}: the default of olmo2 in transformers" in note for note in result.notes)


def test_a_quantization_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(plain("llama", 2, 256, 4, 2)))
    assert planned_at(tmp_path).kv_dtype.name == "bf16"
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    assert planned_at(tmp_path).kv_dtype.name == "fp8"
    assert planned_at(tmp_path / "config.json").kv_dtype.name == "fp8"


def planned_at(path: Path) -> Plan:
    return plan(path, PlanOptions(memory_bytes=1 << 30))
