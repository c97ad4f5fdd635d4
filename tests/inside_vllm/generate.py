"""Runs of the real engine in a process of its own: scenarios as JSON on stdin, what came out as JSON on stdout.

A scenario: ``model`` (a folder), ``engine`` (arguments of vLLM's LLM), ``rounds`` (lists of prompts as token ids),
``max_tokens``, ``abort_after`` (the step after which every third request of a round is aborted; null: none).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    scenarios = json.load(sys.stdin)
    # vLLM prints; only the answer goes to the real stdout.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump([_scenario(scenario) for scenario in scenarios], answer)
    answer.close()


def _scenario(scenario: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(model=scenario["model"], **scenario["engine"])
    params = SamplingParams(temperature=0.0, max_tokens=scenario["max_tokens"], ignore_eos=True, detokenize=False)
    rounds = [
        _run(llm.llm_engine, params, number, prompts, scenario.get("abort_after"))
        for number, prompts in enumerate(scenario["rounds"])
    ]
    stats = _stats(llm)
    with open(os.environ["KVPAGER_VLLM_PROBE"]) as file:
        counts = json.load(file)
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return {"rounds": rounds, "stats": stats, "counts": counts}


def _run(engine: Any, params: Any, number: int, prompts: list[list[int]], abort_after: int | None) -> list[Any]:
    """Tokens and cached tokens of each request of a round; None for the aborted ones."""
    ids = [f"{number}-{index}" for index in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    done: dict[str, Any] = {}
    step = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                }
        step += 1
        if step == abort_after:
            engine.abort_request([request_id for request_id in ids[::3] if request_id not in done])
    return [done.get(request_id) for request_id in ids]


def _stats(llm: Any) -> dict[str, float]:
    names = {"vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"}
    try:
        metrics = llm.get_metrics()
    except AssertionError:  # statistics are off
        return {}
    return {metric.name: metric.value for metric in metrics if metric.name in names}


if __name__ == "__main__":
    main()
