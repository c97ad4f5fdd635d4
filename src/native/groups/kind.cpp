#include "kind.h"

#include "../errors.h"

namespace kvpager {

void AttentionKind::check() const {
    bool is_positive = block_size > 0 && span > 0 && lag >= 0 && num_speculative_states >= 0;
    bool is_bounded = block_size <= max_count && span <= max_count && (lag <= max_count || lag == unbounded) &&
                      num_speculative_states <= max_count;
    if (!is_positive || !is_bounded || span % block_size != 0) {
        fail(ErrorKind::config, "block size %lld, lag %lld, span %lld and %lld speculative states describe no attention "
             "kind: all at least 0 and at most 2^40, the span a multiple of the block size",
             static_cast<long long>(block_size), static_cast<long long>(lag), static_cast<long long>(span),
             static_cast<long long>(num_speculative_states));
    }
}

int64_t AttentionKind::most_held(int64_t num_slots, int64_t max_step, int64_t num_prompt_tokens,
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

}  // namespace kvpager
