"""The command: what it prints, what it writes, and how it says no."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvpager import cli
from kvpager.errors import InvariantError
from kvpager.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvpager.replay import ReplayReport

from .helpers import Command

KEYS = [
    "requests",
    "prompt_tokens",
    "hit_tokens",
    "hit_rate",
    "ideal_hit_rate",
    "generated_tokens",
    "evicted_blocks",
    "preemptions",
    "refused",
    "peak_usage",
    "mean_usage",
    "steps",
    "simulated_seconds",
    "manager_cpu_seconds",
    "wall_seconds",
    "peak_rss_bytes",
]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A Mooncake trace of ten prompts, 40 blocks of 16 each, of which two neighbours share the first 32."""
    lines = [
        {"timestamp": 100 * i, "input_length": 640, "output_length": 20, "hash_ids": [1 + i // 2, 1000 + i]}
        for i in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_json_has_exactly_the_named_keys(kvpager: Command, trace: str) -> None:
    code, out, err = kvpager("replay", trace, "--json")
    assert (code, err) == (0, "")
    figures = json.loads(out)
    assert list(figures) == KEYS
    assert figures["requests"] == 10
    assert figures["hit_tokens"] == 5 * 512
    assert figures["hit_rate"] == figures["ideal_hit_rate"] == 0.4
    assert figures["generated_tokens"] == 200


def test_the_table_names_every_figure(kvpager: Command, trace: str) -> None:
    code, out, err = kvpager("replay", trace, "--check", "5")
    assert (code, err) == (0, "")
    for name in (
        "requests",
        "prompt tokens",
        "tokens hit",
        "hit rate",
        "hit rate of an infinite cache",
        "evicted blocks",
        "preemptions",
        "refused",
        "usage, peak / mean",
        "queue time, mean / longest",
        "manager CPU time per request",
        "manager CPU time per step",
    ):
        assert re.search(rf"^│ {re.escape(name)} +│ +\S.*│$", out, re.MULTILINE), name
    assert "40.00%" in out
    assert "no violation" in out


def test_without_a_trace_there_is_a_workload(kvpager: Command) -> None:
    figures = [json.loads(kvpager("replay", "--limit", "40", "--seed", seed, "--json")[1]) for seed in (1, 1, 2)]
    assert figures[0]["requests"] == 40
    same = {key: value for key, value in figures[0].items() if key not in KEYS[-3:]}
    assert same.items() <= figures[1].items()
    assert not same.items() <= figures[2].items()


def test_stdin(kvpager: Command, trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(trace) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, out, _ = kvpager("replay", "-", "--json", "--limit", "7")
    assert code == 0
    assert json.loads(out)["requests"] == 7


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(kvpager: Command, trace: str, tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"replay.{suffix}"
    assert kvpager("replay", trace, "--plot", picture)[0] == 0
    magic = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert picture.read_bytes().startswith(magic)


def test_events_are_written_as_json_lines(kvpager: Command, trace: str, tmp_path: Path) -> None:
    import msgspec

    path = tmp_path / "events.jsonl"
    assert kvpager("replay", trace, "--num-blocks", "100", "--events", path)[0] == 0
    decoder = msgspec.json.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
    events = [decoder.decode(line) for line in path.read_text().splitlines()]
    stored = [len(event.block_hashes) for event in events if isinstance(event, BlockStored)]
    removed = [len(event.block_hashes) for event in events if isinstance(event, BlockRemoved)]
    assert sum(stored) >= 10 * 8 + 5 * 32
    assert 0 < sum(stored) - sum(removed) < 100


def test_every_option_is_understood(kvpager: Command, trace: str) -> None:
    code, out, err = kvpager(
        "replay", trace, "--json", "--block-size", 32, "--kv-memory", "1GiB", "--kv-bytes-per-token", 131072,
        "--groups", "full+5xsliding:64", "--max-model-len", 4096, "--max-batched-tokens", 512, "--max-running", 3,
        "--lookahead", 2, "--first-chunk", "--chunked-prefill", "--watermark", 0.05, "--eviction-order", "recency",
        "--arrivals", 4, "--step-ms", 5, "--prefill-ms", 0.1, "--decode-ms", 0.2, "--limit", 9, "--check", 10,
        "--expand-ids",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert json.loads(out)["requests"] == 9


def test_the_step_time_model_moves_the_clock(kvpager: Command, trace: str) -> None:
    slow, fast = (
        json.loads(kvpager("replay", trace, "--arrivals", 1, "--json", "--step-ms", ms)[1]) for ms in (1000, 10)
    )
    assert slow["steps"] == fast["steps"] == 200
    assert slow["simulated_seconds"] - fast["simulated_seconds"] == pytest.approx(200 * 0.99)


def test_a_cache_that_can_never_hit_warns_in_one_line(kvpager: Command, trace: str) -> None:
    code, _, err = kvpager("replay", trace, "--groups", "full+mamba:none", "--json")
    assert code == 0
    assert err.startswith("warning: ")
    assert err.count("\n") == 1


def test_progress_is_shown_on_a_terminal_only(
    kvpager: Command, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what Rich takes for a terminal
    _, out, err = kvpager("replay", trace, "--json")
    assert "10/10" in err
    assert json.loads(out)["requests"] == 10


def test_sweep(kvpager: Command, trace: str, tmp_path: Path) -> None:
    picture = tmp_path / "sweep.svg"
    code, out, err = kvpager("sweep", trace, "--num-blocks", "60,200, 1000", "--jobs", 2, "--plot", picture, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [row["num_blocks"] for row in rows] == [60, 200, 1000]
    assert list(rows[0]) == ["num_blocks", *KEYS]
    assert rows[0]["evicted_blocks"] > rows[2]["evicted_blocks"] == 0
    assert rows[2]["hit_rate"] == rows[2]["ideal_hit_rate"] == rows[0]["ideal_hit_rate"]
    assert "infinite cache" in picture.read_text() or picture.stat().st_size > 1000
    alone = json.loads(kvpager("replay", trace, "--num-blocks", 60, "--json")[1])
    assert rows[0]["hit_tokens"] == alone["hit_tokens"]


def test_sweep_prints_a_table_and_draws_where_it_stands(
    kvpager: Command, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = kvpager("sweep", trace, "--num-blocks", "1000")
    assert code == 0
    assert re.search(r"│ +1,000 │ +40\.00% │ +40\.00% │", out)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


BAD = [
    (["replay", "absent.jsonl"], "no such file"),
    (["replay", "BROKEN"], "2 faulty places"),
    (["replay", "--block-size", "0"], "block_size must be an integer of at least 1"),
    (["replay", "--block-size", "x"], "Invalid value for '--block-size'"),
    (["replay", "--num-blocks", "1"], "leave none to allocate"),
    (["replay", "--num-blocks", "5", "--kv-memory", "1GiB", "--kv-bytes-per-token", "8"], "size once"),
    (["replay", "--kv-memory", "1GiB"], "go together"),
    (["replay", "--kv-memory", "much", "--kv-bytes-per-token", "8"], "'much'"),
    (["replay", "--groups", "half"], "'half' is not a group"),
    (["replay", "--arrivals", "0"], "--arrivals takes trace or a whole number"),
    (["replay", "--arrivals", "-3"], "--arrivals takes trace or a whole number"),
    (["replay", "--watermark", "2"], "watermark"),
    (["replay", "--eviction-order", "lifo"], "lifo"),
    (["replay", "--limit", "0"], "limit must be an integer of at least 1"),
    (["replay", "--check", "-1"], "check_every must be an integer of at least 0"),
    (["replay", "--max-running", "0"], "max_num_running"),
    (["replay", "--max-batched-tokens", "0"], "max_num_batched_tokens"),
    (["replay", "--max-model-len", "0"], "max_model_len"),
    (["replay", "--step-ms", "-1"], "StepTime.base_ms"),
    (["replay", "--no-chunked-prefill"], "without chunked prefill"),
    (["replay", "--plot", "plot.gif"], ".png or .svg"),
    (["replay", "--plot", "nowhere/plot.png"], "does not exist"),
    (["replay", "--events", "nowhere/events"], "nowhere/events"),
    (["replay", "--no-such-option"], "No such option"),
    (["sweep", "--num-blocks", "10,x"], "--num-blocks takes numbers joined by commas"),
    (["sweep", "--num-blocks", ""], "--num-blocks takes numbers joined by commas"),
    (["sweep", "-", "--num-blocks", "10"], "a file instead of -"),
    (["sweep", "BROKEN", "--num-blocks", "10"], "2 faulty places"),
    (["sweep", "--num-blocks", "1"], "leave none to allocate"),
    (["sweep", "--num-blocks", "10", "--jobs", "0"], "num_processes must be an integer of at least 1"),
    (["sweep"], "--num-blocks"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_ends_with_code_2_and_one_message(
    kvpager: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
    Path("BROKEN").write_text(good + "{\n" + good + "[]\n")
    code, out, err = kvpager(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert len(re.findall("^error: ", err, re.IGNORECASE | re.MULTILINE)) == 1


def test_a_broken_invariant_is_our_fault_not_the_inputs(
    kvpager: Command, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> ReplayReport:
        raise InvariantError("1 is not 2")

    monkeypatch.setattr(cli, "replay", broken)
    code, _, err = kvpager("replay", trace)
    assert code == 1
    assert err == "error: broken invariant, a bug in kvpager: 1 is not 2\n"


MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 1280,
    "decoder_layers": 4,
    "decoder_attention_heads": 20,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "torch_dtype": "float16",
}


def written(tmp_path: Path, name: str, content: object) -> str:
    path = tmp_path / name
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in content) if isinstance(content, list) else json.dumps(content)
    )
    return str(path)


def prompts(count: int, length: int, output: int) -> list[dict[str, object]]:
    return [
        {
            "timestamp": 0,
            "input_length": length,
            "output_length": output,
            "hash_ids": list(range(100 * i, 100 * i + -(-length // 512))),
        }
        for i in range(count)
    ]


def test_a_model_refuses_what_is_longer_than_it_takes(kvpager: Command, tmp_path: Path) -> None:
    model, trace = written(tmp_path, "model.json", MODEL), written(tmp_path, "t.jsonl", prompts(1, 5000, 10))
    figures = json.loads(kvpager("replay", trace, "--model", model, "--memory", "1Gi", "--json")[1])
    assert (figures["refused"], figures["generated_tokens"]) == (1, 0)
    longer = json.loads(
        kvpager("replay", trace, "--model", model, "--memory", "1GiB", "--max-model-len", "32k", "--json")[1]
    )
    assert (longer["refused"], longer["generated_tokens"]) == (0, 10)


@pytest.mark.filterwarnings("ignore:prefix caching is on but can never hit")
def test_a_model_holds_its_encoder_tokens(kvpager: Command, tmp_path: Path) -> None:
    model, trace = written(tmp_path, "model.json", WHISPER), written(tmp_path, "t.jsonl", prompts(20, 64, 60))
    # 320 KiB a block: 94 for the audio and up to 8 for the text of each of 20 requests
    figures = json.loads(kvpager("replay", trace, "--model", model, "--memory", "800MiB", "--json")[1])
    assert figures["refused"] == 0
    assert 20 * 94 / 2559 < figures["peak_usage"] <= 20 * 102 / 2559


def test_replay_and_sweep_take_the_options_of_plan(kvpager: Command, tmp_path: Path, trace: str) -> None:
    model = written(tmp_path, "model.json", MODEL)
    options = ("--model", model, "--kv-dtype", "fp8", "--tensor-parallel", "2", "--max-num-batched-tokens", "2k")
    # 2 layers x (K, V) x 1 head of 64 bytes: 256 bytes a token, 4 KiB a block
    planned = json.loads(kvpager("plan", model, "--memory", "1MiB", *options[2:], "--json")[1])
    assert (planned["num_blocks"], planned["bytes_per_token"]) == (256, 256)
    figures = json.loads(kvpager("replay", trace, *options, "--memory", "1MiB", "--json")[1])
    assert figures["requests"] == 10
    assert figures["peak_usage"] * 255 == pytest.approx(round(figures["peak_usage"] * 255))
    plot = str(tmp_path / "sweep.png")
    rows = json.loads(kvpager("sweep", trace, *options, "--memory", "1MiB,2Mi", "--plot", plot, "--json")[1])
    assert [row["num_blocks"] for row in rows] == [256, 512]


def test_a_drafter_keeps_its_slots_ahead(kvpager: Command, tmp_path: Path) -> None:
    model, trace = written(tmp_path, "model.json", MODEL), written(tmp_path, "t.jsonl", prompts(1, 60, 4))
    draft = ("--speculative", f"eagle:{model}:32")
    plain = json.loads(kvpager("replay", trace, "--model", model, "--memory", "1MiB", "--json")[1])
    drafted = json.loads(kvpager("replay", trace, "--model", model, "--memory", "1MiB", *draft, "--json")[1])
    assert plain["peak_usage"] == 4 / 63  # 16 KiB a block
    assert drafted["peak_usage"] == 6 / 31  # twice the layers, 2 blocks more


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "--kv-dtype", "fp8"], "--kv-dtype says something of a model; give --model too"),
        (["sweep", "--num-blocks", "10", "--tensor-parallel", "2"], "--tensor-parallel says something of a model"),
        (["replay", "--memory", "1GiB"], "--model and --memory go together"),
        (["sweep", "--model", "model.json", "--memory", "1GiB", "--num-blocks", "10"], "--model says layout and size"),
    ],
)
def test_options_of_a_model_need_one(kvpager: Command, arguments: list[str], message: str) -> None:
    code, out, err = kvpager(*arguments)
    assert (code, out) == (2, "")
    assert message in err
