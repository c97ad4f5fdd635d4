"""One-line faults in the manager's code. Each must fail the tests: `make mutants` applies them in turn."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """In ``file`` (below ``src``), ``line`` (which stands there exactly once) becomes ``fault``."""

    file: str
    line: str
    fault: str
    what: str

    def applied_to(self, text: str) -> str:
        """The file's text with the fault in it."""
        if text.count(self.line) != 1:
            raise SystemExit(f"{self.file}: {self.line!r} stands there {text.count(self.line)} times, not once")
        return text.replace(self.line, self.fault)


ATTENTION = "kvpager/attention"
GROUPS = "kvpager/coordinator.py"
MANAGER = "kvpager/manager.py"
SCHEDULER = "kvpager/scheduler.py"
KIND = "native/groups/kind.h"
GROUP = "native/groups/group.h"
COORDINATOR = "native/manager/coordinator.h"
LIVE = "native/manager/live_requests.h"
POOL = "native/pool/pool.h"
QUEUE = "native/pool/free_queue.h"
INDEX = "native/pool/hash_index.h"
ATTRIBUTES = "native/python/attributes.h"
READER = "native/python/request_reader.h"
OBJECT = "native/python/coordinator_object.h"
BATCH = "native/python/decode_batch.h"

# Faults of one file stand together: the next build has less to compile.
FAULTS = [
    # -- what sets attention kinds apart
    Fault(f"{ATTENTION}/sliding_window.py", "self.window - 1", "self.window", "window a token too wide"),
    Fault(f"{ATTENTION}/sliding_window.py", "self.window - 1", "self.window - 2", "window a token short"),
    Fault(f"{ATTENTION}/chunked_local.py", "return self.chunk_size", "return self.block_size", "chunks die in blocks"),
    Fault(
        f"{ATTENTION}/reference_window.py", "return self.window\n", "return self.window - 1\n", "the gap eats a token"
    ),
    Fault(
        f"{ATTENTION}/reference_window.py",
        "return self.window + 1",
        "return self.window + 2",
        "a token that reads less than a longer prompt's is shared",
    ),
    Fault(f"{ATTENTION}/mamba.py", "else 1", "else 0", "the last state dies"),
    Fault(
        f"{ATTENTION}/mamba.py",
        "return self.num_speculative_states",
        "return 0",
        "states are released that a rollback needs",
    ),
    Fault(GROUPS, "elif spec.caches_only_useful:", "elif False:", "blocks that no hit can use are cached"),
    Fault(
        GROUPS,
        "commit_lookahead=spec.block_size if is_eagle else 0",
        "commit_lookahead=0",
        "EAGLE caches no more block",
    ),
    # -- what Python does around a call
    Fault(MANAGER, "for stop in (junction, last)", "for stop in (last,)", "no step ends at a junction"),
    Fault(
        MANAGER,
        "return StoredEvents(request, self._event_source(request), tokens, config.specs, config.hash_size)",
        "return type('Late', (), {'event': lambda _, *stored: StoredEvents(request, self._event_source(request), "
        "tokens, config.specs, config.hash_size).event(*stored)})()",
        "what events tell is read after the change",
    ),
    Fault(
        MANAGER,
        "self._events += self.block_pool.take_events()\n",
        "pass\n",
        "what left the index is told after what entered it",
    ),
    Fault(
        SCHEDULER,
        "request.num_computed_tokens -= len(step.draft_token_ids) + 1 - len(tokens)  # rejected drafts",
        "pass",
        "rejected drafts count as computed",
    ),
    Fault(SCHEDULER, "request.num_computed_tokens = 0", "pass", "a preempted request does not start over"),
    Fault(SCHEDULER, "if not preempted:", "if True:", "a step that preempts admits"),
    # -- an attention kind's rules
    Fault(
        KIND,
        "keeps_prompt ? ceil_div(num_prompt_tokens, block_size) : 0",
        "keeps_prompt ? num_prompt_tokens / block_size : 0",
        "the block where a kept prompt ends may die",
    ),
    Fault(
        KIND,
        "(num_computed_tokens - lag) / span * (span / block_size)",
        "(num_computed_tokens - lag) / block_size",
        "a sequence dies block by block",
    ),
    Fault(KIND, "dead(num_processed_tokens - num_speculative_states,", "dead(num_processed_tokens,", "no state trails"),
    Fault(KIND, "{dead(num_tokens, num_tokens)", "{dead(num_tokens + 1, num_tokens)", "a hit needs a token less"),
    Fault(
        KIND,
        "? 1 : ceil_div(num_slots, block_size)) + num_speculative_states;",
        "? 1 : ceil_div(num_slots, block_size));",
        "speculative states get no block",
    ),
    Fault(
        KIND,
        "2 + ceil_div(num_speculative_states, block_size)",
        "2 + num_speculative_states / block_size",
        "a state that a rollback reaches is not counted",
    ),
    Fault(KIND, "visit(low);", "", "the peak before a release is not looked at"),
    Fault(
        KIND,
        "int64_t last = std::max<int64_t>(0, num_slots - max_step);",
        "int64_t last = 0;",
        "what is held in later steps does not count",
    ),
    # -- one group: hits
    Fault(
        GROUP,
        "(num_tokens + options.draft_lookahead) / kind.block_size}",
        "num_tokens / kind.block_size}",
        "EAGLE's extra block need not be cached",
    ),
    Fault(
        GROUP,
        "std::max<int64_t>(0, limit - options.draft_lookahead) / options.alignment",
        "limit / options.alignment",
        "EAGLE's extra block is hit too",
    ),
    Fault(
        GROUP,
        "return !kind.holds_states() || hits.empty() || !pool.is_computing(hits.back());",
        "return true;",
        "a state that is only computed in this step is hit",
    ),
    # -- one group: the plan
    Fault(
        GROUP,
        "int64_t null_stop = std::min(std::max(dead.stop, null_start), goal);",
        "int64_t null_stop = null_start;",
        "dead positions get memory",
    ),
    Fault(GROUP, "std::max<int64_t>(0, first - length);", "0;", "states that nobody keeps get memory"),
    Fault(GROUP, "int64_t moved = is_running ?", "int64_t moved = false ?", "speculative states stay behind"),
    Fault(
        GROUP,
        "if (table == nullptr) need = num_evictable(pool, hits, kind.dead(",
        "if (false) need = num_evictable(pool, hits, kind.dead(",
        "evictable hits are not counted as need",
    ),
    Fault(GROUP, "length += loaded.num_positions();", "", "what a load fills is needed twice"),
    Fault(
        GROUP,
        "need -= pool.count_exclusive(table->ids, std::max(dead.start, first_kept(*table, tokens)), dead.stop);",
        ";",
        "blocks that the request will give back count as need",
    ),
    Fault(
        GROUP,
        "if (at_once.size() > dead.size()) dead = at_once;",
        "(void)at_once;",
        "dead blocks of a hit count as need",
    ),
    Fault(GROUP, "(tokens.loads() ? 1 : 0)", "0", "the state that a load brings is not counted"),
    Fault(GROUP, "most + speculative - held", "most + speculative", "states that are held already count as need"),
    Fault(
        GROUP,
        "return std::max(table.num_released, kind.releasable(tokens.num_processed, tokens.num_prompt_tokens).stop);",
        "return table.num_released + 0 * tokens.num_slots;",
        "a question takes what the deed would release for held",
    ),
    # -- one group: the deeds
    Fault(
        GROUP,
        "pool.extend_null(table.ids, null_stop - null_start);",
        "pool.adopt(table.ids, hits, null_start, null_stop);",
        "dead positions of a hit are touched",
    ),
    Fault(
        GROUP,
        "pool.release(table.ids, start, stop, useful_at(branch_point));",
        "pool.release(table.ids, start, stop, useful_at(0 * branch_point));",
        "what a junction needs goes first",
    ),
    Fault(
        GROUP,
        "useful_at(branch_point));\n        table.num_released = stop;",
        "useful_at(branch_point));",
        "released blocks are not remembered",
    ),
    # -- one group: the index
    Fault(
        GROUP,
        "kind.keeps_step_states() && num_tokens % kind.block_size == 0)",
        "kind.keeps_step_states())",
        "a step that ends within a block leaves that block's state",
    ),
    Fault(
        GROUP,
        "if (aligned > 0) aligned = std::min(num_tokens, aligned + options.commit_lookahead);",
        "",
        "EAGLE's extra block is not committed",
    ),
    Fault(
        GROUP,
        "if (!kind.keeps_step_states()) return offer(",
        "if (true) return offer(",
        "an align state is committed where no step ended",
    ),
    Fault(
        GROUP,
        "table.num_committed = std::min(table.num_committed, position);",
        "",
        "what a load did not bring is never committed",
    ),
    Fault(GROUP, "return ended >= position;", "return ended > position;", "the state of a failed load stays noted"),
    Fault(
        GROUP,
        "{std::min(replay, branch_point), std::max(replay, branch_point)}",
        "{0 * branch_point, replay}",
        "a junction is not worth caching",
    ),
    Fault(
        GROUP,
        "int64_t last = (stop + 1) * kind.block_size + kind.lag;",
        "int64_t last = stop * kind.block_size;",
        "the window of a later hit is not worth caching",
    ),
    # -- one group: the bounds
    Fault(
        GROUP,
        "return ceil_div(table.num_released * kind.block_size, kind.span) * kind.span + kind.lag;",
        "return table.num_released * kind.block_size + kind.lag;",
        "a request goes on within a chunk that is gone",
    ),
    Fault(GROUP, "until = std::min(until, next - 1);", "until = std::min(until, next);", "a block fills unnoticed"),
    Fault(
        GROUP,
        "until = std::min(until, slots - 1);",
        "until = std::min(until, slots);",
        "a step that ends where the slots do is not noted",
    ),
    Fault(GROUP, "(released / kind.span + 1)", "(released / kind.span + 2)", "dead blocks are kept for a span"),
    Fault(
        GROUP,
        "return token == 0;  // one state",
        "return true;  // one state",
        "a state that was overwritten is gone on from",
    ),
    Fault(
        GROUP,
        "return !has_null(0, dead.start) && !has_null(dead.stop, table.size());",
        "return !has_null(0, dead.start);",
        "a request goes on from blocks that it gave back",
    ),
    # -- all groups: hits
    Fault(
        COORDINATOR,
        "agreeing = accepted == length ? agreeing + 1 : 1;",
        "agreeing = agreeing + 1;",
        "the first group's hit length is taken for all",
    ),
    Fault(COORDINATOR, "if (shared > length) match.branch_point = shared;", "", "junctions are never learnt"),
    # -- all groups: the verdict
    Fault(
        COORDINATOR,
        "if (live == nullptr && !fits_alone(",
        "if (false && !fits_alone(",
        "a request that can never fit waits for ever",
    ),
    Fault(COORDINATOR, "if (demand.full_sequence_must_fit) {", "if (false) {", "a prompt that cannot end is admitted"),
    Fault(
        COORDINATOR,
        "whole.num_slots = std::min(whole.num_main + lookahead, options_.max_model_len);",
        "whole.num_slots = whole.num_main;",
        "a whole sequence has no lookahead",
    ),
    Fault(
        COORDINATOR,
        "int64_t to_keep = demand.reserved_blocks;",
        "int64_t to_keep = 0;",
        "reserved blocks are given away",
    ),
    Fault(
        COORDINATOR,
        "if (request.is_waiting && demand.has_scheduled_requests) to_keep",
        "if (request.is_waiting) to_keep",
        "the watermark holds when nobody runs",
    ),
    Fault(
        COORDINATOR,
        "return options_.max_num_batched_tokens + num_lookahead;",
        "return options_.max_num_batched_tokens + 0 * num_lookahead;",
        "a sequence's bound forgets the lookahead slots of a step",
    ),
    Fault(
        COORDINATOR,
        "most_to_keep(demand) <= pool_.num_free();",
        "true;",
        "a call that changes nothing ignores what must be left free",
    ),
    # -- all groups: what is refused
    Fault(
        COORDINATOR,
        "&& request.num_computed_tokens <= most) return;",
        "&& most >= 0) return;",
        "tokens without slots count as computed",
    ),
    Fault(
        COORDINATOR,
        "if (hit.index_version == pool_.index_version()) return;",
        "return;",
        "a hit that was evicted since is adopted",
    ),
    Fault(
        COORDINATOR,
        "if (num_blocks * block_size == demand.num_hit_tokens) continue;",
        "if (num_blocks * block_size >= demand.num_hit_tokens) continue;",
        "a hit is longer than was asked for",
    ),
    Fault(
        COORDINATOR,
        "hashes.check(first_to_commit(live, i, num_computed), std::min(stop, hashes.num_positions()));",
        "(void)num_computed, (void)stop;",
        "hashes that are none are found after the change",
    ),
    # -- all groups: the deeds
    Fault(
        COORDINATOR,
        ".num_start = std::min(computed, request.num_tokens - 1)",
        ".num_start = computed",
        "a prompt that was loaded whole computes its last token on what is dead",
    ),
    Fault(
        COORDINATOR,
        "return std::max<int64_t>(0, num_computed_tokens - num_in_flight_tokens);",
        "return num_computed_tokens;",
        "blocks that a step in flight reads are released",
    ),
    Fault(
        COORDINATOR,
        "int64_t longest_hit = std::max<int64_t>(0, shareable - draft_lookahead_) / alignment_ * alignment_;",
        "int64_t longest_hit = shareable;",
        "what the next turn starts from dies with the last token",
    ),
    Fault(
        COORDINATOR,
        "demand.num_new_tokens > 0 && tokens.num_main <= request.num_tokens)",
        "demand.num_new_tokens > 0)",
        "a state behind unverified drafts counts as a boundary's",
    ),
    Fault(
        COORDINATOR,
        "commit(live, request, std::min(tokens.num_main, request.num_tokens));",
        "commit(live, request, tokens.num_main);",
        "drafts are committed before they are verified",
    ),
    Fault(
        COORDINATOR,
        "if (live.commit_limit) num_tokens = std::min(num_tokens, *live.commit_limit);",
        "",
        "tokens of a load under way are committed",
    ),
    Fault(
        COORDINATOR,
        "limit ? std::min(*limit, tokens.num_local) : tokens.num_local",
        "tokens.num_local",
        "a second load forgets where the first one began",
    ),
    Fault(
        COORDINATOR,
        "bool is_done = num_computed_tokens >= live.load_end;",
        "bool is_done = true;",
        "a load that arrived in part counts as whole",
    ),
    Fault(
        COORDINATOR,
        "live.no_op_until = live.commit_limit ? -1 : unbounded;",
        "live.no_op_until = unbounded;",
        "calls during a load change nothing",
    ),
    Fault(COORDINATOR, "live.is_stale = true;", "", "K/V of old weights is committed after a lazy reset"),
    Fault(
        COORDINATOR,
        "++at) is_bad[table.ids[at]] = true;",
        "++at) is_bad[null_block] = true;",
        "what was computed from a failed load stays in the index",
    ),
    Fault(
        COORDINATOR,
        "} while (found != first);",
        "} while (first.empty() && !found.empty());",
        "garbage does not spread to sharers",
    ),
    Fault(LIVE, "if (distance >= ((slot - hole)", "if (distance > ((slot - hole)", "a request behind a gap is lost"),
    # -- the pool
    Fault(POOL, "return blocks_[block].refs == 1;", "return blocks_[block].refs >= 1;", "shared blocks come back"),
    Fault(
        POOL,
        "blocks_[block].refs - external_[block] != num_holders",
        "blocks_[block].refs != num_holders",
        "external references count as requests'",
    ),
    Fault(POOL, "            blocks_[block].flags |= was_hit;\n", "", "a block that was hit is evicted as a dead one"),
    Fault(
        POOL,
        "if (!runs.empty() && runs.back().stop == position)",
        "if (!runs.empty())",
        "a run of stored blocks spans what was skipped",
    ),
    Fault(POOL, "is_dead_first() ? 0 : i", "0 * i", "groups are freed in one batch by recency too"),
    Fault(
        POOL,
        "one->is_dead && is_dead_first() && ",
        "one->is_dead && ",
        "dead blocks go first by recency too",
    ),
    Fault(
        POOL,
        "if (index_.erase(block) && logs_changes_)",
        "if (index_.erase(block) | logs_changes_)",
        "a hash is told to be gone while a copy serves hits",
    ),
    Fault(
        POOL,
        "unset(block, was_hit);\n        ++index_version_;",
        "unset(block, was_hit);",
        "an eviction does not make hits old",
    ),
    Fault(
        POOL,
        "if (block.is(held_externally)) num_popped_ += block.refs == external_[id];",
        "",
        "blocks whose request went are not counted as popped",
    ),
    Fault(POOL, "        check_external(blocks);\n", "", "blocks are freed that nobody was given"),
    Fault(
        POOL, "blocks_[block].refs > 0 || !is_dead_first()", "blocks_[block].refs > 0", "evicted blocks jump a queue"
    ),
    Fault(QUEUE, "if (first == recent_) return;", "return;", "a reset leaves blocks behind the dead ones"),
    Fault(
        QUEUE,
        "while (next_unused_ < block) link_before(front_, next_unused_++);",
        "while (next_unused_ + 1 < block) link_before(front_, next_unused_++);",
        "a block before one that was touched unused is lost",
    ),
    Fault(
        INDEX,
        "if (next == prev) blocks_[next].flags &= static_cast<uint16_t>(~has_copies);",
        "",
        "the last copy is taken for one of several",
    ),
    Fault(
        INDEX,
        "BlockId youngest = copies_[oldest].prev;",
        "BlockId youngest = oldest;",
        "the third copy cuts the second out",
    ),
    # -- what is read of requests
    Fault(
        ATTRIBUTES,
        "return type == type_ && type->tp_version_tag == version_;",
        "return type == type_;",
        "a class never changes",
    ),
    Fault(
        READER,
        'PyUnicode_CompareWithASCIIString(status.ptr(), "PREEMPTED") == 0',
        "false",
        "a preempted request ignores the watermark",
    ),
    Fault(
        READER,
        "return !is_true(skip_reading_prefix_cache_.get(request));",
        "return is_true(skip_reading_prefix_cache_.get(request)) || true;",
        "a request that must not read the cache reads it",
    ),
    Fault(
        OBJECT,
        "core_.num_shareable(read.numbers.num_tokens - 1,",
        "core_.num_shareable(read.numbers.num_tokens,",
        "the last token is hit too",
    ),
    Fault(
        OBJECT,
        "if (found == nullptr && by_id_.contains(id)) {",
        "if (false) {",
        "a duplicate live request id is taken for the first one's",
    ),
    Fault(
        OBJECT,
        "return pool_.pool.logs_changes() && core_.tokens_to_commit(found, computed, end).size() > 0;",
        "return pool_.pool.logs_changes() && computed > end;",
        "a batch tells no events",
    ),
    Fault(
        BATCH,
        "if (coordinator.core().most_to_keep(demand) > 0) most_waiting_ = 0;",
        "",
        "who waits in a batch takes what must be left free",
    ),
]
