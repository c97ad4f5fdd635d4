// Makes the groups agree: one hit length, one plan, one way in which a request's blocks change.
#pragma once

#include <span>
#include <string>

#include "live_requests.h"

namespace kvpager {

// What a call reads of a request, all of it before anything changes.
struct RequestSnapshot {
    int64_t num_computed_tokens = 0;
    int64_t num_in_flight_tokens = 0;
    int64_t num_prompt_tokens = 0;
    int64_t num_tokens = 0;
    int64_t max_num_tokens = 0;  // how long it may become
    bool is_waiting = false;     // not running: it must leave the watermark free
    HashSource hashes{};

    // Computed tokens whose step's result is known: a step in flight still reads what they read.
    int64_t num_processed_tokens() const { return std::max<int64_t>(0, num_computed_tokens - num_in_flight_tokens); }
};

// What one call of allocate_slots asks for.
struct Demand {
    int64_t num_new_tokens = 0;
    int64_t num_hit_tokens = 0;
    int64_t num_lookahead_tokens = 0;
    int64_t num_external_tokens = 0;
    int64_t num_encoder_tokens = 0;
    bool delays_commit = false;
    bool full_sequence_must_fit = false;
    int64_t reserved_blocks = 0;
    bool has_scheduled_requests = true;
};

// A hit as it was found: each group's blocks (none: there is no hit).
struct Hit {
    std::vector<const BlockIds*> blocks{};
    int64_t index_version = 0;  // when it was found
    int64_t branch_point = 0;
};

// The longest prefix that every group has. `branch_point`: the longest aligned length beyond it that the groups which
// need the whole prefix still have (0: none): some other request shares it, and only window or state blocks are missing.
struct Match {
    int64_t num_tokens = 0;
    std::vector<BlockIds> blocks{};
    int64_t branch_point = 0;
};

enum class Fit : uint8_t { now, not_now, next_step, never };

struct FitReport {
    Fit fit = Fit::now;
    std::vector<int64_t> needs{};  // free blocks, one a group; evictable hits included
    int64_t num_needed = 0;
    int64_t num_short = 0;
};

enum class Outcome : uint8_t { no_op, allocated, refused };

// Positions of a group whose hashes were new to the index.
struct StoredRun {
    size_t group;
    Range positions;
};

// Owns the live requests with their tables, and through the pool's verbs what happens to their blocks. Invariant: each
// reference that requests have to a block is a position in one of these tables. An error changes nothing; a refusal
// nothing but dead blocks. It does not know Python, request objects, token ids or events: who calls reads the request
// first and writes events from `stored`.
class KVCacheCoordinator {
public:
    struct Options {
        int64_t hash_block_size;
        int64_t max_model_len;
        int64_t max_num_batched_tokens;  // the most tokens that a step computes for one request
        int64_t watermark_blocks;
        bool can_hit;  // else nothing is looked up or committed: entries that nobody can hit only mislead
    };

    KVCacheCoordinator(BlockPool& pool, std::vector<SingleTypeKVCacheManager> groups, const Options& options);

    KVCacheCoordinator(const KVCacheCoordinator&) = delete;

    const std::vector<SingleTypeKVCacheManager>& groups() const { return groups_; }
    const Options& options() const { return options_; }
    const LiveRequests& live() const { return live_; }
    LiveRequest* find(const void* key) const { return live_.find(key); }
    void forget_all() { live_.clear(); }

    // -- questions
    // The longest hit of at most `max_tokens`, a multiple of the alignment. O(prefix)
    Match match(const HashSource& hashes, int64_t max_tokens) const;
    // Each group's longest hit if it were alone, aligned all the same; `Match::branch_point` is 0.
    std::vector<Match> match_each(const HashSource& hashes, int64_t max_tokens) const;
    // How many of the tokens may be hit.
    int64_t num_shareable(int64_t num_tokens, int64_t num_prompt_tokens) const;
    // Whether the cache could hold a sequence that has it for itself. O(groups)
    bool length_fits(int64_t num_tokens, int64_t num_prompt_tokens, int64_t num_lookahead, int64_t num_encoder) const;
    // The longest prompt that it could hold. O(1), but the first call bisects: need grows with length.
    int64_t longest_that_fits(int64_t num_lookahead, int64_t num_encoder) const;
    bool fits_alone(const RequestSnapshot& request, int64_t num_lookahead, int64_t num_encoder) const;
    // What `allocate` would do: its planning half. Throws as it does. O(groups + hit)
    FitReport check_fit(const void* key, const RequestSnapshot& request, const Demand& demand, const Hit& hit) const;
    // Free blocks that reaching some token counts takes, one number a group: at once, or at most on the way.
    std::vector<int64_t> plan(const LiveRequest* live, const Hit& hit, const TokenRanges& tokens) const;
    std::vector<int64_t> plan_sequence(const LiveRequest* live, const Hit& hit, const TokenRanges& tokens,
                                       int64_t num_lookahead) const;
    // The tokens that `allocate` may enter into the index, or `cache_blocks` up to `num_tokens`: events tell of them.
    Range tokens_to_commit(const LiveRequest* live, const RequestSnapshot& request, const Demand& demand) const;
    Range tokens_to_commit(const LiveRequest* live, int64_t num_computed_tokens, int64_t num_tokens) const;
    // Token slots that its tables have.
    int64_t num_slots(const LiveRequest& live) const;

    // Whether a call changes nothing: one look-up and a few comparisons.
    bool is_no_op(const LiveRequest& live, int64_t num_computed_tokens, const Demand& demand) const {
        return live.min_computed_tokens <= num_computed_tokens &&
               num_computed_tokens + demand.num_new_tokens + demand.num_lookahead_tokens <= live.no_op_until &&
               most_to_keep(demand) <= pool_.num_free();
    }
    // Free blocks that an allocation must leave, whoever asks.
    int64_t most_to_keep(const Demand& demand) const {
        return demand.reserved_blocks + (demand.has_scheduled_requests ? options_.watermark_blocks : 0);
    }

    // -- deeds
    // The one way: release what is dead, plan, refuse or apply, commit, find the bounds. A key that is not live is a new
    // request. `appended` and `stored` tell what happened. O(groups + blocks changed)
    Outcome allocate(const void* key, const void* name, const RequestSnapshot& request, const Demand& demand,
                     const Hit& hit);
    // The ids that the last `allocate` appended to a group's table for new and lookahead tokens.
    std::span<const BlockId> appended(const LiveRequest& live, size_t group) const {
        return std::span(live.tables[group].ids).subspan(lengths_[group]);
    }
    // What the last `allocate` or `cache_blocks` entered into the index.
    const std::vector<StoredRun>& stored() const { return stored_; }
    // A load has arrived up to `num_computed_tokens`.
    void cache_blocks(LiveRequest& live, const RequestSnapshot& request, int64_t num_computed_tokens);
    // A step left the states after so many tokens, which `allocate` did not know.
    void note_step_end(LiveRequest& live, int64_t num_tokens) {
        if (num_tokens > live.no_op_until) step_ends(live, num_tokens);
    }
    void release(LiveRequest& live, int64_t num_processed_tokens, int64_t num_prompt_tokens);
    // Gives back all that a request holds, tail first; or hands it out. It is forgotten. O(blocks)
    void free(LiveRequest& live, const RequestSnapshot& request);
    std::vector<BlockId> pop(LiveRequest& live);
    // The blocks hold garbage: they and all that any holder computed from them leave the index. Gives each holder and its
    // first token to compute again (0: what it would go on from is gone). O(held blocks)
    std::vector<std::pair<const LiveRequest*, int64_t>> invalidate(std::span<const BlockId> blocks);
    // All hashes leave at once; who holds blocks now commits nothing any more. O(pool)
    void clear_index();

private:
    // Groups that accept the same hits are looked up together, those that need the whole prefix first: they shorten it.
    struct Lookup {
        const SingleTypeKVCacheManager* group;
        std::vector<GroupId> ids;
    };

    std::vector<Lookup> group_lookups() const;
    int64_t longest_run(const Lookup& lookup, const HashSource& hashes, int64_t length) const;
    BlockIds take_hit(const SingleTypeKVCacheManager& group, const HashSource& hashes, BlockIds& prefix,
                      int64_t length) const;
    GroupHashes hashes_of(const SingleTypeKVCacheManager& group, const HashSource& hashes) const {
        return GroupHashes(hashes, group.options.hashes_per_block);
    }
    bool commits(const LiveRequest& live) const { return options_.can_hit && !live.is_stale; }

    TokenRanges ranges(const RequestSnapshot& request, const Demand& demand) const;
    void check_progress(const LiveRequest* live, const RequestSnapshot& request) const;
    void check_hit(const LiveRequest* live, const RequestSnapshot& request, const Demand& demand, const Hit& hit) const;
    void check_hashes(const LiveRequest* live, const RequestSnapshot& request, const Hit& hit, int64_t num_tokens) const;
    FitReport judge(const LiveRequest* live, const RequestSnapshot& request, const Demand& demand, const Hit& hit,
                    const TokenRanges& tokens, int64_t num_releasable) const;
    void release_dead(LiveRequest& live, int64_t num_processed_tokens, int64_t num_prompt_tokens);
    void step_ends(LiveRequest& live, int64_t num_tokens);
    LiveRequest& admit(const void* key, const void* name, const Hit& hit, const TokenRanges& tokens);
    void apply(LiveRequest& live, const TokenRanges& tokens);
    void commit_step(LiveRequest& live, const RequestSnapshot& request, const Demand& demand, const TokenRanges& tokens);
    void commit(LiveRequest& live, const RequestSnapshot& request, int64_t num_tokens);
    void find_bounds(LiveRequest& live) const;
    void prefetch_step(const LiveRequest& live, const RequestSnapshot& request, int64_t num_tokens) const;
    std::vector<BlockIds*> tables_of(LiveRequest& live);
    int64_t first_bad_token(const LiveRequest& live, const std::vector<bool>& is_bad) const;

    BlockPool& pool_;
    std::vector<SingleTypeKVCacheManager> groups_;
    Options options_;
    std::vector<Lookup> lookups_;
    std::vector<int64_t> block_sizes_;
    int64_t alignment_ = 1, draft_lookahead_ = 0;
    bool has_step_states_ = false;
    LiveRequests live_;
    // The answer to `longest_that_fits` that was asked for last.
    mutable int64_t longest_ = -1, longest_lookahead_ = -1, longest_encoder_ = -1;
    // What the last deed did.
    std::vector<int64_t> lengths_;  // of the tables, before they grew
    std::vector<StoredRun> stored_;
    std::vector<Range> runs_;  // scratch
};

}  // namespace kvpager
