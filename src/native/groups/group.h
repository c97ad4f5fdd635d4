// One group of layers: what its attention kind means for one request's table.
#pragma once

#include <iterator>
#include <optional>

#include "../pool/pool.h"
#include "kind.h"

namespace kvpager {

// A request's blocks in one group, by position.
struct Table {
    BlockIds ids{};
    int64_t num_committed = 0;  // leading positions that have been offered to the index
    int64_t num_released = 0;   // positions below it have been given back where they were dead
    // Step states only: whether a state runs, and positions at whose end a step ended, not committed yet.
    bool is_running = false;
    std::vector<int64_t> step_ends{};

    int64_t size() const { return std::ssize(ids); }

    void prefetch_all() const {
        prefetch(this);
        prefetch(this + 1);
    }
    // Where blocks are released, and where they are appended and committed.
    void prefetch_ends() const {
        if (num_released < size()) prefetch(&ids[num_released]);
        if (size() > 0) prefetch(&ids.back());
    }
};

// The tokens that one allocation speaks of, as ends of half-open ranges:
//
//     computed | new hits | external | new | lookahead
//                         ^          ^     ^           ^
//               num_local |          |     |           | num_slots (at most max_model_len)
//                       num_computed |     | num_main
struct TokenRanges {
    int64_t num_local;
    int64_t num_computed;
    int64_t num_start;  // where computing goes on: at num_computed, but at the last token at the latest: its logits are
                        // wanted. What is dead is dead as seen from there
    int64_t num_main;
    int64_t num_slots;
    int64_t num_prompt_tokens;
    int64_t num_encoder_tokens = 0;
    int64_t num_processed = 0;  // computed tokens whose step's result is known: what is dead as seen from there has been,
                                // or will be, released before anything is taken
    bool loads() const { return num_computed > num_local; }
};

// What is appended to a table, in this order.
struct Growth {
    int64_t before = 0;  // new blocks
    int64_t nulls = 0;
    int64_t moved = 0;  // blocks of earlier positions
    int64_t after = 0;  // new blocks

    int64_t num_new() const { return before + after; }
    int64_t num_positions() const { return before + nulls + moved + after; }
};

// One group: its kind and its place in the cache, as numbers. Its questions and deeds are about the table of one request,
// which the caller owns; it decides nothing about admission and knows no request and no other group.
class SingleTypeKVCacheManager {
public:
    struct Options {
        GroupId group_id;
        int64_t hashes_per_block;
        int64_t alignment;               // of the whole cache: every hit is a multiple
        int64_t commit_lookahead;        // tokens beyond an aligned length that are cached too
        int64_t draft_lookahead;         // tokens beyond a hit that must be cached too
        int64_t shareable_decoded;       // decoded tokens that can be hit; unbounded: all of them
        std::optional<int64_t> interval;  // between hit lengths that are worth caching for (0: none); null: all blocks are
        bool zeroes_new;                 // its kernels read whole blocks, so new ones have to be zeroed
    };

    SingleTypeKVCacheManager(const AttentionKind& kind, const Options& options);

    const AttentionKind kind;
    const Options options;
    GroupId id() const { return options.group_id; }

    // -- hits
    // Positions that must be cached for a hit of `num_tokens`, the draft's lookahead included.
    Range needed_for_hit(int64_t num_tokens) const {
        return {kind.needed_for_hit(num_tokens).start, (num_tokens + options.draft_lookahead) / kind.block_size};
    }
    // Positions that a hit at a branch point will need (0: there is none).
    Range useful_at(int64_t branch_point) const { return branch_point > 0 ? needed_for_hit(branch_point) : Range{}; }
    // The longest aligned hit if positions of `limit` tokens are cached, as far as this group has a say.
    int64_t longest_hit(int64_t limit) const {
        return std::max<int64_t>(0, limit - options.draft_lookahead) / options.alignment * options.alignment;
    }
    // False if the state to start from is only computed in this very step.
    bool is_computed(const BlockPool& pool, const BlockIds& hits) const {
        return !kind.holds_states() || hits.empty() || !pool.is_computing(hits.back());
    }
    // How many of `num_tokens` can be hit: beyond them K/V depends on where the prompt ended.
    int64_t num_shareable(int64_t num_tokens, int64_t num_prompt_tokens) const {
        return std::min(num_tokens, num_prompt_tokens + options.shareable_decoded);
    }

    // -- the plan: what an allocation takes from the free blocks. `table` is null for a new request, which has `hits`
    Growth growth(int64_t length, int64_t num_tokens, int64_t num_encoder_tokens, Range dead, int64_t num_speculative,
                  bool is_running) const;
    // Drafts have no state layers: lookahead slots are not for step states.
    int64_t goal(const TokenRanges& tokens) const {
        return kind.keeps_step_states() ? tokens.num_main : tokens.num_slots;
    }
    // Free blocks that `adopt` and the two growths take.
    int64_t need(const BlockPool& pool, const Table* table, const BlockIds& hits, const TokenRanges& tokens) const;
    // Free blocks that the sequence takes at most on its way from num_start to num_slots in steps of up to `max_step`:
    // over the counts at which a step may start, blocks held in that step, less hits that others hold now, less what
    // the request holds itself.
    int64_t need_of_sequence(const BlockPool& pool, const Table* table, const BlockIds& hits, const TokenRanges& tokens,
                             int64_t max_step) const;
    int64_t most_held(const TokenRanges& tokens, int64_t max_step) const {
        return kind.most_held(goal(tokens), max_step, tokens.num_prompt_tokens, tokens.num_encoder_tokens);
    }
    // Blocks that `release` would add to the free ones.
    int64_t num_releasable(const BlockPool& pool, const Table& table, int64_t num_processed, int64_t num_prompt) const;

    // -- the deeds
    // Starts a request's table with a hit; what is dead where it goes on becomes null.
    void adopt(BlockPool& pool, Table& table, const BlockIds& hits, const TokenRanges& tokens) const;
    // Appends what a load fills, then what the step needs.
    void extend_loaded(BlockPool& pool, Table& table, const TokenRanges& tokens) const;
    void extend(BlockPool& pool, Table& table, const TokenRanges& tokens) const;
    // Gives back what no later token reads.
    void release(BlockPool& pool, Table& table, int64_t num_processed, int64_t num_prompt_tokens,
                 int64_t branch_point) const;

    // -- the index
    // A step (or a load) leaves the state after `num_tokens`.
    void step_ends(Table& table, int64_t num_tokens) const {
        if (kind.keeps_step_states() && num_tokens % kind.block_size == 0) {
            table.step_ends.push_back(num_tokens / kind.block_size - 1);
        }
    }
    // How many positions may be in the index with `num_tokens` computed.
    int64_t commit_stop(int64_t num_tokens, int64_t num_prompt_tokens) const {
        num_tokens = num_shareable(num_tokens, num_prompt_tokens);
        int64_t aligned = num_tokens / options.alignment * options.alignment;
        if (aligned > 0) aligned = std::min(num_tokens, aligned + options.commit_lookahead);
        return aligned / kind.block_size;
    }
    bool has_to_commit(const Table& table, int64_t num_tokens, int64_t num_prompt_tokens) const {
        return table.num_committed < commit_stop(num_tokens, num_prompt_tokens);
    }
    // Offers blocks up to `num_tokens`; appends the runs of positions whose hash was new to the index.
    void commit(BlockPool& pool, Table& table, const GroupHashes& hashes, int64_t num_tokens, int64_t num_prompt_tokens,
                int64_t branch_point, std::vector<Range>& runs) const;
    // Everything from `position` on has to be computed and committed again.
    void uncommit(Table& table, int64_t num_tokens) const;

    // -- bounds
    // The fewest computed tokens from which the request can go on with the blocks it still has.
    int64_t min_computed_tokens(const Table& table, int64_t num_prompt_tokens) const;
    // The highest token count up to which an allocation changes nothing.
    int64_t no_op_until(const Table& table, int64_t num_prompt_tokens, bool commits) const;

    // -- loads that failed
    // The first token that a position has to do with.
    int64_t first_token(int64_t position) const { return kind.grows() ? position * kind.block_size : 0; }
    // Whether what tokens from `token` on read is there, and so is what they write.
    bool can_resume(const BlockPool& pool, const Table& table, int64_t token, int64_t num_prompt_tokens) const;

private:
    int64_t num_evictable(const BlockPool& pool, const BlockIds& hits, Range dead) const;
    int64_t need_of_states(const BlockPool& pool, const Table* table, const BlockIds& hits,
                           const TokenRanges& tokens) const;
    int64_t first_kept(const Table& table, const TokenRanges& tokens) const;
    Growth growth_of_load(int64_t length, const TokenRanges& tokens) const;
    Growth growth_of_step(int64_t length, const TokenRanges& tokens, bool is_running) const;
    void grow(BlockPool& pool, Table& table, const Growth& growth) const;
    template <typename Visit>
    void worth_caching(int64_t start, int64_t stop, int64_t num_prompt_tokens, int64_t branch_point, Visit visit) const;
    void offer(BlockPool& pool, Table& table, const GroupHashes& hashes, Range positions, std::vector<Range>& runs) const;
    int64_t next_commit(int64_t num_committed) const;
};

}  // namespace kvpager
