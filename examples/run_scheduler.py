"""Runs the 40-line scheduler on ten chats that share a system prompt, in a cache of 40 blocks.

python examples/run_scheduler.py
"""

from __future__ import annotations

from scheduler import Step, serve

from kvpager import BlockHasher, CacheConfig, FullAttention, KVCacheManager, Request, check_manager


def main() -> None:
    config = CacheConfig.uniform(num_blocks=40, specs=[FullAttention(block_size=16)])
    manager = KVCacheManager(config, max_model_len=512, max_num_batched_tokens=64, log_stats=True)
    hasher = BlockHasher.for_config(config)
    system_prompt = list(range(100, 200))
    requests = [
        Request(f"chat-{i}", [*system_prompt, *range(1000 * i, 1000 * i + 30)], block_hasher=hasher, max_tokens=20)
        for i in range(1, 11)
    ]

    def run(step: Step) -> dict[str, int]:
        check_manager(manager)
        # A real engine reads manager.get_block_ids(request.request_id) here and runs its model.
        return {request.request_id: request.num_tokens for request, _, _ in step}

    serve(manager, requests, run)
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    print(f"{stats.requests} requests, {stats.queries} prompt tokens, {stats.hits} of them from the cache")
    print(f"{stats.preempted_requests} came back after a preemption, and hit {stats.preempted_hits} tokens then")


if __name__ == "__main__":
    main()
