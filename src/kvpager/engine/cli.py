"""``kvpager generate``: options in, answers and a report out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from .chats import PromptLine, default_prompts, parse_prompts
from .engine import Engine, EngineOptions
from .layers import cache_config_for, cached_layers
from .models import BUILTIN, load_model
from .report import Run, as_json, requests_table, run, summary_table
from .results import Delta
from .sampling import SamplingParams

__all__ = ["generate_command"]


def generate_command(
    prompts: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPTS.jsonl|-",
            help='JSON lines with "prompt" or "messages", - for stdin; none: a dozen support chats.',
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Folder of a transformers model, a .gguf file, or builtin: SmolLM2-135M-Instruct.")
    ] = BUILTIN,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run without and with prefix caching, side by side.")
    ] = False,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Reuse what is cached of a prompt.")
    ] = True,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 16,
    num_blocks: Annotated[int, typer.Option(min=2, help="Blocks in the cache.")] = 1024,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 48,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that add up to this.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes drawn answers repeatable.")] = None,
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 512,
    max_running: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads (default: PyTorch's).")] = None,
    device: Annotated[str, typer.Option(help="cpu, or a CUDA device.")] = "cpu",
    poison: Annotated[bool, typer.Option("--poison", help="Fill blocks that hold nothing of use with NaN.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check all invariants after each step.")] = False,
    as_json_object: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Answer prompts with a real model over kvpager's blocks, and report what the cache did."""
    lines = _read(prompts)
    defaults = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    with Console(stderr=True).status(f"loading {model}"):
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        loaded, tokenizer = load_model(model, device=device)

    def one_run(caching: bool, on_delta: Callable[[int, Delta], None]) -> Run:
        options = EngineOptions(
            max_num_batched_tokens=max_batched_tokens,
            max_num_running=max_running,
            enable_caching=caching,
            poison=poison,
            check=check,
        )
        engine = _engine(loaded, tokenizer, num_blocks, block_size, options)
        title = "with prefix caching" if caching else "without prefix caching"
        params = [line.params(defaults) for line in lines]
        return run(engine, [line.encoded(tokenizer) for line in lines], params, title=title, on_delta=on_delta)

    show = _quiet if as_json_object else _Printer(console, lines)
    runs = []
    if compare:
        with Console(stderr=True).status("without prefix caching"):
            runs.append(one_run(False, _quiet))
    runs.append(one_run(prefix_caching or compare, show))
    if as_json_object:
        print(json.dumps(as_json(runs)))
        return
    console.print(requests_table(runs[-1], [line.title for line in lines]))
    console.print(summary_table(runs))
    if compare and temperature == 0:
        same = sum(a.token_ids == b.token_ids for a, b in zip(runs[0].completions, runs[1].completions, strict=True))
        console.print(f"{same} of {len(lines)} answers are the same in both runs")


class _Printer:
    """Prints answers as they come: a single one token by token, several of them each when it is done."""

    def __init__(self, console: Console, lines: list[PromptLine]) -> None:
        self._console = console
        self._lines = lines

    def __call__(self, index: int, delta: Delta) -> None:
        if len(self._lines) == 1:
            self._console.print(delta.text, end="\n\n" if delta.completion else "", markup=False, highlight=False)
        elif delta.completion is not None:
            self._console.print(self._lines[index].title.strip(), style="bold", markup=False, highlight=False)
            self._console.print(delta.completion.text.strip() + "\n", markup=False, highlight=False)


def _quiet(index: int, delta: Delta) -> None:
    """Print nothing."""


def _read(prompts: str | None) -> list[PromptLine]:
    if prompts is None:
        return default_prompts()
    if prompts == "-":
        return parse_prompts(sys.stdin.buffer, "stdin")
    with Path(prompts).open("rb") as file:
        return parse_prompts(file, prompts)


def _engine(model: PreTrainedModel, tokenizer: Any, num_blocks: int, block_size: int, options: EngineOptions) -> Engine:
    config = cache_config_for(cached_layers(model), num_blocks=num_blocks, block_size=block_size)
    return Engine(model, tokenizer, config, options)
