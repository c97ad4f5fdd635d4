#include "group.h"

namespace kvpager {

SingleTypeKVCacheManager::SingleTypeKVCacheManager(const AttentionKind& its_kind, const Options& its_options)
    : kind(its_kind), options(its_options) {
    kind.check();
    auto is_count = [](int64_t value, int64_t at_least) { return value >= at_least && value <= max_count; };
    bool is_fine = is_count(options.hashes_per_block, 1) && is_count(options.alignment, 1) &&
                   options.alignment % kind.block_size == 0 && is_count(options.commit_lookahead, 0) &&
                   is_count(options.draft_lookahead, 0) && is_count(options.interval.value_or(0), 0) &&
                   (is_count(options.shareable_decoded, 0) || options.shareable_decoded == unbounded);
    if (!is_fine) {
        fail(ErrorKind::config,
             "the numbers of group %d do not go together: all at least 0 and at most 2^40, and the alignment (%lld) a "
             "multiple of the block size (%lld)",
             options.group_id, static_cast<long long>(options.alignment), static_cast<long long>(kind.block_size));
    }
}

// -- the plan -------------------------------------------------------------------------------------

// How a table of `length` positions grows to serve `num_tokens` and so many speculative states; while `is_running`, its
// last blocks are the speculative states of the step before.
Growth SingleTypeKVCacheManager::growth(int64_t length, int64_t num_tokens, int64_t num_encoder_tokens, Range dead,
                                        int64_t num_speculative, bool is_running) const {
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

Growth SingleTypeKVCacheManager::growth_of_load(int64_t length, const TokenRanges& tokens) const {
    Range dead = kind.dead(tokens.num_start, tokens.num_prompt_tokens);
    return growth(length, tokens.num_computed, tokens.num_encoder_tokens, dead, 0, false);
}

Growth SingleTypeKVCacheManager::growth_of_step(int64_t length, const TokenRanges& tokens, bool is_running) const {
    Range dead = kind.dead(tokens.num_start, tokens.num_prompt_tokens);
    return growth(length, goal(tokens), tokens.num_encoder_tokens, dead, kind.num_speculative_states, is_running);
}

int64_t SingleTypeKVCacheManager::need(const BlockPool& pool, const Table* table, const BlockIds& hits,
                                       const TokenRanges& tokens) const {
    int64_t length = table == nullptr ? std::ssize(hits) : table->size(), need = 0;
    if (table == nullptr) need = num_evictable(pool, hits, kind.dead(tokens.num_start, tokens.num_prompt_tokens));
    if (tokens.loads()) {
        Growth loaded = growth_of_load(length, tokens);
        need += loaded.num_new();
        length += loaded.num_positions();
    }
    return need + growth_of_step(length, tokens, table != nullptr && table->is_running).num_new();
}

int64_t SingleTypeKVCacheManager::need_of_sequence(const BlockPool& pool, const Table* table, const BlockIds& hits,
                                                   const TokenRanges& tokens, int64_t max_step) const {
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

// Of step states: those from before, the running one and the speculative ones.
int64_t SingleTypeKVCacheManager::need_of_states(const BlockPool& pool, const Table* table, const BlockIds& hits,
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
int64_t SingleTypeKVCacheManager::first_kept(const Table& table, const TokenRanges& tokens) const {
    return std::max(table.num_released, kind.releasable(tokens.num_processed, tokens.num_prompt_tokens).stop);
}

int64_t SingleTypeKVCacheManager::num_releasable(const BlockPool& pool, const Table& table, int64_t num_processed,
                                                 int64_t num_prompt) const {
    Range dead = kind.releasable(num_processed, num_prompt);
    return pool.count_exclusive(table.ids, std::max(dead.start, table.num_released), dead.stop);
}

int64_t SingleTypeKVCacheManager::num_evictable(const BlockPool& pool, const BlockIds& hits, Range dead) const {
    return pool.count_evictable(hits, 0, dead.start) + pool.count_evictable(hits, dead.stop, std::ssize(hits));
}

// -- the deeds ------------------------------------------------------------------------------------

void SingleTypeKVCacheManager::adopt(BlockPool& pool, Table& table, const BlockIds& hits,
                                     const TokenRanges& tokens) const {
    Range dead = kind.dead(tokens.num_start, tokens.num_prompt_tokens);
    int64_t length = std::ssize(hits), null_start = std::min(dead.start, length), null_stop = std::min(dead.stop, length);
    pool.adopt(table.ids, hits, 0, null_start);
    pool.extend_null(table.ids, null_stop - null_start);
    pool.adopt(table.ids, hits, null_stop, length);
    table.num_committed = length;
    table.num_released = dead.stop;
}

void SingleTypeKVCacheManager::extend_loaded(BlockPool& pool, Table& table, const TokenRanges& tokens) const {
    grow(pool, table, growth_of_load(table.size(), tokens));
}

void SingleTypeKVCacheManager::extend(BlockPool& pool, Table& table, const TokenRanges& tokens) const {
    grow(pool, table, growth_of_step(table.size(), tokens, table.is_running));
    table.is_running = kind.keeps_step_states();
}

void SingleTypeKVCacheManager::grow(BlockPool& pool, Table& table, const Growth& growth) const {
    int64_t first_moved = table.size() - kind.num_speculative_states;
    if (growth.before > 0) pool.extend(table.ids, growth.before, options.zeroes_new);
    pool.extend_null(table.ids, growth.nulls);
    for (int64_t i = 0; i < growth.moved; ++i) pool.move(table.ids, first_moved + i);
    if (growth.after > 0) pool.extend(table.ids, growth.after, options.zeroes_new);
}

void SingleTypeKVCacheManager::release(BlockPool& pool, Table& table, int64_t num_processed, int64_t num_prompt_tokens,
                                       int64_t branch_point) const {
    Range dead = kind.releasable(num_processed, num_prompt_tokens);
    int64_t start = std::max(dead.start, table.num_released), stop = std::min(dead.stop, table.size());
    if (start >= stop) return;
    pool.release(table.ids, start, stop, useful_at(branch_point));
    table.num_released = stop;
}

// -- the index ------------------------------------------------------------------------------------

void SingleTypeKVCacheManager::commit(BlockPool& pool, Table& table, const GroupHashes& hashes, int64_t num_tokens,
                                      int64_t num_prompt_tokens, int64_t branch_point, std::vector<Range>& runs) const {
    int64_t start = table.num_committed, stop = commit_stop(num_tokens, num_prompt_tokens);
    if (start >= stop) return;
    std::sort(table.step_ends.begin(), table.step_ends.end());
    worth_caching(start, stop, num_prompt_tokens, branch_point, [&](Range part) {
        if (!kind.keeps_step_states()) return offer(pool, table, hashes, part, runs);
        // Only states that a step left; a step may have ended twice at one place.
        int64_t last = -1;
        for (int64_t position : table.step_ends) {
            if (part.holds(position) && position != last) offer(pool, table, hashes, {position, position + 1}, runs);
            last = position;
        }
    });
    std::erase_if(table.step_ends, [&](int64_t position) { return position < stop; });
    table.num_committed = stop;
}

void SingleTypeKVCacheManager::offer(BlockPool& pool, Table& table, const GroupHashes& hashes, Range positions,
                                     std::vector<Range>& runs) const {
    pool.commit(table.ids, id(), hashes, positions.start, positions.stop, runs);
    if (kind.holds_states()) pool.compute(table.ids, positions);
}

// Calls visit(part) for the parts of positions [start, stop) that a hit can use, in order.
template <typename Visit>
void SingleTypeKVCacheManager::worth_caching(int64_t start, int64_t stop, int64_t num_prompt_tokens,
                                             int64_t branch_point, Visit visit) const {
    if (!options.interval) return visit(Range{start, stop});
    int64_t interval = *options.interval, alignment = options.alignment;
    // Hit lengths worth caching for, shortest first: the longest that the same prompt could have, a branch point, and
    // every `interval` tokens as long as a hit of that length needs anything before `stop`.
    int64_t replay = interval == alignment ? 0 : (num_prompt_tokens - 1) / alignment * alignment;
    int64_t some[] = {std::min(replay, branch_point), std::max(replay, branch_point)};
    const int64_t* next = some;
    int64_t last = (stop + 1) * kind.block_size + kind.lag;
    int64_t regular = unbounded;
    if (interval > 0) {
        regular = (std::max<int64_t>(0, start * kind.block_size - options.draft_lookahead) / interval + 1) * interval;
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

void SingleTypeKVCacheManager::uncommit(Table& table, int64_t num_tokens) const {
    int64_t position = num_tokens / kind.block_size;
    table.num_committed = std::min(table.num_committed, position);
    std::erase_if(table.step_ends, [&](int64_t ended) { return ended >= position; });
}

// -- bounds ---------------------------------------------------------------------------------------

int64_t SingleTypeKVCacheManager::min_computed_tokens(const Table& table, int64_t num_prompt_tokens) const {
    if (!kind.can_die() || table.num_released <= kind.first_releasable_block(num_prompt_tokens)) return 0;
    // A table that ends within a span may have lost what is left of that span.
    return ceil_div(table.num_released * kind.block_size, kind.span) * kind.span + kind.lag;
}

int64_t SingleTypeKVCacheManager::no_op_until(const Table& table, int64_t num_prompt_tokens, bool commits) const {
    int64_t slots = kind.num_slots(table.size()), until = slots;
    if (int64_t next = next_commit(table.num_committed); commits && num_shareable(next, num_prompt_tokens) == next) {
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

// The token count at which position `num_committed` may enter the index.
int64_t SingleTypeKVCacheManager::next_commit(int64_t num_committed) const {
    int64_t end = (num_committed + 1) * kind.block_size, alignment = options.alignment;
    if (options.commit_lookahead == 0) return ceil_div(end, alignment) * alignment;
    return std::max(end, std::max<int64_t>(1, ceil_div(end - options.commit_lookahead, alignment)) * alignment);
}

// -- loads that failed ----------------------------------------------------------------------------

bool SingleTypeKVCacheManager::can_resume(const BlockPool& pool, const Table& table, int64_t token,
                                          int64_t num_prompt_tokens) const {
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

}  // namespace kvpager
