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
        (["llama-3.1-8b.json", "--memory", "1GiB", "--lengths", "0"], "num_tokens must be a positive integer, got 0"),
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
