"""``python -m benchmarks.engine``: the engine's figures of docs/engine.md, with a real model.

SmolLM2-135M-Instruct in float32 on one thread:

- the default support chats with and without prefix caching;
- 16 prompts of 311 tokens that share 300, 64 new tokens each: kvpager's engine beside transformers' continuous batching
  (pages of 16 tokens, and its own default) and its static batch.

Everybody is timed twice: by the clock, and in seconds of CPU, which other work on the machine hardly changes. Answers
are compared with the static batch's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from kvpager.engine import Engine, EngineOptions, SamplingParams, cache_config_for, cached_layers
from kvpager.engine.chats import default_prompts
from kvpager.engine.models import BUILTIN, load_model
from kvpager.engine.report import Run, run, summary_table

NUM_PROMPTS, SHARED, OWN, NEW = 16, 300, 11, 64
NUM_BLOCKS = 1024
TOKEN_BUDGET = 1024
WANTED = 1.5

Answers = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How one way of generating did."""

    name: str
    seconds: float
    cpu_seconds: float
    num_tokens: int
    num_same: int

    @property
    def tokens_per_cpu_second(self) -> float:
        return self.num_tokens / self.cpu_seconds


def main() -> int:
    """Exit status 1 if kvpager is slower than wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=1, metavar="N", help="the fastest of N counts (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_model(BUILTIN)
    console = Console(width=110)

    chats = [line.encoded(tokenizer) for line in default_prompts()]
    runs = [chat_run(model, tokenizer, chats, caching=caching) for caching in (False, True)]
    console.print(summary_table(runs))
    timings = throughput(model, options.repetitions)
    console.print(throughput_table(timings))
    if options.json:
        header = {
            "machine": platform.processor() or platform.machine(),
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        chats_json = [
            {"title": one.title, "mean_ttft": one.mean_time_to_first_token} | asdict(one.stats) for one in runs
        ]
        everything = header | {"chats": chats_json, "throughput": [asdict(timing) for timing in timings]}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return int(min(_ratios(timings)) < WANTED)


def chat_run(model: PreTrainedModel, tokenizer: object, prompts: list[str | list[int]], *, caching: bool) -> Run:
    """The default chats; all times are seconds of CPU."""
    config = cache_config_for(cached_layers(model), num_blocks=NUM_BLOCKS)
    engine_options = EngineOptions(enable_caching=caching)
    engine = Engine(model, tokenizer, config, engine_options, clock=time.process_time)
    title = "with prefix caching" if caching else "without prefix caching"
    params = [SamplingParams(max_tokens=48)] * len(prompts)
    return run(engine, prompts, params, title=title, clock=time.process_time)


def throughput(model: PreTrainedModel, repetitions: int) -> list[Timing]:
    """The same prompts, four ways."""
    generator = torch.Generator().manual_seed(0)
    shared, *own = torch.randint(10, 40_000, (1 + NUM_PROMPTS, SHARED), generator=generator).tolist()
    prompts = [shared + rest[:OWN] for rest in own]
    ways: dict[str, Callable[[], Answers]] = {
        "transformers, static batch": lambda: static_batch(model, prompts),
        "transformers, continuous, page 16": lambda: continuous(model, prompts, page_size=16),
        "transformers, continuous, default page": lambda: continuous(model, prompts, page_size=None),
        "kvpager": lambda: kvpager(model, prompts),
    }
    expected: Answers = []
    timings = []
    for name, way in ways.items():
        timed = [_time(way) for _ in range(repetitions)]
        seconds, cpu_seconds, answers = min(timed, key=lambda one: one[1])
        expected = expected or answers
        timings.append(
            Timing(
                name=name,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                num_tokens=sum(map(len, answers)),
                num_same=sum(one == other for one, other in zip(answers, expected, strict=True)),
            )
        )
    return timings


def kvpager(model: PreTrainedModel, prompts: list[list[int]]) -> Answers:
    config = cache_config_for(cached_layers(model), num_blocks=NUM_BLOCKS)
    engine = Engine(model, None, config, EngineOptions(max_num_batched_tokens=TOKEN_BUDGET))
    return [completion.token_ids for completion in engine.generate(prompts, SamplingParams(max_tokens=NEW))]


def continuous(model: PreTrainedModel, prompts: list[list[int]], *, page_size: int | None) -> Answers:
    """With as much room as kvpager gets: the same token budget, and no fewer tokens of cache."""
    size = page_size or ContinuousBatchingConfig().page_size
    config = ContinuousBatchingConfig(
        page_size=size, num_blocks=NUM_BLOCKS * 16 // size, max_batch_tokens=TOKEN_BUDGET, use_cuda_graph=False
    )
    out = model.generate_batch(
        prompts, generation_config=_generation(), continuous_batching_config=config, warmup=False, progress_bar=False
    )
    by_prompt = {tuple(one.prompt_ids): tuple(one.generated_tokens) for one in out.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def static_batch(model: PreTrainedModel, prompts: list[list[int]]) -> Answers:
    inputs = torch.tensor(prompts)
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=_generation())
    return [tuple(row) for row in out[:, len(prompts[0]) :].tolist()]


def throughput_table(timings: list[Timing]) -> Table:
    title = f"{NUM_PROMPTS} prompts of {SHARED + OWN} tokens that share {SHARED}, {NEW} new tokens each"
    out = Table(title=title)
    for column in ("", "tokens / CPU s", "CPU s", "wall s", "same answers", "kvpager is"):
        out.add_column(column, justify="right" if column else "left")
    for timing, ratio in zip(timings, [*_ratios(timings, all_ways=True), None], strict=True):
        out.add_row(
            timing.name,
            f"{timing.tokens_per_cpu_second:.1f}",
            f"{timing.cpu_seconds:.1f}",
            f"{timing.seconds:.1f}",
            f"{timing.num_same} of {NUM_PROMPTS}",
            "" if ratio is None else f"{ratio:.2f} x",
        )
    return out


def _ratios(timings: list[Timing], *, all_ways: bool = False) -> list[float]:
    """kvpager's tokens per second over the others'; only continuous batching is a bar to clear."""
    *others, ours = timings
    return [
        ours.tokens_per_cpu_second / timing.tokens_per_cpu_second
        for timing in others
        if all_ways or "continuous" in timing.name
    ]


def _generation() -> GenerationConfig:
    """Greedy, and never stopping early."""
    return GenerationConfig(max_new_tokens=NEW, min_new_tokens=None, do_sample=False, eos_token_id=None, pad_token_id=0)


def _time(way: Callable[[], Answers]) -> tuple[float, float, Answers]:
    wall, cpu = time.perf_counter(), time.process_time()
    answers = way()
    return time.perf_counter() - wall, time.process_time() - cpu, answers


if __name__ == "__main__":
    raise SystemExit(main())
