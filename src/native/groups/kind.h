// What sets one attention kind apart, as numbers, and what follows from them. Python's AttentionSpec explains them.
#pragma once

#include <algorithm>
#include <limits>

#include "../errors.h"
#include "../pool/blocks.h"

namespace kvpager {

// More tokens than any sequence has; sums and products of some of them do not overflow.
constexpr int64_t unbounded = int64_t{1} << 60;
// Every size and token count that comes from outside is at most this.
constexpr int64_t max_count = int64_t{1} << 40;

inline int64_t ceil_div(int64_t numerator, int64_t denominator) { return (numerator + denominator - 1) / denominator; }

// What a block of the group holds.
enum class Content : uint8_t {
    tokens,          // those of its position
    encoder_tokens,  // an encoder's output: allocated once
    last_state,      // one state a request, overwritten in place
    every_state,     // the state at its end
    step_states,     // the state at its end, if a step ended there; else nothing: the position is null
};

// One attention kind. It owns nothing and knows no blocks, tables or requests: positions only. All counts are >= 0.
struct AttentionKind {
    Content content;
    int64_t block_size;
    int64_t lag;                     // the last computed tokens that later tokens still read; unbounded: all of them
    int64_t span;                    // in what pieces a sequence dies, a multiple of the block size
    int64_t num_speculative_states;  // held beside the others for drafts that may be rejected
    bool keeps_prompt;               // only what was decoded dies
    bool needs_whole_prefix;         // a hit needs every block before it

    bool operator==(const AttentionKind&) const = default;

    // Throws ErrorKind::config for numbers that describe no kind.
    void check() const {
        bool is_positive = block_size > 0 && span > 0 && lag >= 0 && num_speculative_states >= 0;
        bool is_bounded = block_size <= max_count && span <= max_count && (lag <= max_count || lag == unbounded) &&
                          num_speculative_states <= max_count;
        if (!is_positive || !is_bounded || span % block_size != 0) {
            fail(ErrorKind::config,
                 "block size %lld, lag %lld, span %lld and %lld speculative states describe no attention "
                 "kind: all at least 0 and at most 2^40, the span a multiple of the block size",
                 Long{block_size}, Long{lag}, Long{span}, Long{num_speculative_states});
        }
    }

    bool holds_states() const { return content >= Content::last_state; }
    bool keeps_step_states() const { return content == Content::step_states; }
    bool grows() const { return content != Content::encoder_tokens && content != Content::last_state; }
    bool can_die() const { return lag < unbounded; }

    int64_t first_releasable_block(int64_t num_prompt_tokens) const {
        return keeps_prompt ? ceil_div(num_prompt_tokens, block_size) : 0;
    }

    // The rule of rules: positions that no later token reads once `num_computed_tokens` are computed.
    Range dead(int64_t num_computed_tokens, int64_t num_prompt_tokens) const {
        int64_t first = first_releasable_block(num_prompt_tokens);
        if (num_computed_tokens <= lag) return {first, first};
        return {first, std::max(first, (num_computed_tokens - lag) / span * (span / block_size))};
    }
    // The same where states may be rolled back by as many tokens as there are speculative ones: releasing trails.
    Range releasable(int64_t num_processed_tokens, int64_t num_prompt_tokens) const {
        return dead(num_processed_tokens - num_speculative_states, num_prompt_tokens);
    }

    // Positions that a hit of `num_tokens` reads: those that are not dead where it ends.
    Range needed_for_hit(int64_t num_tokens) const {
        return {dead(num_tokens, num_tokens).size(), num_tokens / block_size};
    }

    // The length of a table that serves `num_slots` tokens, speculative states included.
    int64_t num_positions(int64_t num_slots, int64_t num_encoder_tokens) const {
        if (content == Content::encoder_tokens) return ceil_div(num_encoder_tokens, block_size);
        return (content == Content::last_state ? 1 : ceil_div(num_slots, block_size)) + num_speculative_states;
    }
    // Token slots that a table of so many positions serves.
    int64_t num_slots(int64_t num_positions) const {
        return grows() ? std::max<int64_t>(0, num_positions - num_speculative_states) * block_size : unbounded;
    }

    // Of step states: how many are held at once beside the speculative ones. The running one and the one before; and,
    // since releasing trails, those that so many tokens can reach back to.
    int64_t most_states() const { return 2 + ceil_div(num_speculative_states, block_size); }

    // Calls visit(n) for the computed counts in [first, last] among which a prefill holds the most blocks. It holds
    // what is not releasable at n and its step; each step moves both ends by the same tokens, so the most is held
    // either at `last` or just before the latest release at or before it. O(log span)
    template <typename Visit>
    void step_starts_to_check(int64_t first, int64_t last, int64_t num_prompt_tokens, Visit visit) const {
        visit(last);
        int64_t released = releasable(last, num_prompt_tokens).size();
        int64_t low = std::max(first, last - span), high = last;
        if (low >= high || releasable(low, num_prompt_tokens).size() == released) return;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            (releasable(middle, num_prompt_tokens).size() < released ? low : high) = middle;
        }
        visit(low);
    }

    // Blocks that a sequence holds at most on its way to `num_slots` tokens in steps of up to `max_step`, none shared.
    int64_t most_held(int64_t num_slots, int64_t max_step, int64_t num_prompt_tokens,
                      int64_t num_encoder_tokens) const {
        if (keeps_step_states()) {
            return std::min(most_states(), ceil_div(num_slots, block_size)) + num_speculative_states;
        }
        int64_t most = 0;
        int64_t last = std::max<int64_t>(0, num_slots - max_step);
        step_starts_to_check(0, last, num_prompt_tokens, [&](int64_t start) {
            int64_t positions = num_positions(std::min(start + max_step, num_slots), num_encoder_tokens);
            Range dead = releasable(start, num_prompt_tokens);
            most = std::max(most, positions - Range{dead.start, std::min(dead.stop, positions)}.size());
        });
        return most;
    }
};

}  // namespace kvpager
