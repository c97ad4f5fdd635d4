"""What each family keeps, in bytes worked out by hand from the numbers of its published configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvpager.errors import ConfigError
from kvpager.planner import Plan, PlanOptions, plan
from kvpager.planner.families import FAMILIES
from kvpager.planner.memory import AttentionMemory, StateMemory

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GIB = 1 << 30


def planned(config: str | dict[str, Any], **options: Any) -> Plan:
    source = CONFIGS / f"{config}.json" if isinstance(config, str) else config
    return plan(source, PlanOptions(**{"memory_bytes": 64 * GIB, **options}))


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpager.planner.ecosystem.class_of", lambda model_type: None)


def fields(name: str, **changes: Any) -> dict[str, Any]:
    """A published configuration with some fields changed; ``...`` takes a field out."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    section = config.get("text_config", config)
    section.update(changes)
    for field in [field for field, value in section.items() if value is ...]:
        del section[field]
    return config


@dataclass(frozen=True, kw_only=True)
class Expected:
    """``long`` and ``short``: bytes of one more token, padding included; ``fixed``: bytes of a long request's rest."""

    long: int
    short: int
    fixed: int
    state: int = 0
    page: int
    groups: list[int]


BY_HAND = {
    # 32 layers x (K, V) x 32 heads x 128 x 2 bytes
    "llama-2-7b": Expected(long=32 * 16384, short=32 * 16384, fixed=0, page=16 * 16384, groups=[32]),
    # 8 KV heads: 4 KiB a layer
    "llama-3.1-8b": Expected(long=131072, short=131072, fixed=0, page=65536, groups=[32]),
    "llama-3.1-70b": Expected(long=327680, short=327680, fixed=0, page=65536, groups=[80]),
    # a window of 4096: up to 257 blocks of 16, since it rarely starts at a block's start
    "mistral-7b-v0.1": Expected(long=0, short=131072, fixed=257 * 16 * 131072, page=65536, groups=[32]),
    "mistral-7b-v0.3": Expected(long=131072, short=131072, fixed=0, page=65536, groups=[32]),
    "qwen2-7b": Expected(long=28 * 2048, short=28 * 2048, fixed=0, page=16 * 2048, groups=[28]),
    "qwen3-8b": Expected(long=36 * 4096, short=36 * 4096, fixed=0, page=65536, groups=[36]),
    # states: convolution 3 x (2 x 16 x 128 + 32 x 128) and 32 x 128 x 128 values of 2 bytes;
    # attention 2 x 2 x 256 x 2 = 2048 bytes a token, so a page of 544 tokens holds a state (34 x 16)
    "qwen3-next-80b-a3b": Expected(
        long=12 * 2048,
        short=12 * 2048,
        fixed=36 * 2 * 544 * 2048,
        state=49152 + 1048576,
        page=544 * 2048,
        groups=[12] * 4,
    ),
    "gemma-2-9b": Expected(
        long=21 * 8192, short=42 * 8192, fixed=21 * 257 * 16 * 8192, page=16 * 8192, groups=[21, 21]
    ),
    # 5 full and 29 window layers, 1 of them empty: 65 blocks hold a window of 1024
    "gemma-3-4b": Expected(
        long=5 * 4096, short=35 * 4096, fixed=6 * 5 * 65 * 16 * 4096, page=65536, groups=[5, 5, 5, 5, 5, 4, 5]
    ),
    "gemma-3-27b": Expected(
        long=10 * 8192, short=70 * 8192, fixed=6 * 10 * 65 * 16 * 8192, page=131072, groups=[9, 9, 9, 9, 8, 8, 10]
    ),
    "gpt-oss-20b": Expected(long=12 * 2048, short=24 * 2048, fixed=12 * 9 * 16 * 2048, page=32768, groups=[12, 12]),
    # the last token of a chunk of 8192 still reads all of it: 512 blocks
    "llama-4-scout": Expected(long=12 * 4096, short=48 * 4096, fixed=3 * 12 * 8192 * 4096, page=65536, groups=[12] * 4),
    # (512 + 64) x 2 bytes, once for all heads
    "deepseek-v2-lite": Expected(long=27 * 1152, short=27 * 1152, fixed=0, page=16 * 1152, groups=[27]),
    "deepseek-v3": Expected(long=61 * 1152, short=61 * 1152, fixed=0, page=16 * 1152, groups=[61]),
    # 32 heads of 96; a window of 2047
    "phi-3-mini-4k": Expected(long=0, short=32 * 12288, fixed=129 * 16 * 32 * 12288, page=16 * 12288, groups=[32]),
    # Mamba 1: 3 x 8192 and 8192 x 16 values; 80 tokens of attention hold that
    "jamba-v0.1": Expected(
        long=4 * 4096, short=4 * 4096, fixed=28 * 2 * 80 * 4096, state=49152 + 262144, page=80 * 4096, groups=[4] * 8
    ),
    # Mamba 2: 3 x (8192 + 2 x 128) and 128 x 64 x 128 values; 29 layers leave one page of 10 groups of 3 empty
    "bamba-9b": Expected(
        long=3 * 4096,
        short=3 * 4096,
        fixed=30 * 2 * 528 * 4096,
        state=50688 + 2097152,
        page=528 * 4096,
        groups=[3] * 9 + [2, 3],
    ),
    "granite-4.0-h-small": Expected(
        long=4 * 4096,
        short=4 * 4096,
        fixed=36 * 2 * 528 * 4096,
        state=50688 + 2097152,
        page=528 * 4096,
        groups=[4] * 10,
    ),
    # 8 groups: 3 x (8192 + 2 x 8 x 128) values of 2 bytes; its recurrent states are float32
    "nemotron-h-8b": Expected(
        long=4 * 4096,
        short=4 * 4096,
        fixed=24 * 2 * 1040 * 4096,
        state=61440 + 4194304,
        page=1040 * 4096,
        groups=[4] * 7,
    ),
    # each of 36 layers has both: 512 bytes a token, and 3 x (1536 + 2 x 128) and 24 x 64 x 128 values
    "falcon-h1-0.5b": Expected(
        long=36 * 512, short=36 * 512, fixed=36 * 2 * 800 * 512, state=10752 + 393216, page=800 * 512, groups=[36, 36]
    ),
    # 2 x 2048 values a state, a quarter of a page of 16 tokens
    "lfm2-1.2b": Expected(
        long=6 * 2048, short=6 * 2048, fixed=12 * 2 * 16 * 2048, state=8192, page=32768, groups=[5, 5, 6]
    ),
    # 1500 audio tokens: 94 blocks
    "whisper-large-v3": Expected(
        long=32 * 5120, short=32 * 5120, fixed=32 * 94 * 16 * 5120, page=16 * 5120, groups=[32, 32]
    ),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_bytes_of_a_published_config(name: str) -> None:
    expected, result = BY_HAND[name], planned(name)

    assert result.bytes_per_token == expected.long
    assert result.bytes_per_first_token == expected.short
    assert result.fixed_bytes_per_request == expected.fixed
    assert {group.spec.page_bytes for group in result.grouping.groups} == {expected.page}
    assert sorted(len(group.layers) for group in result.grouping.groups) == sorted(expected.groups)
    states = {layer.memory.state_bytes for layer in result.layers if isinstance(layer.memory, StateMemory)}
    assert states == ({expected.state} if expected.state else set())


def test_every_family_that_is_promised_is_there() -> None:
    used = {planned(path.stem).model_type for path in CONFIGS.glob("*.json")}
    assert used <= set(FAMILIES)
    assert {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_next",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "llama4_text",
    } <= used
    assert {"deepseek_v2", "deepseek_v3", "phi3", "jamba", "bamba", "granitemoehybrid", "nemotron_h"} <= used
    assert {"falcon_h1", "lfm2", "whisper"} <= used


def kinds_by_layer(result: Plan) -> str:
    """One letter for each layer, in the model's order."""
    return "".join(
        layer.memory.kind[0] if isinstance(layer.memory, AttentionMemory) else "M" for layer in result.layers
    )


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("gemma-2-9b", "sf" * 21),
        ("gemma-3-4b", "sssssf" * 5 + "ssss"),
        ("gpt-oss-20b", "sf" * 12),
        ("llama-4-scout", "cccf" * 12),
        ("qwen3-next-80b-a3b", "MMMf" * 12),
        ("jamba-v0.1", "MMMMfMMM" * 4),
        ("bamba-9b", "MMMMMMMMMf" + "MMMMMMMMf" * 2 + "MMMM"),
        ("granite-4.0-h-small", "MMMMMfMMMM" * 4),
        ("nemotron-h-8b", "MMMMf" + "MMMMMf" * 3 + "MMMMM"),
        ("falcon-h1-0.5b", "fM" * 36),
        ("lfm2-1.2b", "MMf" * 2 + "MMfMfMfMfM"),
        ("whisper-large-v3", "fc" * 32),
    ],
)
def test_which_layer_is_of_which_kind(name: str, pattern: str) -> None:
    assert kinds_by_layer(planned(name)) == pattern


@pytest.mark.parametrize("name", ["gemma-2-9b", "gpt-oss-20b", "qwen2-7b"])
def test_a_list_of_layer_types_says_the_same_as_the_rule(name: str) -> None:
    long = {"s": "sliding_attention", "f": "full_attention"}
    kinds = [long[kind] for kind in kinds_by_layer(planned(name))]
    assert planned(fields(name, layer_types=kinds)).layers == planned(name).layers


def test_llama4_no_rope_layers() -> None:
    listed = fields("llama-4-scout", no_rope_layers=[1, 0] * 24)
    assert kinds_by_layer(planned(listed)) == "cf" * 24
    assert kinds_by_layer(planned(fields("llama-4-scout", attention_chunk_size=None))) == "f" * 48


def test_qwen_windows_begin_at_max_window_layers() -> None:
    config = fields("qwen2-7b", use_sliding_window=True, sliding_window=4096, max_window_layers=20)
    assert kinds_by_layer(planned(config)) == "f" * 20 + "s" * 8


def test_lfm2_from_layer_types() -> None:
    kinds = ["full_attention" if kind == "f" else "conv" for kind in kinds_by_layer(planned("lfm2-1.2b"))]
    config = fields("lfm2-1.2b", layer_types=kinds, full_attn_idxs=...)
    assert planned(config).layers == planned("lfm2-1.2b").layers


def test_nemotron_h_from_a_list_of_block_types() -> None:
    long = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = fields("nemotron-h-8b")["hybrid_override_pattern"]
    config = fields("nemotron-h-8b", hybrid_override_pattern=..., layers_block_type=[long[kind] for kind in pattern])
    assert planned(config).layers == planned("nemotron-h-8b").layers


@pytest.mark.parametrize("name", ["nemotron-h-8b", "granite-4.0-h-small", "bamba-9b", "jamba-v0.1"])
def test_the_names_that_transformers_5_gives_layer_types(name: str) -> None:
    new = {"M": "linear_attention", "f": "full_attention", "-": "mlp"}
    kinds = {
        layer.index: kinds for layer, kinds in zip(planned(name).layers, kinds_by_layer(planned(name)), strict=True)
    }
    listed = [new[kinds.get(index, "-")] for index in range(fields(name)["num_hidden_layers"])]
    old = ("hybrid_override_pattern", "attn_layer_indices", "attn_layer_period", "attn_layer_offset")
    assert planned(fields(name, **dict.fromkeys(old, ...), layer_types=listed)).layers == planned(name).layers


def test_mamba_head_size_auto_is_an_even_share() -> None:
    assert planned(fields("bamba-9b", mamba_d_head="auto")).layers == planned("bamba-9b").layers


@pytest.mark.parametrize("outer", ["text_config", "llm_config", "language_config"])
def test_nested_text_configurations(outer: str) -> None:
    nested = {"model_type": "some_vision_model", outer: fields("llama-3.1-8b"), "vision_config": {"hidden_size": 1}}
    assert planned(nested).layers == planned("llama-3.1-8b").layers


def test_doubly_nested_and_dtype_outside() -> None:
    text = fields("qwen3-8b", torch_dtype=...)
    nested = {"model_type": "omni", "dtype": "float16", "thinker_config": {"text_config": text}}
    result = planned(nested)
    assert result.kv_dtype.name == "fp16"
    assert result.bytes_per_token == 36 * 4096


# -- tensor and pipeline parallel ---------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "per_token"), [(1, 327680), (2, 163840), (8, 40960), (16, 40960), (64, 40960)])
def test_fewer_kv_heads_than_ranks_are_copied(ranks: int, per_token: int) -> None:
    assert planned("llama-3.1-70b", tensor_parallel=ranks).bytes_per_token == per_token


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_latent_is_not_split(ranks: int) -> None:
    assert planned("deepseek-v3", tensor_parallel=ranks).bytes_per_token == 61 * 1152


@pytest.mark.parametrize(
    ("name", "ranks", "state"),
    [
        ("nemotron-h-8b", 8, 3 * (1024 + 2 * 128) * 2 + 16 * 64 * 128 * 4),  # a group a rank
        ("nemotron-h-8b", 16, 3 * (512 + 2 * 128) * 2 + 8 * 64 * 128 * 4),  # a group on two ranks
        ("bamba-9b", 2, 3 * (4096 + 2 * 128) * 2 + 64 * 64 * 128 * 2),  # the one group on both ranks
        ("jamba-v0.1", 4, 3 * 2048 * 2 + 2048 * 16 * 2),
        ("qwen3-next-80b-a3b", 4, 3 * 2048 * 2 + 8 * 128 * 128 * 2),
        ("lfm2-1.2b", 2, 2 * 1024 * 2),
    ],
)
def test_states_are_split_among_ranks(name: str, ranks: int, state: int) -> None:
    layers = planned(name, tensor_parallel=ranks).layers
    assert {layer.memory.state_bytes for layer in layers if isinstance(layer.memory, StateMemory)} == {state}


@pytest.mark.parametrize(
    ("name", "ranks", "what"),
    [
        ("llama-3.1-8b", 3, "attention heads"),
        ("bamba-9b", 64, "heads"),
        ("qwen2-7b", 7, "and 4 key/value heads"),
        ("nemotron-h-8b", 3, "heads"),
        ("qwen3-next-80b-a3b", 32, "linear key heads"),
    ],
)
def test_ranks_that_do_not_divide(name: str, ranks: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor parallel size {ranks}.*{what}"):
        planned(name, tensor_parallel=ranks)


@pytest.mark.parametrize(
    ("name", "stages", "layers_here"),
    [
        ("llama-3.1-8b", 4, 8),
        ("deepseek-v3", 4, 16),  # 15, 15, 15, 16 would fill the last; the third has 16
        ("gpt-oss-20b", 2, 6),  # 6 of each kind
        ("gemma-3-27b", 2, 5),  # 31 layers: 5 full, 26 windows in 6 groups of at most 5
    ],
)
def test_the_fullest_stage_decides(name: str, stages: int, layers_here: int) -> None:
    assert planned(name, pipeline_parallel=stages).grouping.pages_per_block == layers_here


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "per_token"),
    [("fp16", 131072), ("bf16", 131072), ("fp8", 65536), ("int8", 32 * 8 * 2 * (128 + 4))],
)
def test_kv_dtypes(dtype: str, per_token: int) -> None:
    assert planned("llama-3.1-8b", kv_dtype=dtype).bytes_per_token == per_token


def test_int8_latent_has_one_scale() -> None:
    assert planned("deepseek-v3", kv_dtype="int8").bytes_per_token == 61 * (576 + 4)


def test_kv_dtype_leaves_states_alone() -> None:
    for dtype in ("fp8", "bf16"):
        layers = planned("bamba-9b", kv_dtype=dtype).layers
        assert {m.state_bytes for m in (layer.memory for layer in layers) if isinstance(m, StateMemory)} == {2147840}


def test_state_dtype_from_the_file_and_from_the_user() -> None:
    def state(config: dict[str, Any], **options: Any) -> set[int]:
        memories = [layer.memory for layer in planned(config, **options).layers]
        return {memory.state_bytes for memory in memories if isinstance(memory, StateMemory)}

    assert state(fields("nemotron-h-8b", mamba_ssm_cache_dtype="bfloat16")) == {61440 + 2097152}
    assert state(fields("qwen3-next-80b-a3b", mamba_ssm_dtype="float32")) == {49152 + 2097152}
    assert state(fields("nemotron-h-8b"), state_dtype="float16") == {61440 + 2097152}
    with pytest.raises(ConfigError, match="'fp7' is not a dtype of states"):
        state(fields("nemotron-h-8b"), state_dtype="fp7")


@pytest.mark.parametrize(("dtype", "said"), [("float32", "says float32"), (..., "names no dtype")])
def test_without_a_16_bit_dtype_the_report_says_what_was_counted(dtype: Any, said: str) -> None:
    result = planned(fields("llama-3.1-8b", torch_dtype=dtype))
    assert result.kv_dtype.name == "bf16"
    assert any(said in note for note in result.notes)


def test_defaults_of_the_model_type_are_noted() -> None:
    assert any("num_key_value_heads = 32" in n for n in planned(fields("llama-2-7b", num_key_value_heads=...)).notes)
    assert planned("llama-2-7b").notes == ()
    notes = planned("gemma-3-4b").notes
    assert any("text_config.num_key_value_heads = 4" in note for note in notes)
    assert any("text_config.head_dim = 256" in note for note in notes)


# -- what can't be placed is named -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "rwkv9"}, "'rwkv9'"),
        ({"hidden_size": 4}, "model_type"),
        ({"model_type": "mllama", "text_config": {"model_type": "mllama_9"}}, "text_config.model_type"),
        (fields("qwen2-7b", num_hidden_layers=...), "num_hidden_layers"),
        (fields("qwen2-7b", hidden_size=...), "hidden_size"),
        (fields("qwen2-7b", num_attention_heads=...), "num_attention_heads"),
        (fields("llama-3.1-8b", max_position_embeddings=...), "max_position_embeddings"),
        (fields("llama-3.1-8b", num_hidden_layers="32"), "num_hidden_layers"),
        (fields("llama-3.1-8b", num_hidden_layers=0), "num_hidden_layers"),
        (fields("llama-3.1-8b", num_hidden_layers=10**9), "no more than 1000 layers"),
        (fields("llama-3.1-8b", num_hidden_layers=True), "num_hidden_layers"),
        (fields("llama-3.1-8b", hidden_size=4097), "head_dim"),
        (fields("llama-3.1-8b", layer_types=["full_attention"] * 31), "layer_types"),
        (fields("llama-3.1-8b", layer_types=["full_attention"] * 31 + ["ring"]), "layer 31 is of kind 'ring'"),
        (fields("llama-3.1-8b", layer_types="full_attention"), "layer_types"),
        (fields("qwen2-7b", num_key_value_heads=...), "num_key_value_heads"),
        (fields("mistral-7b-v0.1", sliding_window=...), "sliding_window"),
        (fields("gemma-2-9b", head_dim=...), "head_dim"),
        (fields("gemma-3-27b", sliding_window=None), "text_config.sliding_window"),
        (fields("gpt-oss-20b", sliding_window=...), "sliding_window"),
        (fields("llama-4-scout", attention_chunk_size=...), "attention_chunk_size"),
        (fields("llama-4-scout", no_rope_layers=[1]), "no_rope_layers"),
        (fields("deepseek-v3", kv_lora_rank=...), "kv_lora_rank"),
        (fields("qwen3-next-80b-a3b", full_attention_interval=...), "full_attention_interval"),
        (fields("qwen3-next-80b-a3b", linear_num_value_heads=...), "linear_num_value_heads"),
        (fields("jamba-v0.1", attn_layer_offset=...), "attn_layer_offset"),
        (fields("jamba-v0.1", mamba_d_state=...), "mamba_d_state"),
        (fields("bamba-9b", attn_layer_indices=...), "attn_layer_indices"),
        (fields("bamba-9b", mamba_d_head=32), "Mamba heads of size 32"),
        (fields("granite-4.0-h-small", layer_types=...), "layer_types"),
        (fields("granite-4.0-h-small", mamba_n_groups=...), "mamba_n_groups"),
        (fields("nemotron-h-8b", hybrid_override_pattern=...), "hybrid_override_pattern"),
        (fields("nemotron-h-8b", num_hidden_layers=51), "hybrid_override_pattern"),
        (fields("nemotron-h-8b", num_hidden_layers=2, hybrid_override_pattern="-E"), "none of the 2 keeps anything"),
        (fields("llama-4-scout", no_rope_layers="none"), "no_rope_layers"),
        (fields("whisper-large-v3", d_model=1281), "d_model"),
        (fields("nemotron-h-8b", hybrid_override_pattern="M?", num_hidden_layers=2), "'\\?'"),
        (fields("falcon-h1-0.5b", mamba_n_heads=...), "mamba_n_heads"),
        (fields("lfm2-1.2b", full_attn_idxs=...), "full_attn_idxs"),
        (fields("lfm2-1.2b", conv_L_cache=...), "conv_L_cache"),
        (fields("whisper-large-v3", max_source_positions=...), "max_source_positions"),
        (fields("whisper-large-v3", decoder_layers=...), "decoder_layers"),
    ],
)
@pytest.mark.usefixtures("without_transformers")
def test_what_is_missing_or_unknown_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        planned(config)
