// What one group's attention kind means for the tables of running requests, as numbers.
#pragma once

#include <algorithm>
#include <iterator>
#include <limits>
#include <vector>

#include "pool.h"

namespace kvpager {

constexpr int64_t unbounded = std::numeric_limits<int64_t>::max();

inline int64_t ceil_div(int64_t numerator, int64_t denominator) { return (numerator + denominator - 1) / denominator; }

// What is appended to a table, in this order.
struct Growth {
    int64_t before = 0;
    int64_t nulls = 0;
    int64_t moved = 0;
    int64_t after = 0;

    int64_t num_new() const { return before + after; }
    int64_t num_positions() const { return before + nulls + moved + after; }
};

// `dead` and `needed_for_hit` are AttentionSpec's, `growth` is SingleTypeKVCacheManager's: said once
// more for speed, and held equal by tests/unit/test_native_rules.py. All token counts are at least 0.
struct GroupRule {
    Group group;
    int64_t block_size;
    int64_t stride;         // hash blocks a block
    int64_t lag;            // the last tokens that later tokens still read; -1: all of them
    int64_t span;           // in what pieces a sequence dies
    int64_t release_delay;  // speculative states
    int64_t alignment;
    int64_t commit_margin;  // tokens beyond an aligned length that are cached too
    int64_t hit_margin;     // tokens beyond a hit that must be cached too
    int64_t shareable;      // decoded tokens that can be hit; -1: all of them
    int64_t interval;       // between the hit lengths that are worth caching for; 0: none, -1: everything is worth it
    bool grows;             // with the tokens (not one state, not an encoder's output)
    bool keeps_prompt;      // only what was decoded dies
    bool is_state;          // a block holds a state, which can be hit once its step is over
    bool is_align;          // states are kept only where a step ended
    bool notes_new;         // new blocks have to be zeroed

    // Throws ConfigError for numbers that cannot be.
    void check() const;

    int64_t first_mortal_block(int64_t num_prompt_tokens) const {
        return keeps_prompt ? ceil_div(num_prompt_tokens, block_size) : 0;
    }

    // Positions that no later token reads once `num_computed` tokens are.
    Range dead(int64_t num_computed, int64_t num_prompt_tokens) const {
        int64_t first = first_mortal_block(num_prompt_tokens);
        if (lag < 0 || num_computed <= lag) return {first, first};
        return {first, std::max(first, (num_computed - lag) / span * (span / block_size))};
    }

    // Positions that a hit of `num_tokens` takes, the margin included.
    Range needed_for_hit(int64_t num_tokens) const {
        Range gone = dead(num_tokens, num_tokens);
        return {gone.stop - gone.start, (num_tokens + hit_margin) / block_size};
    }

    // How a table of `length` positions grows to serve `num_tokens`. `running`: its last blocks are
    // speculative states.
    Growth growth(int64_t length, int64_t num_tokens, Range gone, bool running) const;

    // Positions that serve `num_tokens`.
    int64_t num_positions(int64_t num_tokens) const { return ceil_div(num_tokens, block_size) + release_delay; }

    // How many of `num_tokens` can be hit: beyond them K/V depends on where the prompt ended.
    int64_t num_shareable(int64_t num_tokens, int64_t num_prompt_tokens) const {
        return shareable < 0 ? num_tokens : std::min(num_tokens, num_prompt_tokens + shareable);
    }

    // How many positions may be in the index with `num_tokens` computed.
    int64_t commit_stop(int64_t num_tokens, int64_t num_prompt_tokens) const {
        num_tokens = num_shareable(num_tokens, num_prompt_tokens);
        int64_t aligned = num_tokens / alignment * alignment;
        if (aligned > 0 && commit_margin > 0) aligned = std::min(num_tokens, aligned + commit_margin);
        return aligned / block_size;
    }

    // Calls visit(part) for the parts of positions [start, stop) that a hit can use, in order.
    template <typename Visit>
    void worth_caching(int64_t start, int64_t stop, int64_t num_prompt_tokens, int64_t junction, Visit visit) const;

    // The fewest computed tokens from which a request can go on with the blocks it still has.
    int64_t lowest_computed(const BlockList& table, int64_t num_prompt_tokens) const;

    // Token slots that a table serves.
    int64_t num_slots(const BlockList& table) const {
        return grows ? std::max<int64_t>(0, table.size() - release_delay) * block_size : unbounded;
    }

    // The highest token count up to which an allocation changes nothing.
    int64_t quiet_until(const BlockList& table, int64_t num_prompt_tokens, bool commits) const;

    // Deeds.
    void adopt(Pool& pool, BlockList& table, const BlockList& hits, Range gone) const;
    void release(Pool& pool, BlockList& table, int64_t num_processed, int64_t num_prompt_tokens, int64_t junction) const;
    void grow(Pool& pool, BlockList& table, const Growth& growth) const;
    void step_ends(BlockList& table, int64_t num_tokens) const {
        if (is_align && num_tokens % block_size == 0) table.step_ends.push_back(num_tokens / block_size - 1);
    }
    bool has_to_commit(const BlockList& table, int64_t num_tokens, int64_t num_prompt_tokens) const {
        return table.num_committed < commit_stop(num_tokens, num_prompt_tokens);
    }
    // Appends the runs of positions whose hash was new to the index.
    void commit(Pool& pool, BlockList& table, const Hashes& hashes, int64_t num_tokens, int64_t num_prompt_tokens,
                int64_t junction, std::vector<Range>& runs) const;

private:
    int64_t next_commit(int64_t committed) const;
    void offer(Pool& pool, BlockList& table, const Hashes& hashes, Range positions, std::vector<Range>& runs) const;
};

template <typename Visit>
void GroupRule::worth_caching(int64_t start, int64_t stop, int64_t num_prompt_tokens, int64_t junction,
                              Visit visit) const {
    if (interval < 0) return visit(Range{start, stop});
    // Hit lengths worth caching for, shortest first: the replay boundary, a junction, and every
    // `interval` tokens as long as a hit of that length needs anything before `stop`.
    int64_t replay = interval == alignment ? 0 : (num_prompt_tokens - 1) / alignment * alignment;
    int64_t some[] = {std::min(replay, junction), std::max(replay, junction)};
    const int64_t* next = some;
    int64_t last = (stop + 1) * block_size + std::max<int64_t>(lag, 0);
    int64_t regular = unbounded;
    if (interval > 0) regular = (std::max<int64_t>(0, start * block_size - hit_margin) / interval + 1) * interval;
    while (start < stop) {
        if (regular > last) regular = unbounded;
        int64_t length = std::min(next < std::end(some) ? *next : unbounded, regular);
        if (length == unbounded) return;
        if (length == regular) {
            regular += interval;
        } else {
            ++next;
        }
        if (length <= 0) continue;
        Range needed = needed_for_hit(length);
        Range part{std::max(start, needed.start), std::min(stop, needed.stop)};
        if (part.start >= part.stop) continue;
        visit(part);
        start = part.stop;
    }
}

}  // namespace kvpager
