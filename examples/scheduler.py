"""A scheduler in 40 lines: first come first served, chunked prefill, preemption of the last.

python examples/scheduler.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvpager import KVCacheManager, Request, RequestStatus

Step = list[tuple[Request, int, int]]  # what to run: request, first position, number of tokens


def serve(
    manager: KVCacheManager, requests: list[Request], run: Callable[[Step], dict[str, int]], budget: int = 64
) -> None:
    """Serve all requests; ``run`` computes a step and gives a token for each request it reaches the end of."""
    waiting, running = deque(requests), list[Request]()
    while waiting or running:
        manager.new_step_starts()
        step: Step = []
        left = budget
        for request in list(running):  # who runs goes first
            num_tokens = min(request.num_tokens - request.num_computed_tokens, left)
            while request in running and num_tokens and manager.allocate_slots(request, num_tokens) is None:
                victim = running.pop()
                manager.free(victim)
                victim.num_computed_tokens, victim.status = 0, RequestStatus.PREEMPTED
                victim.num_preemptions += 1
                waiting.appendleft(victim)
            if request in running and num_tokens:
                step.append((request, request.num_computed_tokens, num_tokens))
                left -= num_tokens
        while waiting and left:  # then who fits
            request = waiting[0]
            blocks, num_hit = manager.get_computed_blocks(request)
            num_tokens = min(request.num_tokens - num_hit, left)
            if not manager.allocate_slots(request, num_tokens, num_hit, blocks, full_sequence_must_fit=True):
                break
            running.append(waiting.popleft())
            request.num_computed_tokens, request.status = num_hit, RequestStatus.RUNNING
            step.append((request, num_hit, num_tokens))
            left -= num_tokens
        tokens = run(step)
        for request, start, num_tokens in step:
            request.num_computed_tokens = start + num_tokens
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(tokens[request.request_id])
            if len(request.output_token_ids) == request.max_tokens:
                running.remove(request)
                manager.free(request)
