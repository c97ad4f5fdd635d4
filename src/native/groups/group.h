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
    int64_t num_processed = 0;  // computed tokens whose step's result is known: what is dead as seen from there has
                                // been, or will be, released before anything is taken
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

// One group: its kind and its place in the cache, as numbers. Its questions and deeds are about the table of one
// request, which the caller owns; it decides nothing about admission and knows no request and no other group.
class SingleTypeKVCacheManager {
public:
    struct Options {
        GroupId group_id;
        int64_t hashes_per_block;
        int64_t alignment;          // of the whole cache: every hit is a multiple
        int64_t commit_lookahead;   // tokens beyond an aligned length that are cached too
        int64_t draft_lookahead;    // tokens beyond a hit that must be cached too
        int64_t shareable_decoded;  // decoded tokens that can be hit; unbounded: all of them
        std::optional<int64_t>
            interval;     // between hit lengths that are worth caching for (0: none); null: all blocks are
        bool zeroes_new;  // its kernels read whole blocks, so new ones have to be zeroed
    };

    SingleTypeKVCacheManager(const AttentionKind& its_kind, const Options& its_options)
        : kind(its_kind), options(its_options) {
        kind.check();
        auto is_count = [](int64_t value, int64_t at_least) { return value >= at_least && value <= max_count; };
        bool is_fine = is_count(options.hashes_per_block, 1) && is_count(options.alignment, 1) &&
                       options.alignment % kind.block_size == 0 && is_count(options.commit_lookahead, 0) &&
                       is_count(options.draft_lookahead, 0) && is_count(options.interval.value_or(0), 0) &&
                       (is_count(options.shareable_decoded, 0) || options.shareable_decoded == unbounded);
        if (!is_fine) {
            fail(ErrorKind::config,
                 "the numbers of group %d do not go together: all at least 0 and at most 2^40, and the alignment "
                 "(%lld) a "
                 "multiple of the block size (%lld)",
                 options.group_id, Long{options.alignment}, Long{kind.block_size});
        }
    }

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
    // How a table of `length` positions grows to serve `num_tokens` and so many speculative states; while `is_running`,
    // its last blocks are the speculative states of the step before.
    Growth growth(int64_t length, int64_t num_tokens, int64_t num_encoder_tokens, Range dead, int64_t num_speculative,
                  bool is_running) const {
        int64_t goal =
            kind.num_positions(num_tokens, num_encoder_tokens) - kind.num_speculative_states + num_speculative;
        if (goal <= length) return {};
        if (kind.keeps_step_states()) {
            // Only the running state and the speculative ones get memory. The speculative blocks of the last step move
            // along; what lies between is nobody's state.
            int64_t first = goal - num_speculative - 1;
            int64_t nulls = std::max<int64_t>(0, first - length);
            int64_t moved = is_running ? std::max<int64_t>(0, std::min(length, first) - (length - num_speculative)) : 0;
            return {0, nulls, moved, goal - length - nulls - moved};
        }
        int64_t null_start = std::min(std::max(dead.start, length), goal);
        int64_t null_stop = std::min(std::max(dead.stop, null_start), goal);
        return {null_start - length, null_stop - null_start, 0, goal - null_stop};
    }
    // Drafts have no state layers: lookahead slots are not for step states.
    int64_t goal(const TokenRanges& tokens) const {
        return kind.keeps_step_states() ? tokens.num_main : tokens.num_slots;
    }
    // Free blocks that `adopt` and the two growths take.
    int64_t need(const BlockPool& pool, const Table* table, const BlockIds& hits, const TokenRanges& tokens) const {
        int64_t length = table == nullptr ? std::ssize(hits) : table->size(), need = 0;
        if (table == nullptr) need = num_evictable(pool, hits, kind.dead(tokens.num_start, tokens.num_prompt_tokens));
        if (tokens.loads()) {
            Growth loaded = growth_of_load(length, tokens);
            need += loaded.num_new();
            length += loaded.num_positions();
        }
        return need + growth_of_step(length, tokens, table != nullptr && table->is_running).num_new();
    }
    // Free blocks that the sequence takes at most on its way from num_start to num_slots in steps of up to `max_step`:
    // over the counts at which a step may start, blocks held in that step, less hits that others hold now, less what
    // the request holds itself.
    int64_t need_of_sequence(const BlockPool& pool, const Table* table, const BlockIds& hits, const TokenRanges& tokens,
                             int64_t max_step) const {
        if (kind.keeps_step_states()) return need_of_states(pool, table, hits, tokens);
        int64_t length = table == nullptr ? std::ssize(hits) : table->size(), most = 0;
        int64_t last = std::max(tokens.num_start, tokens.num_slots - max_step);
        kind.step_starts_to_check(tokens.num_start, last, tokens.num_prompt_tokens, [&](int64_t start) {
            Range dead = kind.releasable(start, tokens.num_prompt_tokens);
            if (table == nullptr) {  // what is dead where it starts is null at once; only later does releasing trail
                Range at_once = kind.dead(tokens.num_start, tokens.num_prompt_tokens);
                if (at_once.size() > dead.size()) dead = at_once;
            }
            int64_t slots = std::min(start + max_step, tokens.num_slots);
            int64_t need =
                growth(length, slots, tokens.num_encoder_tokens, dead, kind.num_speculative_states, false).num_new();
            if (table == nullptr) {
                need += num_evictable(pool, hits, dead);
            } else {
                need -= pool.count_exclusive(table->ids, std::max(dead.start, first_kept(*table, tokens)), dead.stop);
            }
            most = std::max(most, need);
        });
        return most;
    }
    int64_t most_held(const TokenRanges& tokens, int64_t max_step) const {
        return kind.most_held(goal(tokens), max_step, tokens.num_prompt_tokens, tokens.num_encoder_tokens);
    }
    // Blocks that `release` would add to the free ones.
    int64_t num_releasable(const BlockPool& pool, const Table& table, int64_t num_processed, int64_t num_prompt) const {
        Range dead = kind.releasable(num_processed, num_prompt);
        return pool.count_exclusive(table.ids, std::max(dead.start, table.num_released), dead.stop);
    }

    // -- the deeds
    // Starts a request's table with a hit; what is dead where it goes on becomes null.
    void adopt(BlockPool& pool, Table& table, const BlockIds& hits, const TokenRanges& tokens) const {
        Range dead = kind.dead(tokens.num_start, tokens.num_prompt_tokens);
        int64_t length = std::ssize(hits), null_start = std::min(dead.start, length),
                null_stop = std::min(dead.stop, length);
        pool.adopt(table.ids, hits, 0, null_start);
        pool.extend_null(table.ids, null_stop - null_start);
        pool.adopt(table.ids, hits, null_stop, length);
        table.num_committed = length;
        table.num_released = dead.stop;
    }
    // Appends what a load fills, then what the step needs.
    void extend_loaded(BlockPool& pool, Table& table, const TokenRanges& tokens) const {
        grow(pool, table, growth_of_load(table.size(), tokens));
    }
    void extend(BlockPool& pool, Table& table, const TokenRanges& tokens) const {
        grow(pool, table, growth_of_step(table.size(), tokens, table.is_running));
        table.is_running = kind.keeps_step_states();
    }
    // Gives back what no later token reads.
    void release(BlockPool& pool, Table& table, int64_t num_processed, int64_t num_prompt_tokens,
                 int64_t branch_point) const {
        Range dead = kind.releasable(num_processed, num_prompt_tokens);
        int64_t start = std::max(dead.start, table.num_released), stop = std::min(dead.stop, table.size());
        if (start >= stop) return;
        pool.release(table.ids, start, stop, useful_at(branch_point));
        table.num_released = stop;
    }

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
                int64_t branch_point, std::vector<Range>& runs) const {
        int64_t start = table.num_committed, stop = commit_stop(num_tokens, num_prompt_tokens);
        if (start >= stop) return;
        std::sort(table.step_ends.begin(), table.step_ends.end());
        worth_caching(start, stop, num_prompt_tokens, branch_point, [&](Range part) {
            if (!kind.keeps_step_states()) return offer(pool, table, hashes, part, runs);
            // Only states that a step left; a step may have ended twice at one place.
            int64_t last = -1;
            for (int64_t position : table.step_ends) {
                if (part.holds(position) && position != last)
                    offer(pool, table, hashes, {position, position + 1}, runs);
                last = position;
            }
        });
        std::erase_if(table.step_ends, [&](int64_t position) { return position < stop; });
        table.num_committed = stop;
    }
    // Everything from `position` on has to be computed and committed again.
    void uncommit(Table& table, int64_t num_tokens) const {
        int64_t position = num_tokens / kind.block_size;
        table.num_committed = std::min(table.num_committed, position);
        std::erase_if(table.step_ends, [&](int64_t ended) { return ended >= position; });
    }

    // -- bounds
    // The fewest computed tokens from which the request can go on with the blocks it still has.
    int64_t min_computed_tokens(const Table& table, int64_t num_prompt_tokens) const {
        if (!kind.can_die() || table.num_released <= kind.first_releasable_block(num_prompt_tokens)) return 0;
        // A table that ends within a span may have lost what is left of that span.
        return ceil_div(table.num_released * kind.block_size, kind.span) * kind.span + kind.lag;
    }
    // The highest token count up to which an allocation changes nothing.
    int64_t no_op_until(const Table& table, int64_t num_prompt_tokens, bool commits) const {
        int64_t slots = kind.num_slots(table.size()), until = slots;
        if (int64_t next = next_commit(table.num_committed);
            commits && num_shareable(next, num_prompt_tokens) == next) {
            until = std::min(until, next - 1);
        }
        if (commits && kind.keeps_step_states()) until = std::min(until, slots - 1);  // a step that ends there is noted
        if (kind.can_die()) {
            int64_t first = kind.first_releasable_block(num_prompt_tokens);
            int64_t released = std::max(table.num_released, first) * kind.block_size;
            until = std::min(until, (released / kind.span + 1) * kind.span + kind.lag + kind.num_speculative_states);
        }
        return until;
    }

    // -- loads that failed
    // The first token that a position has to do with.
    int64_t first_token(int64_t position) const { return kind.grows() ? position * kind.block_size : 0; }
    // Whether what tokens from `token` on read is there, and so is what they write.
    bool can_resume(const BlockPool& pool, const Table& table, int64_t token, int64_t num_prompt_tokens) const {
        auto has_null = [&](int64_t start, int64_t stop) {
            start = std::min(start, table.size()), stop = std::min(stop, table.size());
            return std::find(table.ids.begin() + start, table.ids.begin() + std::max(start, stop), null_block) !=
                   table.ids.begin() + std::max(start, stop);
        };
        if (kind.content == Content::last_state) return token == 0;  // one state, overwritten in place
        if (kind.keeps_step_states()) {  // the state after exactly `token` tokens, and a block for each that follows
            int64_t first = token / kind.block_size;
            bool starts = token == 0 || (token % kind.block_size == 0 && first <= table.size() &&
                                         pool.is_cached(table.ids[first - 1]));
            return starts && !has_null(first, table.size());
        }
        Range dead = kind.dead(token, num_prompt_tokens);
        return !has_null(0, dead.start) && !has_null(dead.stop, table.size());
    }

private:
    int64_t num_evictable(const BlockPool& pool, const BlockIds& hits, Range dead) const {
        return pool.count_evictable(hits, 0, dead.start) + pool.count_evictable(hits, dead.stop, std::ssize(hits));
    }
    // Of step states: those from before, the running one and the speculative ones.
    int64_t need_of_states(const BlockPool& pool, const Table* table, const BlockIds& hits,
                           const TokenRanges& tokens) const {
        int64_t speculative = kind.num_speculative_states, most = kind.most_states();
        int64_t goal_blocks = ceil_div(goal(tokens), kind.block_size);
        if (table == nullptr) {
            int64_t evictable = num_evictable(pool, hits, kind.dead(tokens.num_start, tokens.num_prompt_tokens));
            int64_t start = evictable + (tokens.loads() ? 1 : 0);  // the hit's state, or a loaded one
            int64_t ahead = goal_blocks - ceil_div(tokens.num_computed, kind.block_size);
            return std::min(most, start + ahead) + speculative;
        }
        int64_t held = pool.count_exclusive(table->ids, first_kept(*table, tokens), table->size());
        int64_t ahead = goal_blocks - (table->size() - speculative);
        return std::max<int64_t>(0, std::min(ahead, most + speculative - held));
    }
    // The first position that is not dead once what `num_processed` allows is released.
    int64_t first_kept(const Table& table, const TokenRanges& tokens) const {
        return std::max(table.num_released, kind.releasable(tokens.num_processed, tokens.num_prompt_tokens).stop);
    }
    Growth growth_of_load(int64_t length, const TokenRanges& tokens) const {
        Range dead = kind.dead(tokens.num_start, tokens.num_prompt_tokens);
        return growth(length, tokens.num_computed, tokens.num_encoder_tokens, dead, 0, false);
    }
    Growth growth_of_step(int64_t length, const TokenRanges& tokens, bool is_running) const {
        Range dead = kind.dead(tokens.num_start, tokens.num_prompt_tokens);
        return growth(length, goal(tokens), tokens.num_encoder_tokens, dead, kind.num_speculative_states, is_running);
    }
    void grow(BlockPool& pool, Table& table, const Growth& growth) const {
        int64_t first_moved = table.size() - kind.num_speculative_states;
        if (growth.before > 0) pool.extend(table.ids, growth.before, options.zeroes_new);
        pool.extend_null(table.ids, growth.nulls);
        for (int64_t i = 0; i < growth.moved; ++i) pool.move(table.ids, first_moved + i);
        if (growth.after > 0) pool.extend(table.ids, growth.after, options.zeroes_new);
    }
    template <typename Visit>
    // Calls visit(part) for the parts of positions [start, stop) that a hit can use, in order.
    void worth_caching(int64_t start, int64_t stop, int64_t num_prompt_tokens, int64_t branch_point,
                       Visit visit) const {
        if (!options.interval) return visit(Range{start, stop});
        int64_t interval = *options.interval, alignment = options.alignment;
        // Hit lengths worth caching for, shortest first: the longest that the same prompt could have, a branch point,
        // and every `interval` tokens as long as a hit of that length needs anything before `stop`.
        int64_t replay = interval == alignment ? 0 : (num_prompt_tokens - 1) / alignment * alignment;
        int64_t some[] = {std::min(replay, branch_point), std::max(replay, branch_point)};
        const int64_t* next = some;
        int64_t last = (stop + 1) * kind.block_size + kind.lag;
        int64_t regular = unbounded;
        if (interval > 0) {
            regular =
                (std::max<int64_t>(0, start * kind.block_size - options.draft_lookahead) / interval + 1) * interval;
        }
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
    void offer(BlockPool& pool, Table& table, const GroupHashes& hashes, Range positions,
               std::vector<Range>& runs) const {
        pool.commit(table.ids, id(), hashes, positions.start, positions.stop, runs);
        if (kind.holds_states()) pool.compute(table.ids, positions);
    }
    // The token count at which position `num_committed` may enter the index.
    int64_t next_commit(int64_t num_committed) const {
        int64_t end = (num_committed + 1) * kind.block_size, alignment = options.alignment;
        if (options.commit_lookahead == 0) return ceil_div(end, alignment) * alignment;
        return std::max(end, std::max<int64_t>(1, ceil_div(end - options.commit_lookahead, alignment)) * alignment);
    }
};

}  // namespace kvpager
