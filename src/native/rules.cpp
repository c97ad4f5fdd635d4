#include "rules.h"

#include "errors.h"

namespace kvpager {

void GroupRule::check() const {
    bool fine = block_size > 0 && stride > 0 && lag >= -1 && span > 0 && span % block_size == 0 && release_delay >= 0 &&
                alignment > 0 && alignment % block_size == 0 && commit_margin >= 0 && hit_margin >= 0 && shareable >= -1 && interval >= -1;
    if (!fine) raise(config_error, "the numbers of group %d do not describe an attention kind", group);
}

Growth GroupRule::growth(int64_t length, int64_t num_tokens, Range gone, bool running) const {
    if (!grows) return {};
    int64_t goal = num_positions(num_tokens);
    if (goal <= length) return {};
    if (is_align) {
        // Only the running state and the speculative ones get memory. The speculative blocks of
        // the last step move along; what lies between is nobody's state.
        int64_t first = goal - release_delay - 1;
        int64_t nulls = std::max<int64_t>(0, first - length);
        int64_t moved = running ? std::max<int64_t>(0, std::min(length, first) - (length - release_delay)) : 0;
        return {0, nulls, moved, goal - length - nulls - moved};
    }
    int64_t null_start = std::min(std::max(gone.start, length), goal);
    int64_t null_stop = std::min(std::max(gone.stop, null_start), goal);
    return {null_start - length, null_stop - null_start, 0, goal - null_stop};
}

int64_t GroupRule::lowest_computed(const BlockList& table, int64_t num_prompt_tokens) const {
    if (lag < 0 || table.num_released <= first_mortal_block(num_prompt_tokens)) return 0;
    // A table that ends within a span may have lost what is left of that span.
    return ceil_div(table.num_released * block_size, span) * span + lag;
}

int64_t GroupRule::quiet_until(const BlockList& table, int64_t num_prompt_tokens, bool commits) const {
    int64_t until = num_slots(table);
    if (int64_t next = next_commit(table.num_committed); commits && num_shareable(next, num_prompt_tokens) == next) {
        until = std::min(until, next - 1);
    }
    if (commits && is_align) until = std::min(until, num_slots(table) - 1);  // a step that ends there is noted
    if (lag >= 0) {
        int64_t released = std::max(table.num_released, first_mortal_block(num_prompt_tokens)) * block_size;
        until = std::min(until, (released / span + 1) * span + lag + release_delay);
    }
    return until;
}

// The token count at which position `committed` may enter the index.
int64_t GroupRule::next_commit(int64_t committed) const {
    int64_t end = (committed + 1) * block_size;
    if (commit_margin == 0) return ceil_div(end, alignment) * alignment;
    return std::max(end, std::max<int64_t>(1, ceil_div(end - commit_margin, alignment)) * alignment);
}

// Starts a request's table with a hit; what is dead from the start becomes null.
void GroupRule::adopt(Pool& pool, BlockList& table, const BlockList& hits, Range gone) const {
    int64_t null_start = std::min(gone.start, hits.size()), null_stop = std::min(gone.stop, hits.size());
    pool.adopt(table, hits, 0, null_start);
    pool.extend_null(table, null_stop - null_start);
    pool.adopt(table, hits, null_stop, hits.size());
    table.num_committed = hits.size();
    table.num_released = gone.stop;
}

void GroupRule::release(Pool& pool, BlockList& table, int64_t num_processed, int64_t num_prompt_tokens,
                        int64_t junction) const {
    Range gone = dead(num_processed - release_delay, num_prompt_tokens);
    int64_t start = std::max(gone.start, table.num_released), stop = std::min(gone.stop, table.size());
    if (start >= stop) return;
    pool.release(table, start, stop, junction > 0 ? needed_for_hit(junction) : Range{});
    table.num_released = stop;
}

void GroupRule::grow(Pool& pool, BlockList& table, const Growth& growth) const {
    int64_t first_moved = table.size() - release_delay;
    if (growth.before > 0) pool.extend(table, growth.before, notes_new);
    if (growth.nulls > 0) pool.extend_null(table, growth.nulls);
    for (int64_t i = 0; i < growth.moved; ++i) pool.move(table, first_moved + i);
    if (growth.after > 0) pool.extend(table, growth.after, notes_new);
}

void GroupRule::commit(Pool& pool, BlockList& table, const Hashes& hashes, int64_t num_tokens,
                       int64_t num_prompt_tokens, int64_t junction, std::vector<Range>& runs) const {
    int64_t start = table.num_committed, stop = commit_stop(num_tokens, num_prompt_tokens);
    if (start >= stop) return;
    std::sort(table.step_ends.begin(), table.step_ends.end());
    worth_caching(start, stop, num_prompt_tokens, junction, [&](Range part) {
        if (!is_align) return offer(pool, table, hashes, part, runs);
        // Of an align group, only states that a step left; a step may have ended twice at one place.
        int64_t last = -1;
        for (int64_t position : table.step_ends) {
            if (part.holds(position) && position != last) offer(pool, table, hashes, {position, position + 1}, runs);
            last = position;
        }
    });
    std::erase_if(table.step_ends, [&](int64_t position) { return position < stop; });
    table.num_committed = stop;
}

void GroupRule::offer(Pool& pool, BlockList& table, const Hashes& hashes, Range positions,
                      std::vector<Range>& runs) const {
    pool.commit(table, group, hashes, positions.start, positions.stop, runs);
    if (is_state) pool.compute(table, positions);
}

}  // namespace kvpager
