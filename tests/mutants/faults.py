"""One-line faults in the manager's code. Each must fail the tests: `make mutants` applies them in turn."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """In ``file``, ``line`` (which stands there exactly once) becomes ``fault``."""

    file: str
    line: str
    fault: str
    what: str


FAULTS = [
    # -- attention kinds
    Fault("attention/sliding_window.py", "return self.window - 1", "return self.window", "window a token too wide"),
    Fault("attention/sliding_window.py", "return self.window - 1", "return self.window - 2", "window a token short"),
    Fault("attention/chunked_local.py", "return self.chunk_size", "return self.block_size", "chunks die in blocks"),
    Fault("attention/reference_window.py", "return self.window\n", "return self.window - 1\n", "the gap eats a token"),
    Fault("attention/mamba.py", "else 1", "else 0", "the last state dies"),
    Fault("attention/base.py", "yield low", "return", "the peak before a release is not looked at"),
    # -- one hit length
    Fault(
        "coordinator.py",
        "if agreeing == len(self._lookups):",
        "if agreeing >= 1:",
        "the first group's hit length is taken for all",
    ),
    Fault(
        "coordinator.py",
        "accepted = max(0, min(length, limit - group.hit_margin)) // self.alignment * self.alignment",
        "accepted = max(0, min(length, limit)) // self.alignment * self.alignment",
        "EAGLE's extra block is not asked for",
    ),
    Fault(
        "coordinator.py",
        "limit = len(prefixes[ids[0]]) * group.block_size if ids[0] in prefixes else cap",
        "limit = cap",
        "full attention takes a hit that it has not",
    ),
    Fault("coordinator.py", "shared = shared or length", "shared = 0", "junctions are never learnt"),
    Fault(
        "manager.py",
        "max_tokens = self.coordinator.num_shareable(request.num_tokens - 1, request.num_prompt_tokens)",
        "max_tokens = self.coordinator.num_shareable(request.num_tokens, request.num_prompt_tokens)",
        "the last token is hit too",
    ),
    Fault(
        "manager.py",
        "if request.skip_reading_prefix_cache:",
        "if False:",
        "a request that must not read the cache reads it",
    ),
    Fault(
        "single_type.py",
        "return not (isinstance(self.spec, Mamba) and len(hits)) or not self._pool.is_computing(hits[len(hits) - 1])",
        "return True",
        "a state that is only computed in this step is hit",
    ),
    # -- one plan
    Fault(
        "coordinator.py",
        "max_step = self._max_step + num_lookahead_tokens\n        pairs",
        "max_step = self._max_step\n        pairs",
        "a sequence's bound forgets the lookahead slots of a step",
    ),
    Fault(
        "manager.py",
        "num_blocks_to_keep=reserved_blocks + self._watermark(request, has_scheduled_reqs),\n        )\n        if",
        "num_blocks_to_keep=self._watermark(request, has_scheduled_reqs),\n        )\n        if",
        "reserved blocks are given away",
    ),
    Fault(
        "manager.py",
        'newcomer = request.status.name in ("WAITING", "PREEMPTED")',
        'newcomer = request.status.name == "WAITING"',
        "a preempted request ignores the watermark",
    ),
    Fault(
        "manager.py",
        "if conditions.full_sequence_must_fit:",
        "if False:",
        "a prompt that cannot finish is admitted",
    ),
    Fault(
        "single_type.py",
        "need = self._evictable(hits, dead) if table is None else 0",
        "need = 0",
        "evictable hits are not counted as need",
    ),
    Fault(
        "single_type.py",
        "need -= self._pool.count_exclusive(table, max(dead.start, self._still_held(table, tokens)), dead.stop)",
        "pass",
        "blocks that the request will give back count as need",
    ),
    # -- the deed
    Fault(
        "single_type.py",
        "self._pool.extend_null(table, null_stop - null_start)\n        self._pool.adopt(table, hits, null_stop",
        "self._pool.adopt(table, hits, null_start, null_stop)\n        self._pool.adopt(table, hits, null_stop",
        "dead positions of a hit are touched",
    ),
    Fault(
        "single_type.py",
        "self._pool.release(table, start, stop, self.useful_at(junction))",
        "self._pool.release(table, start, stop, range(0))",
        "what a junction needs goes first",
    ),
    Fault("single_type.py", "table.num_released = stop", "pass", "released blocks are not remembered"),
    Fault(
        "manager.py",
        'return max(0, request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0))',
        "return request.num_computed_tokens",
        "blocks that a step in flight reads are released",
    ),
    # -- the index
    Fault(
        "manager.py",
        "self._commit(holding, min(tokens.num_main, request.num_tokens))",
        "self._commit(holding, tokens.num_main)",
        "drafts are committed before they are verified",
    ),
    Fault(
        "manager.py",
        "if num_new_tokens and tokens.num_main <= request.num_tokens:",
        "if num_new_tokens:",
        "a state behind unverified drafts counts as a boundary's",
    ),
    Fault(
        "manager.py",
        "num_tokens = min(num_tokens, holding.commit_limit)",
        "pass",
        "tokens of a load under way are committed",
    ),
    Fault(
        "single_type.py",
        "is_align=self.is_align,",
        "is_align=False,",
        "an align state is committed where no step ended",
    ),
    Fault(
        "single_type.py",
        "commit_margin=self._commit_margin,",
        "commit_margin=0,",
        "EAGLE's extra block is not committed",
    ),
    Fault(
        "single_type.py",
        "interval=-1 if self._checkpoint_interval is None else self._checkpoint_interval,",
        "interval=-1,",
        "blocks that no hit can use are cached",
    ),
    Fault(
        "single_type.py",
        "lag=-1 if spec.lag is None else spec.lag,",
        "lag=-1 if spec.lag is None else spec.lag - 1,",
        "running requests give a block back a token early",
    ),
    Fault("manager.py", "holding.is_stale = True", "pass", "K/V of old weights is committed after a lazy reset"),
    Fault(
        "manager.py",
        "bad |= self.coordinator.blocks_from(request_id, token)",
        "pass",
        "what was computed from a failed load stays in the index",
    ),
    # -- requests
    Fault(
        "manager.py",
        "if holding is not None and holding.request is not request:",
        "if False:",
        "a duplicate live request id is taken for the first one's",
    ),
    Fault(
        "scheduler.py",
        "request.num_computed_tokens -= len(step.draft_token_ids) + 1 - len(tokens)  # rejected drafts",
        "pass",
        "rejected drafts count as computed",
    ),
    Fault("scheduler.py", "request.num_computed_tokens = 0", "pass", "a preempted request does not start over"),
]
