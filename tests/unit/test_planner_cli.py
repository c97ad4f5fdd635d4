"""``kvpager plan`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvpager.errors import ConfigError
from kvpager.planner.cli import plan_command
from kvpager.planner.units import format_bytes, format_tokens, parse_bytes, parse_tokens

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
KEYS = [
    "groups",
    "bytes_per_token",
    "fixed_bytes_per_request",
    "block_bytes",
    "num_blocks",
    "longest_sequence",
    "concurrency",
    "notes",
    "config",
    "model_type",
    "kv_dtype",
    "max_model_len",
    "num_encoder_tokens",
    "bytes_per_first_token",
    "states_per_request",
    "padding_bytes_per_request",
    "hit_alignment",
    "num_ranks",
    "replicas",
    "cache_bytes",
    "weights_bytes",
    "weights_from",
    "trace",
]


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(plan_command)
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True, env={"COLUMNS": "100"})


def kvpager(*arguments: str) -> subprocess.CompletedProcess[str]:
    call = "from kvpager.cli import main; main()"
    return subprocess.run([sys.executable, "-c", call, "plan", *arguments], capture_output=True, text=True, check=False)


def test_json_has_exactly_the_promised_keys() -> None:
    result = run(str(CONFIGS / "gpt-oss-20b.json"), "--memory", "8GiB", "--lengths", "1k,8k,128k", "--json")
    answer = json.loads(result.stdout)

    assert list(answer) == KEYS
    assert answer["bytes_per_token"] == 24576
    assert answer["fixed_bytes_per_request"] == 12 * 9 * 16 * 2048
    assert answer["block_bytes"] == 12 * 16 * 2048
    assert answer["num_blocks"] == (8 << 30) // answer["block_bytes"]
    assert answer["longest_sequence"] == 131072
    assert list(answer["concurrency"]) == ["1024", "8192", "131072"]
    assert [group["kind"] for group in answer["groups"]] == ["sliding_window", "full_attention"]
    assert answer["groups"][0]["layers"][:2] == ["layers.0.self_attn", "layers.2.self_attn"]
    assert answer["groups"][0]["extent"] == 128


def test_json_of_states() -> None:
    answer = json.loads(run(str(CONFIGS / "bamba-9b.json"), "--memory", "40GiB", "--json").stdout)
    (states, *_) = answer["groups"]
    assert states["state"] == "Mamba 2"
    assert states["tensors"][0] == {"name": "conv", "shape": [3, 8448], "dtype": "bfloat16"}
    assert states["bytes_per_state_and_layer"] == 2147840
    assert sum(group["padding_layers"] for group in answer["groups"]) == 1


def test_all_options() -> None:
    result = run(
        str(CONFIGS / "llama-3.1-70b.json"),
        *("--memory", "80GiB", "--weights-memory", "18.5GiB", "--tensor-parallel", "8", "--pipeline-parallel", "2"),
        *("--kv-dtype", "int8", "--block-size", "32", "--max-model-len", "32k", "--max-num-batched-tokens", "8k"),
        *("--lengths", "32k", "--json"),
    )
    answer = json.loads(result.stdout)
    per_token = 40 * 2 * (128 + 4)
    assert answer["bytes_per_token"] == per_token
    assert answer["num_blocks"] == (61 * 2 + 1) * (1 << 29) // (32 * per_token)
    assert answer["concurrency"] == {"32768": (answer["num_blocks"] - 1) // 1024}


def test_table_names_kinds_costs_and_what_fits() -> None:
    text = run(str(CONFIGS / "gemma-3-27b.json"), "--memory", "80GiB", "--weights-memory", "54GiB").stdout
    for part in ("52 window 1,024", "10 full", "8 KiB/tok", "6x10", "of it padding", "longest sequence"):
        assert part in text
    assert "a token at short context" in text
    assert "560 KiB" in text and "80 KiB" in text
    assert "requests of 128k at once" in text
    assert "the default of gemma3_text" in text


def test_a_directory_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-8b.json").read_text())
    assert json.loads(run(str(tmp_path), "--memory", "8GiB", "--json").stdout)["bytes_per_token"] == 147456


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    figure = tmp_path / f"plan.{suffix}"
    assert run(str(CONFIGS / "falcon-h1-0.5b.json"), "--memory", "8GiB", "--plot", str(figure)).exit_code == 0
    assert figure.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no-such.json", "--memory", "1GiB"], "no-such.json: No such file"),
        (["llama-3.1-8b.json", "--memory", "lots"], "'lots' is not a size"),
        (["llama-3.1-8b.json", "--memory", "1GiB", "--lengths", "1k,many"], "'many' is not a length"),
        (["llama-3.1-8b.json", "--memory", "1GiB", "--lengths", "0"], "num_tokens must be an integer of at least 1"),
        (["llama-3.1-8b.json", "--memory", "1GiB", "--max-model-len", ""], "'' is not a length"),
        (["deep.json", "--memory", "1GiB"], "deep.json: not JSON"),
        (["llama-3.1-8b.json", "--memory", "1GiB", "--kv-dtype", "int3"], "kv_dtype must be one of"),
        (["llama-3.1-8b.json", "--memory", "1GiB", "--tensor-parallel", "3"], "tensor parallel size 3"),
        (["llama-3.1-8b.json", "--memory", "1MiB"], "give more memory"),
        (["llama-3.1-8b.json", "--memory", "1GiB", "--plot", "plan.xyz"], "plan.xyz"),
        (["broken.json", "--memory", "1GiB"], "broken.json: not JSON"),
        (["list.json", "--memory", "1GiB"], "list.json: a model's configuration is a JSON object, got list"),
        (["bytes.json", "--memory", "1GiB"], "bytes.json: not JSON"),
        (["odd.json", "--memory", "1GiB"], "odd.json: model_type 'odd'"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, arguments: list[str], named: str) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.json").write_text('{"model_type": "odd"}')
    (tmp_path / "llama-3.1-8b.json").write_text((CONFIGS / "llama-3.1-8b.json").read_text())
    result = run(str(tmp_path / arguments[0]), *arguments[1:])
    assert isinstance(result.exception, ConfigError)
    assert named in str(result.exception)


def test_bad_input_on_the_command_line() -> None:
    result = kvpager(str(CONFIGS / "llama-3.1-8b.json"), "--memory", "1MiB")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


def test_sizes() -> None:
    assert [parse_bytes(text) for text in ("1", "1 KiB", "2MB", "1.5g")] == [1, 1024, 2_000_000, 3 << 29]
    assert [parse_tokens(text) for text in ("7", "8k", "1M")] == [7, 8192, 1 << 20]
    assert [format_bytes(size) for size in (12, 2048, 3 << 40)] == ["12 B", "2 KiB", "3 TiB"]
    assert [format_tokens(length) for length in (1000, 8192, 12345)] == ["1,000", "8k", "12,345"]
    for text in ("", "k", "1x", "-1k", "1e3"):
        with pytest.raises(ConfigError, match="is not a length"):
            parse_tokens(text)


def test_several_models_side_by_side() -> None:
    models = [str(CONFIGS / f"{name}.json") for name in ("llama-3.1-8b", "gemma-3-4b")]
    text = run(*models, "--memory", "40GiB", "--lengths", "8k").stdout
    for part in (
        "llama-3.1-8b",
        "gemma-3-4b",
        "gemma3_text",
        "128 KiB",
        "requests of 8k at once",
        "note: gemma-3-4b: ",
    ):
        assert part in text
    answers = json.loads(run(*models, "--memory", "40GiB", "--json").stdout)
    assert [answer["model_type"] for answer in answers] == ["llama", "gemma3_text"]
    assert answers[1]["notes"] and list(answers[0]) == KEYS


def test_notes_and_what_was_assumed_are_in_the_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BRAND_NEW))
    answer = json.loads(run(str(tmp_path), "--memory", "1GiB", "--assume", "full", "--json").stdout)
    assert answer["notes"][0].startswith("ASSUMED: nothing is known of model type 'brandnew'")
    assert answer["weights_bytes"] is None and "n/a" in answer["weights_from"]
    assert "note: ASSUMED" in run(str(tmp_path), "--memory", "1GiB", "--assume", "full").stdout
    refused = run(str(tmp_path), "--memory", "1GiB")
    assert "--assume full" in str(refused.exception)


BRAND_NEW = {
    "model_type": "brandnew",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def test_weights_are_estimated_unless_given(tmp_path: Path) -> None:
    # Llama 3.1 8B: 8.03 billion parameters
    fields = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())
    sizes = {"vocab_size": 128256, "intermediate_size": 14336, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **sizes}))
    answer = json.loads(run(str(tmp_path), "--memory", "80Gi", "--gpu-memory-utilization", "0.9", "--json").stdout)
    assert answer["weights_bytes"] == pytest.approx(16_060_522_496, rel=0.001)
    assert "an estimate: 8.0 billion parameters" in answer["weights_from"]
    assert answer["cache_bytes"] == int(0.9 * (80 << 30)) - answer["weights_bytes"]
    given = json.loads(run(str(tmp_path), "--memory", "80Gi", "--weights-memory", "0", "--json").stdout)
    assert given["cache_bytes"] == 80 << 30 and given["weights_from"] == "as given"
    too_large = str(run(str(tmp_path), "--memory", "8GiB").exception)
    assert "weights are estimated at 14.96 GiB, 6.957 GiB more than the 8 GiB there are" in too_large
    assert "--weights-memory 0" in too_large


def test_replicas_and_context_ranks() -> None:
    llama = str(CONFIGS / "llama-3.1-70b.json")
    one = json.loads(run(llama, "--memory", "40GiB", "--tensor-parallel", "16", "--lengths", "8k", "--json").stdout)
    options = ("--decode-context-parallel", "2", "--prefill-context-parallel", "2", "--data-parallel", "3")
    many = json.loads(
        run(llama, "--memory", "40GiB", "--tensor-parallel", "16", *options, "--lengths", "8k", "--json").stdout
    )
    assert many["bytes_per_token"] * 4 == one["bytes_per_token"] == 40960
    assert (many["num_ranks"], many["replicas"], many["num_blocks"]) == (96, 3, one["num_blocks"])
    usable = many["num_blocks"] - 1
    assert many["concurrency"]["8192"] == 3 * (usable // (8192 // 64))
    assert many["hit_alignment"] == 64


def test_a_trace_of_my_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{{"timestamp": 0, "input_length": {}, "output_length": 10, "hash_ids": {}}}\n'
    trace.write_text(line.format(150, [1]) * 3 + line.format(790, [1, 2]) + line.format(200_000, list(range(391))))
    done = kvpager(str(CONFIGS / "llama-3.1-8b.json"), "--memory", "1GiB", "--trace", str(trace), "--json")
    answer = json.loads(done.stdout)["trace"]
    # three of 10 blocks, one of 50: 20 on average, in 511 usable ones
    assert answer == {
        "requests": 5, "refused": 1, "mean_tokens": 40258.0, "longest_tokens": 200010, "at_once": 25,
    }  # fmt: skip
    table = kvpager(str(CONFIGS / "llama-3.1-8b.json"), "--memory", "1GiB", "--trace", str(trace)).stdout
    assert "requests of the trace at once" in table and "1 never fit" in table


@pytest.mark.parametrize(
    ("dtype", "vector"),
    [
        ("fp8_e4m3", 128),
        ("fp8_e5m2", 128),
        ("int8", 132),
        ("nvfp4", 64 + 8),
        ("int4_per_token_head", 68),
        ("auto", 256),
    ],
)
def test_kv_dtypes_by_name(dtype: str, vector: int) -> None:
    llama = str(CONFIGS / "llama-3.1-8b.json")
    answer = json.loads(run(llama, "--memory", "8GiB", "--kv-dtype", dtype, "--json").stdout)
    assert answer["bytes_per_token"] == 32 * 8 * 2 * vector


@pytest.mark.parametrize(
    ("dtype", "name", "message"),
    [
        ("nvfp4", "deepseek-v3", "not for latents"),
        ("nvfp4", "odd", "packs 16 values together; a head of 24"),
        ("fp8_ds_mla", "odd", "fp8_ds_mla"),
    ],
)
def test_kv_dtypes_that_a_model_cannot_have(tmp_path: Path, dtype: str, name: str, message: str) -> None:
    (tmp_path / "odd.json").write_text(
        json.dumps({**BRAND_NEW, "model_type": "qwen2", "head_dim": 24, "num_key_value_heads": 2})
    )
    path = tmp_path / "odd.json" if name == "odd" else CONFIGS / f"{name}.json"
    assert message in str(run(str(path), "--memory", "8GiB", "--kv-dtype", dtype).exception)


def test_a_latent_layout() -> None:
    answer = json.loads(
        run(str(CONFIGS / "deepseek-v3.json"), "--memory", "8GiB", "--kv-dtype", "fp8_ds_mla", "--json").stdout
    )
    assert answer["bytes_per_token"] == 61 * 656


def test_a_drafter_of_its_own() -> None:
    draft = CONFIGS / "llama-3.1-8b.json"
    answer = json.loads(
        run(
            str(CONFIGS / "llama-3.1-70b.json"), "--memory", "80GiB", "--speculative", f"draft:{draft}", "--json"
        ).stdout
    )
    assert answer["bytes_per_token"] == (80 + 32) * 4096
    assert any("ASSUMED: 3 drafted tokens" in note for note in answer["notes"])
    assert [group["drafts"] for group in answer["groups"]] == [False]
    eagle = json.loads(run(str(draft), "--memory", "80GiB", "--speculative", f"eagle:{draft}:2", "--json").stdout)
    assert [group["drafts"] for group in eagle["groups"]] == [True]
    assert eagle["groups"][0]["layers"][-1] == "draft.layers.31.self_attn"
