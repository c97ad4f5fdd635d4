"""vLLM's scheduler alone, without a model, on either manager: ``python -m benchmarks.vllm_scheduler``.

Runs in an environment with vLLM 0.25.1. Two schedulers, equal but for the manager, go through the same load step by
step, in turns; a figure is the median over steps, a ratio the median of paired ratios. Times are processor time. That
in the manager is what a clock shows around each call of its methods, less what it shows around a call of nothing made
right after, in the half of the steps during which others had the processor least. The whole step is timed on a second
pair whose managers have no clocks around them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

BLOCK = 16
MAX_MODEL_LEN = 8192
VOCABULARY = 32_000
TIMED = [
    "allocate_slots",
    "cache_blocks",
    "create_kv_cache_blocks",
    "free",
    "get_blocks",
    "get_computed_blocks",
    "get_num_common_prefix_blocks",
    "make_prefix_cache_stats",
    "new_step_starts",
    "pop_blocks_for_free",
    "remove_skipped_blocks",
    "take_events",
    "take_new_block_ids",
]
"""What the scheduler calls on its manager in ordinary steps."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests that arrive as long as fewer than ``running`` are in the scheduler."""

    name: str
    running: int
    prompt: int
    shared: int
    answer: int
    window_groups: int = 0
    is_async: bool = False
    num_blocks: int = 40_000


LOADS = [
    Load(name="256 decoding", running=256, prompt=200, shared=0, answer=4000),
    Load(name="256 decoding, asynchronous", running=256, prompt=200, shared=0, answer=4000, is_async=True),
    Load(
        name="256 decoding, 1 full + 5 window groups", running=256, prompt=200, shared=0, answer=4000, window_groups=5
    ),
    Load(name="2k prompts, half shared", running=64, prompt=2048, shared=1024, answer=64),
    Load(name="2k prompts, half shared, small pool", running=64, prompt=2048, shared=1024, answer=64, num_blocks=5_000),
]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Microseconds a step, medians; ratios are vLLM's over kvpager's."""

    load: str
    steps: int
    manager_vllm: float
    manager_kvpager: float
    manager_ratio: float
    schedule_vllm: float
    schedule_kvpager: float
    schedule_ratio: float
    step_vllm: float
    step_kvpager: float
    step_ratio: float


def main() -> int:
    """Print a line a load; write JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_scheduler", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps a load (default 300)")
    parser.add_argument("--turn", type=int, default=10, help="steps in a row (default 10; 1: cold caches)")
    parser.add_argument("--only", default="", metavar="TEXT", help="loads whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args()
    results = []
    print(f"{'us a step':44}{'manager: vLLM':>14}{'kvpager':>9}{'ratio':>7}{'schedule():':>13}{'':>9}{'ratio':>7}")
    for load in LOADS:
        if options.only in load.name:
            results.append(measure(load, options.steps, options.turn))
            print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 0


def line(result: Result) -> str:
    """One row of the table."""
    return (
        f"{result.load:44}{result.manager_vllm:14.0f}{result.manager_kvpager:9.0f}{result.manager_ratio:7.1f}"
        f"{result.schedule_vllm:13.0f}{result.schedule_kvpager:9.0f}{result.schedule_ratio:7.2f}"
    )


def measure(load: Load, num_steps: int, steps_a_turn: int) -> Result:
    """The load on four schedulers in turns: either manager, with clocks around it and without."""
    timed = [Driver(load, manager, timed=True) for manager in managers()]
    plain = [Driver(load, manager, timed=False) for manager in managers()]
    for driver in timed + plain:
        driver.warm_up()
    gc.collect()
    gc.disable()
    try:
        for turn in range(num_steps // steps_a_turn):
            for pair in (timed, plain):
                for driver in pair if turn % 2 else reversed(pair):
                    for _ in range(steps_a_turn):
                        driver.step()
    finally:
        gc.enable()
    assert timed[0].schedule_of_tokens == timed[1].schedule_of_tokens, "the managers decided differently"
    manager = undisturbed(timed)
    schedule = [driver.in_schedule for driver in plain]
    whole = [driver.in_step for driver in plain]
    return Result(
        load=load.name,
        steps=num_steps,
        **_compared("manager", manager),
        **_compared("schedule", schedule),
        **_compared("step", whole),
    )


def undisturbed(drivers: list[Driver]) -> list[list[float]]:
    """Time in either driver's manager, in the half of the steps during which others had the processor least."""
    shares = list(map(min, *(driver.shares for driver in drivers)))
    best = sorted(range(len(shares)), key=shares.__getitem__)[len(shares) // 2 :]
    return [[driver.in_manager[step] for step in best] for driver in drivers]


def _compared(name: str, times: list[list[float]]) -> dict[str, Any]:
    pairs = list(zip(*times, strict=True))
    return {
        f"{name}_vllm": statistics.median(vllm for vllm, _ in pairs) / 1000,
        f"{name}_kvpager": statistics.median(ours for _, ours in pairs) / 1000,
        f"{name}_ratio": statistics.median(vllm / ours for vllm, ours in pairs),
    }


class Driver:
    """One scheduler under a load, with made-up answers in place of a model."""

    def __init__(self, load: Load, manager: Any, *, timed: bool) -> None:
        self.load = load
        self.scheduler = make_scheduler(load, manager)
        self.clock = Clock(self.scheduler.kv_cache_manager) if timed else None
        if self.clock is not None:
            self.scheduler.kv_cache_manager = self.clock
        self.requests = arriving(load)
        self.in_manager: list[float] = []
        self.shares: list[float] = []
        self.in_schedule: list[float] = []
        self.in_step: list[float] = []
        self.schedule_of_tokens: list[int] = []
        self._pending: list[Any] = []
        self._arrive()

    def _arrive(self) -> None:
        while len(self.scheduler.requests) < self.load.running:
            self.scheduler.add_request(next(self.requests))

    def warm_up(self) -> None:
        """Until everybody decodes, or the mix of arriving and leaving is as it stays."""
        for _ in range(60):
            self.step()
        for times in (self.in_manager, self.shares, self.in_schedule, self.in_step, self.schedule_of_tokens):
            times.clear()

    def step(self) -> None:
        """Schedule, pretend to compute, take the answers in."""
        self._arrive()
        if self.clock is not None:
            self.clock.spent = 0
        watch = Stopwatch()
        output = self.scheduler.schedule()
        scheduled = watch.processor_time()
        self._pending.append(output)
        answers = answer(self._pending[0], self.scheduler.requests)
        watch.go_on()
        if len(self._pending) > self.load.is_async:
            self.scheduler.update_from_output(self._pending.pop(0), answers)
        whole = watch.processor_time()
        self.in_schedule.append(scheduled)
        self.in_step.append(whole)
        self.schedule_of_tokens.append(output.total_num_scheduled_tokens)
        if self.clock is not None:
            self.in_manager.append(max(1, self.clock.spent))
            self.shares.append(watch.share_of_processor())


class Stopwatch:
    """Processor time of this thread, and how much of the time it had a processor at all. Nanoseconds."""

    def __init__(self) -> None:
        self._processor = self._wall = 0
        self.go_on()

    def go_on(self) -> None:
        self._wall -= time.perf_counter_ns()
        self._processor -= time.thread_time_ns()

    def processor_time(self) -> int:
        """So far; the watch stands still until it goes on."""
        self._processor += time.thread_time_ns()
        self._wall += time.perf_counter_ns()
        return self._processor

    def share_of_processor(self) -> float:
        """Others may have had the processor meanwhile: 1 if none had."""
        return self._processor / self._wall


class Clock:
    """A manager with a clock around each of its methods."""

    def __init__(self, manager: Any) -> None:
        self.spent = 0
        self._manager = manager
        for name in TIMED:
            setattr(self, name, self._timed(getattr(manager, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            result = method(*args, **kwargs)
            between = clock()
            _nothing(*args, **kwargs)
            self.spent += between - began - (clock() - between)
            return result

        return timed


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a call costs that does nothing: the clock's share of every measurement."""


def managers() -> list[Any]:
    """vLLM's manager and kvpager's, in this order."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvpager.integrations.vllm import v0_25_1

    v0_25_1.install()
    return [KVCacheManager, v0_25_1.KVCacheManager]


def make_scheduler(load: Load, manager: Any) -> Any:
    """A scheduler of vLLM's with the given manager."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched import scheduler as module
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    scheduler_config = SchedulerConfig(
        max_num_seqs=load.running,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        async_scheduling=load.is_async,
    )
    config = VllmConfig(
        scheduler_config=scheduler_config,
        model_config=ModelConfig(model=model_folder(), skip_tokenizer_init=True, dtype="float32"),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = load.num_blocks
    register_all_kvcache_specs(config)
    size = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [FullAttentionSpec(**size)] + [SlidingWindowSpec(**size, sliding_window=1024)] * load.window_groups
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    module.KVCacheManager = manager
    return (AsyncScheduler if load.is_async else module.Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=load.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def model_folder() -> str:
    """A configuration that vLLM accepts; no weights."""
    from transformers import LlamaConfig

    folder = Path(tempfile.gettempdir()) / "kvpager-benchmark-llama"
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return str(folder)


def arriving(load: Load) -> Iterator[Any]:
    """Requests whose prompts begin with one of four shared beginnings; their blocks fill up in different steps."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    os.environ.setdefault("PYTHONHASHSEED", "0")
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK, sha256_cbor)
    source = random.Random(0)
    shared = [[source.randrange(VOCABULARY) for _ in range(load.shared)] for _ in range(4)]
    number = 0
    while True:
        own = [source.randrange(VOCABULARY) for _ in range(load.prompt - load.shared + number % BLOCK)]
        params = SamplingParams(max_tokens=load.answer, ignore_eos=True)
        yield Request(
            request_id=str(number),
            prompt_token_ids=shared[number % 4] + own,
            sampling_params=params,
            pooling_params=None,
            arrival_time=float(number),
            block_hasher=hasher,
        )
        number += 1


def answer(output: Any, requests: dict[str, Any]) -> Any:
    """A token for everyone whose prompt is computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    sampled = []
    for request_id in ids:
        request = requests.get(request_id)
        done = request is not None and not request.is_prefill_chunk
        sampled.append([request.num_tokens % VOCABULARY] if done else [])
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


if __name__ == "__main__":
    sys.exit(main())
