"""``kvpager generate`` on a small model in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvpager.engine.cli import generate_command
from kvpager.errors import ConfigError, KVPagerError

from .harness import model, reference
from .tiny import VOCAB

runner = CliRunner()
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(generate_command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose words are w0, w1, …"""
    path = tmp_path_factory.mktemp("model")
    model("llama").save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def _prompts(path: Path, *prompts: list[int]) -> str:
    lines = [json.dumps({"prompt": " ".join(f"w{token}" for token in prompt)}) for prompt in prompts]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return str(path / "prompts.jsonl")


def _generate(*arguments: str, stdin: str | None = None) -> Result:
    return runner.invoke(app, list(arguments), input=stdin, catch_exceptions=True)


def test_answers_come_before_the_report(folder: Path, tmp_path: Path) -> None:
    first, second = list(range(20)), [*range(18), 50]
    prompts = _prompts(tmp_path, first, second)
    result = _generate(prompts, "--model", str(folder), "--max-tokens", "4", "--block-size", "4", "--num-blocks", "50")
    assert result.exit_code == 0, result.output
    expected = " ".join(f"w{token}" for token in reference("llama", tuple(first), 4)[0])
    assert expected in result.stdout
    assert "what the cache did" in result.stdout.split(expected)[1]
    assert "16 (41%)" in result.stdout, "of 39 prompt tokens"


def test_comparing(folder: Path, tmp_path: Path) -> None:
    prompts = _prompts(tmp_path, list(range(20)), [*range(18), 50])
    result = _generate(prompts, "--model", str(folder), "--max-tokens", "4", "--block-size", "4", "--compare")
    assert result.exit_code == 0, result.output
    assert "without prefix caching" in result.stdout
    assert "2 of 2 answers are the same in both runs" in result.stdout


def test_one_prompt_from_stdin_as_json(folder: Path) -> None:
    prompt = list(range(9))
    line = json.dumps({"prompt": " ".join(f"w{token}" for token in prompt), "max_tokens": 3})
    result = _generate("-", "--model", str(folder), "--json", "--poison", "--check", "--threads", "1", stdin=line)
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)
    assert run["completions"][0]["token_ids"] == list(reference("llama", tuple(prompt), 3)[0])
    assert run["stats"]["num_prefill_tokens"] == 9


def test_one_prompt_is_streamed(folder: Path) -> None:
    result = _generate("-", "--model", str(folder), "--max-tokens", "2", stdin='{"prompt": "w1 w2"}')
    assert result.stdout.startswith(" ".join(f"w{token}" for token in reference("llama", (1, 2), 2)[0]))


def test_what_is_wrong_with_the_input_is_said(folder: Path, tmp_path: Path) -> None:
    assert isinstance(_generate("-", "--model", str(tmp_path), stdin='{"prompt": "x"}').exception, ConfigError)
    assert isinstance(_generate("-", "--model", str(folder), stdin="x").exception, KVPagerError)
    assert isinstance(_generate("--model", str(folder)).exception, KVPagerError), "the default prompts are chats"
    chat = '{"messages": [{"role": "user", "content": "Hi"}]}'
    assert isinstance(_generate("-", "--model", str(folder), stdin=chat).exception, KVPagerError)
