"""Scenarios for the real engine, and how a test has them run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ENGINE = {
    "dtype": "float32",
    "block_size": 16,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "prefix_caching_hash_algo": "sha256_cbor",
    "seed": 0,
}
SHARED = 500
"""Tokens that all prompts of the roomy scenario begin with."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a scenario: per round and request the tokens and how many were cached; what the manager did."""

    rounds: list[list[dict[str, Any] | None]]
    stats: dict[str, float]
    counts: dict[str, int]

    @property
    def tokens(self) -> list[list[int] | None]:
        return [answer and answer["tokens"] for answers in self.rounds for answer in answers]

    @property
    def cached(self) -> list[int | None]:
        return [answer and answer["cached"] for answers in self.rounds for answer in answers]


def scenarios(model: str, folder: str) -> dict[str, dict[str, Any]]:
    """Room for everything, with prompts in chunks; hardly any; and hardly any with requests that are aborted."""
    tokens = _words(model, folder)
    shared = tokens[:SHARED]
    roomy = [shared + tokens[600 + 40 * i : 640 + 40 * i] for i in range(8)]
    tight = [shared[:48] + tokens[600 + 50 * i : 650 + 50 * i] for i in range(6)]
    long = {"smollm2": (40, 624, 70), "gemma3": (72, 512, 160)}[model]
    pool = ENGINE | {"num_gpu_blocks_override": long[0], "max_model_len": long[1], "max_num_batched_tokens": 64}
    wide = ENGINE | {"num_gpu_blocks_override": 600, "max_model_len": 1024, "max_num_batched_tokens": 256}
    return {
        "roomy": {"model": folder, "engine": wide, "rounds": [roomy, roomy], "max_tokens": 12},
        "tight": {"model": folder, "engine": pool, "rounds": [tight, tight], "max_tokens": long[2]},
        "abort": {"model": folder, "engine": pool, "rounds": [tight], "max_tokens": long[2] // 2, "abort_after": 20},
    }


def _words(model: str, folder: str) -> list[int]:
    """1,000 tokens: English for the model that knows it, noise for the one that knows nothing."""
    if model == "gemma3":
        noise = random.Random(3)
        return [noise.randrange(3, 512) for _ in range(1000)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return list(tokenizer.encode((REPOSITORY / "LICENSE").read_text()).ids[:1000])


def run(
    todo: list[dict[str, Any]], *, manager: str, in_child: bool, probe: Path, eviction: str = "dead_first"
) -> list[Outcome]:
    """Run scenarios in a fresh process; ``in_child``: with each engine core in a process below that."""
    environment = os.environ | {
        "KVPAGER_VLLM": "1" if manager == "kvpager" else "0",
        "KVPAGER_VLLM_EVICTION": eviction,
        "KVPAGER_VLLM_HASH": "1" if eviction == "dead_first" else "0",  # so that either hashing is seen at work
        "KVPAGER_VLLM_PROBE": str(probe),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if in_child else "0",
    }
    command = [sys.executable, str(HERE / "generate.py")]
    done = subprocess.run(command, input=json.dumps(todo), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{manager}: exit status {done.returncode}\n{done.stderr[-6000:]}"
    return [Outcome(**outcome) for outcome in json.loads(done.stdout)]
