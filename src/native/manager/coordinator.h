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

inline const BlockIds no_blocks{};

// A hit as it was found: each group's blocks (none: there is no hit).
struct Hit {
    std::vector<const BlockIds*> blocks{};
    int64_t index_version = 0;  // when it was found
    int64_t branch_point = 0;

    const BlockIds& of(size_t group) const { return blocks.empty() ? no_blocks : *blocks[group]; }
};

// The longest prefix that every group has. `branch_point`: the longest aligned length beyond it that the groups which
// need the whole prefix still have (0: none): some other request shares it, and only window or state blocks are
// missing.
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

    KVCacheCoordinator(BlockPool& pool, std::vector<SingleTypeKVCacheManager> groups, const Options& options)
        : pool_(pool), groups_(std::move(groups)), options_(options) {
        for (size_t i = 0; i < groups_.size(); ++i) {
            const SingleTypeKVCacheManager& group = groups_[i];
            if (group.id() != i || group.id() >= pool.num_groups()) {
                fail(ErrorKind::invalid_request, "group %d stands at place %zu of %lld", group.id(), i,
                     Long{pool.num_groups()});
            }
            block_sizes_.push_back(group.kind.block_size);
            draft_lookahead_ = std::max(draft_lookahead_, group.options.draft_lookahead);
            alignment_ = group.options.alignment;
            has_step_states_ |= group.kind.keeps_step_states();
        }
        lookups_ = group_lookups();
    }

    KVCacheCoordinator(const KVCacheCoordinator&) = delete;

    const std::vector<SingleTypeKVCacheManager>& groups() const { return groups_; }
    const Options& options() const { return options_; }
    const LiveRequests& live() const { return live_; }
    LiveRequest* find(const void* key) const { return live_.find(key); }
    void forget_all() { live_.clear(); }

    // -- questions
    // The longest hit of at most `max_tokens`, a multiple of the alignment. O(prefix)
    Match match(const HashSource& hashes, int64_t max_tokens) const { return match(hashes, max_tokens, lookups_); }
    // A group's longest hit if it were alone, aligned all the same.
    Match match_alone(const HashSource& hashes, int64_t max_tokens, const SingleTypeKVCacheManager& group) const {
        return match(hashes, max_tokens, {Lookup{&group, {group.id()}}});
    }
    // How many of the tokens may be hit.
    int64_t num_shareable(int64_t num_tokens, int64_t num_prompt_tokens) const {
        for (const SingleTypeKVCacheManager& group : groups_) {
            num_tokens = group.num_shareable(num_tokens, num_prompt_tokens);
        }
        return num_tokens;
    }
    // Whether the cache could hold a sequence that has it for itself. O(groups)
    bool length_fits(int64_t num_tokens, int64_t num_prompt_tokens, int64_t num_lookahead, int64_t num_encoder) const {
        RequestSnapshot request{.num_prompt_tokens = num_prompt_tokens, .num_tokens = num_tokens};
        TokenRanges tokens = ranges(
            request,
            {.num_new_tokens = num_tokens, .num_lookahead_tokens = num_lookahead, .num_encoder_tokens = num_encoder});
        int64_t need = 0;
        for (const SingleTypeKVCacheManager& group : groups_) {
            need += group.most_held(tokens, max_step(num_lookahead));
        }
        return need <= pool_.num_blocks() - 1 - pool_.num_reserved();
    }
    // The longest prompt that it could hold. O(1), but the first call bisects: need grows with length.
    int64_t longest_that_fits(int64_t num_lookahead, int64_t num_encoder) const {
        if (longest_ >= 0 && longest_lookahead_ == num_lookahead && longest_encoder_ == num_encoder) return longest_;
        int64_t fits = 0, too_many = options_.max_model_len + 1;
        while (too_many - fits > 1) {
            int64_t middle = (fits + too_many) / 2;
            (length_fits(middle, middle, num_lookahead, num_encoder) ? fits : too_many) = middle;
        }
        longest_lookahead_ = num_lookahead, longest_encoder_ = num_encoder;
        return longest_ = fits;
    }
    // A sequence that is all prompt needs the most: what fits then always fits.
    bool fits_alone(const RequestSnapshot& request, int64_t num_lookahead, int64_t num_encoder) const {
        int64_t longest = std::max(request.max_num_tokens, request.num_tokens);
        return longest <= longest_that_fits(num_lookahead, num_encoder) ||
               length_fits(longest, request.num_prompt_tokens, num_lookahead, num_encoder);
    }
    // What `allocate` would do: its planning half. Throws as it does. O(groups + hit)
    FitReport check_fit(const void* key, const RequestSnapshot& request, const Demand& demand, const Hit& hit) const {
        const LiveRequest* live = live_.find(key);
        check_progress(live, request);
        check_hit(live, request, demand, hit);
        TokenRanges tokens = ranges(request, demand);
        int64_t num_releasable = 0;
        for (size_t i = 0; live != nullptr && i < groups_.size(); ++i) {
            num_releasable +=
                groups_[i].num_releasable(pool_, live->tables[i], tokens.num_processed, request.num_prompt_tokens);
        }
        return judge(live, request, demand, hit, tokens, num_releasable);
    }
    // Free blocks that reaching some token counts takes, one number a group: at once, or at most on the way there.
    std::vector<int64_t> plan(const LiveRequest* live, const Hit& hit, const TokenRanges& tokens) const {
        return for_each_group(live, hit, [&](const auto& group, const Table* table, const BlockIds& blocks) {
            return group.need(pool_, table, blocks, tokens);
        });
    }
    std::vector<int64_t> plan_sequence(const LiveRequest* live, const Hit& hit, const TokenRanges& tokens,
                                       int64_t num_lookahead) const {
        return for_each_group(live, hit, [&](const auto& group, const Table* table, const BlockIds& blocks) {
            return group.need_of_sequence(pool_, table, blocks, tokens, max_step(num_lookahead));
        });
    }
    // The tokens that a call which computes up to `num_tokens` may enter into the index: events will tell of them.
    Range tokens_to_commit(const LiveRequest* live, int64_t num_computed_tokens, int64_t num_tokens) const {
        int64_t first = num_tokens, last = 0;
        if (!options_.can_hit || (live != nullptr && live->is_stale)) return {};
        for (size_t i = 0; i < groups_.size(); ++i) {
            int64_t start = first_to_commit(live, i, num_computed_tokens);
            int64_t stop = groups_[i].commit_stop(num_tokens, num_tokens);
            if (start >= stop) continue;
            first = std::min(first, start * block_sizes_[i]), last = std::max(last, stop * block_sizes_[i]);
        }
        return {first, std::max(first, last)};
    }
    // Leading blocks of a table that all live requests hold.
    int64_t num_shared_blocks(const Table& table) const { return pool_.num_shared_by(table.ids, live_.size()); }
    // Token slots that its tables have.
    int64_t num_slots(const LiveRequest& live) const {
        int64_t slots = unbounded;
        for (size_t i = 0; i < groups_.size(); ++i) {
            slots = std::min(slots, groups_[i].kind.num_slots(live.tables[i].size()));
        }
        return slots;
    }

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
    // The one way: release what is dead, plan, refuse or apply, commit, find the bounds. A key that is not live is a
    // new request. `appended` and `stored` tell what happened. O(groups + blocks changed)
    Outcome allocate(const void* key, const void* name, const RequestSnapshot& request, const Demand& demand,
                     const Hit& hit) {
        LiveRequest* live = live_.find(key);
        stored_.clear();
        check_progress(live, request);
        check_hit(live, request, demand, hit);
        TokenRanges tokens = ranges(request, demand);
        check_hashes(live, request, tokens.num_local, std::min(tokens.num_main, request.num_tokens));
        if (live != nullptr) {
            prefetch_step(*live, request, std::min(tokens.num_main, request.num_tokens));
            release_dead(*live, tokens.num_processed, request.num_prompt_tokens);
        }
        if (judge(live, request, demand, hit, tokens, 0).fit != Fit::now) {
            if (live != nullptr) find_bounds(*live);
            return Outcome::refused;
        }
        if (live == nullptr) live = &admit(key, name, hit, tokens);
        apply(*live, tokens);
        commit_step(*live, request, demand, tokens);
        find_bounds(*live);
        return Outcome::allocated;
    }
    // The ids that the last `allocate` appended to a group's table for new and lookahead tokens.
    std::span<const BlockId> appended(const LiveRequest& live, size_t group) const {
        return std::span(live.tables[group].ids).subspan(lengths_[group]);
    }
    // What the last `allocate` or `cache_blocks` entered into the index.
    const std::vector<StoredRun>& stored() const { return stored_; }
    // A load has arrived up to `num_computed_tokens`.
    void cache_blocks(LiveRequest& live, const RequestSnapshot& request, int64_t num_computed_tokens) {
        stored_.clear();
        if (num_computed_tokens <= live.no_op_until) return;
        int64_t num_tokens = std::min(num_computed_tokens, request.num_tokens);
        for (size_t i = 0; commits(live) && i < groups_.size(); ++i) {
            if (groups_[i].commit_stop(num_tokens, request.num_prompt_tokens) <= live.tables[i].size()) continue;
            fail(ErrorKind::invalid_request, "%lld tokens cannot be cached: the request has slots for %lld",
                 Long{num_computed_tokens}, Long{num_slots(live)});
        }
        check_hashes(&live, request, request.num_computed_tokens, num_tokens);
        if (live.commit_limit) {
            bool is_done = num_computed_tokens >= live.load_end;
            live.commit_limit =
                is_done ? std::nullopt : std::optional(std::max(*live.commit_limit, num_computed_tokens));
        }
        commit(live, request, num_tokens);
        find_bounds(live);
    }
    // A step left the states after so many tokens, which `allocate` did not know.
    void note_step_end(LiveRequest& live, int64_t num_tokens) {
        if (num_tokens > live.no_op_until) step_ends(live, num_tokens);
    }
    void release(LiveRequest& live, int64_t num_processed_tokens, int64_t num_prompt_tokens) {
        release_dead(live, num_processed_tokens, num_prompt_tokens);
        find_bounds(live);
    }
    // Gives back all that a request holds, tail first; or hands it out. It is forgotten. O(blocks)
    void free(LiveRequest& live, const RequestSnapshot& request) {
        // Dead as seen from the longest hit that the request leaves behind, not from its last token: up to an alignment
        // before it, and the next turn of the session starts there.
        int64_t shareable = num_shareable(request.num_processed_tokens(), request.num_prompt_tokens);
        int64_t longest_hit = std::max<int64_t>(0, shareable - draft_lookahead_) / alignment_ * alignment_;
        std::vector<Range> dead, useful;
        for (const SingleTypeKVCacheManager& group : groups_) {
            dead.push_back(group.kind.dead(longest_hit, request.num_prompt_tokens));
            useful.push_back(group.useful_at(live.branch_point));
        }
        pool_.free_tables(tables_of(live), block_sizes_, dead, useful);
        live_.remove(live.key);
    }
    std::vector<BlockId> pop(LiveRequest& live) {
        std::vector<BlockId> blocks = pool_.pop_tables(tables_of(live), block_sizes_);
        live_.remove(live.key);
        return blocks;
    }
    // The blocks hold garbage: they and all that any holder computed from them leave the index. A live
    // request's `num_computed_tokens` are those after its last call unless the host has said less. Gives each holder and
    // its first token to compute again (0: what it would go on from is gone). O(held blocks)
    std::vector<std::pair<const LiveRequest*, int64_t>> invalidate(std::span<const BlockId> blocks) {
        std::vector<bool> is_bad(static_cast<size_t>(pool_.num_blocks()));
        for (BlockId block : blocks) is_bad[block] = true;
        // Later blocks of a holder are garbage too, and so is what others built on those.
        std::vector<std::pair<const LiveRequest*, int64_t>> first, found;
        do {
            first = std::exchange(found, {});
            live_.for_each([&](const LiveRequest& live) {
                if (int64_t token = first_bad_token(live, is_bad); token < unbounded) found.push_back({&live, token});
            });
            for (const auto& [live, token] : found) {
                for (size_t i = 0; i < groups_.size(); ++i) {
                    if (groups_[i].kind.content == Content::encoder_tokens) continue;  // it depends on no token
                    const Table& table = live->tables[i];
                    for (int64_t at = token / block_sizes_[i]; at < table.size(); ++at) is_bad[table.ids[at]] = true;
                }
            }
        } while (found != first);
        std::vector<BlockId> bad;
        for (BlockId block = 1; block < pool_.num_blocks(); ++block) {
            if (is_bad[block]) bad.push_back(block);
        }
        pool_.evict_blocks(bad);
        for (auto& [holder, token] : first) {
            LiveRequest& live = *live_.find(holder->key);
            // Behind what is computed or being loaded lies nothing yet.
            token = std::min(token, live.commit_limit ? std::max(live.num_computed_tokens, live.load_end)
                                                      : live.num_computed_tokens);
            bool can_resume = true;
            for (size_t i = 0; i < groups_.size(); ++i) {
                can_resume &= groups_[i].can_resume(pool_, live.tables[i], token, live.num_prompt_tokens);
                groups_[i].uncommit(live.tables[i], token);
            }
            live.commit_limit.reset();
            find_bounds(live);
            if (!can_resume) token = 0;
        }
        return first;
    }
    // All hashes leave at once; who holds blocks now commits nothing any more. O(pool)
    void clear_index() {
        pool_.clear_index();
        live_.for_each([&](LiveRequest& live) {
            live.is_stale = true;
            live.no_op_until = -1;  // the next call finds the bounds anew
        });
    }

private:
    // Groups that accept the same hits are looked up together, those that need the whole prefix first: they shorten it.
    struct Lookup {
        const SingleTypeKVCacheManager* group;
        std::vector<GroupId> ids;
    };

    Match match(const HashSource& hashes, int64_t max_tokens, const std::vector<Lookup>& lookups) const {
        Match match{0, std::vector<BlockIds>(groups_.size()), 0};
        if (!options_.can_hit) return match;
        int64_t cap = std::min(max_tokens, hashes.size() * options_.hash_block_size);
        int64_t length = cap / alignment_ * alignment_, shared = 0;
        for (const auto& [group, ids] : lookups) {
            if (!group->kind.needs_whole_prefix) break;
            std::vector<BlockIds> found = pool_.prefix(ids, hashes_of(*group, hashes), cap / group->kind.block_size);
            for (size_t i = 0; i < found.size(); ++i) match.blocks[ids[i]] = std::move(found[i]);
        }
        // Each keeps or shortens the candidate, in turn, until nobody shortens it any more.
        for (size_t turn = 0, agreeing = 0; agreeing < lookups.size(); ++turn) {
            const auto& [group, ids] = lookups[turn % lookups.size()];
            int64_t accepted;
            if (group->kind.needs_whole_prefix) {
                accepted =
                    std::min(length, group->longest_hit(std::ssize(match.blocks[ids[0]]) * group->kind.block_size));
            } else {
                if (shared == 0 && lookups[0].group->kind.needs_whole_prefix) shared = length;
                accepted = longest_run(*group, ids, hashes, std::min(length, group->longest_hit(cap)));
            }
            agreeing = accepted == length ? agreeing + 1 : 1;
            length = accepted;
        }
        for (const auto& [group, ids] : lookups) {
            for (GroupId id : ids) {
                if (group->kind.needs_whole_prefix) {
                    match.blocks[id].resize(length / group->kind.block_size);
                } else {
                    Range needed = group->kind.needed_for_hit(length);
                    match.blocks[id] = pool_.lookup(id, hashes_of(*group, hashes), needed.start, needed.stop);
                }
            }
        }
        match.num_tokens = length;
        if (shared > length) match.branch_point = shared;
        return match;
    }

    std::vector<Lookup> group_lookups() const {
        std::vector<Lookup> lookups;
        for (const SingleTypeKVCacheManager& group : groups_) {
            auto same = std::find_if(lookups.begin(), lookups.end(), [&](const Lookup& lookup) {
                return lookup.group->kind == group.kind &&
                       lookup.group->options.draft_lookahead == group.options.draft_lookahead;
            });
            if (same == lookups.end()) same = lookups.insert(lookups.end(), {&group, {}});
            same->ids.push_back(group.id());
        }
        std::stable_partition(lookups.begin(), lookups.end(),
                              [](const Lookup& lookup) { return lookup.group->kind.needs_whole_prefix; });
        return lookups;
    }
    // The longest aligned hit up to `length` for kinds that need only a tail of the prefix. The rightmost missing block
    // rules out every length that needs it, so no block is looked up twice.
    int64_t longest_run(const SingleTypeKVCacheManager& group, std::span<const GroupId> ids, const HashSource& hashes,
                        int64_t length) const {
        while (length > 0) {
            Range needed = group.needed_for_hit(length);
            int64_t start = pool_.run_start(ids, hashes_of(group, hashes), needed.start, needed.stop);
            if (start <= needed.start) return length;
            length = group.longest_hit((start - 1) * group.kind.block_size);
        }
        return 0;
    }
    GroupHashes hashes_of(const SingleTypeKVCacheManager& group, const HashSource& hashes) const {
        return GroupHashes(hashes, group.options.hashes_per_block);
    }
    bool commits(const LiveRequest& live) const { return options_.can_hit && !live.is_stale; }

    TokenRanges ranges(const RequestSnapshot& request, const Demand& demand) const {
        int64_t local = request.num_computed_tokens + demand.num_hit_tokens;
        int64_t computed = std::min(local + demand.num_external_tokens, options_.max_model_len);
        int64_t main = std::min(computed + demand.num_new_tokens, options_.max_model_len);
        return {.num_local = local,
                .num_computed = computed,
                .num_start = std::min(computed, request.num_tokens - 1),
                .num_main = main,
                .num_slots = std::min(main + demand.num_lookahead_tokens, options_.max_model_len),
                .num_prompt_tokens = request.num_prompt_tokens,
                .num_encoder_tokens = demand.num_encoder_tokens,
                .num_processed = request.num_processed_tokens()};
    }
    void check_progress(const LiveRequest* live, const RequestSnapshot& request) const {
        int64_t least = live == nullptr ? 0 : live->min_computed_tokens, most = live == nullptr ? 0 : num_slots(*live);
        if (request.num_computed_tokens >= least && request.num_computed_tokens <= most) return;
        fail(ErrorKind::invalid_request,
             "num_computed_tokens is %lld, but the request's blocks allow %lld to %lld; a request that was freed "
             "starts over "
             "at 0",
             Long{request.num_computed_tokens}, Long{least}, Long{most});
    }
    // A hit must be whole, still cached, and taken by somebody who holds nothing yet.
    void check_hit(const LiveRequest* live, const RequestSnapshot& request, const Demand& demand,
                   const Hit& hit) const {
        if (hit.blocks.empty()) {
            if (demand.num_hit_tokens == 0) return;
            fail(ErrorKind::invalid_request,
                 "%lld hit tokens came without blocks; pass both answers of get_computed_blocks",
                 Long{demand.num_hit_tokens});
        }
        if (live != nullptr) {
            fail(ErrorKind::invalid_request, "the request holds blocks already; a hit can only be taken at admission");
        }
        for (size_t i = 0; i < groups_.size(); ++i) {
            int64_t num_blocks = std::ssize(*hit.blocks[i]), block_size = block_sizes_[i];
            if (num_blocks * block_size == demand.num_hit_tokens) continue;
            fail(ErrorKind::invalid_request,
                 "group %zu covers %lld blocks x %lld tokens of a hit of %lld tokens; pass both answers of "
                 "get_computed_blocks",
                 i, Long{num_blocks}, Long{block_size}, Long{demand.num_hit_tokens});
        }
        // If no hash has left the index since, one block tells whose hit it is.
        bool is_fresh = hit.index_version == pool_.index_version();
        for (const SingleTypeKVCacheManager& group : groups_) {
            GroupHashes hashes = hashes_of(group, request.hashes);
            if (pool_.serves(*hit.blocks[group.id()], group.id(), hashes, is_fresh)) continue;
            fail(ErrorKind::invalid_request,
                 "the hit was evicted since get_computed_blocks, or is another request's; ask again");
        }
    }
    template <typename Need>
    std::vector<int64_t> for_each_group(const LiveRequest* live, const Hit& hit, Need need) const {
        std::vector<int64_t> needs(groups_.size());
        for (size_t i = 0; i < groups_.size(); ++i) {
            needs[i] = need(groups_[i], live == nullptr ? nullptr : &live->tables[i], hit.of(i));
        }
        return needs;
    }
    // Each step has slots for up to max_num_batched_tokens and the lookahead on top.
    int64_t max_step(int64_t num_lookahead) const { return options_.max_num_batched_tokens + num_lookahead; }

    // The first position of a group that the next commit may look at. What a load did not bring is committed again.
    int64_t first_to_commit(const LiveRequest* live, size_t group, int64_t num_computed_tokens) const {
        int64_t computed = num_computed_tokens / block_sizes_[group];
        if (live == nullptr) return computed;
        int64_t committed = live->tables[group].num_committed;
        return live->commit_limit ? std::min(committed, computed) : committed;
    }
    // What a commit up to `num_tokens` may read must be hashes.
    void check_hashes(const LiveRequest* live, const RequestSnapshot& request, int64_t num_computed,
                      int64_t num_tokens) const {
        for (size_t i = 0; options_.can_hit && i < groups_.size(); ++i) {
            GroupHashes hashes = hashes_of(groups_[i], request.hashes);
            int64_t stop = groups_[i].commit_stop(num_tokens, request.num_prompt_tokens);
            hashes.check(first_to_commit(live, i, num_computed), std::min(stop, hashes.num_positions()));
        }
    }
    FitReport judge(const LiveRequest* live, const RequestSnapshot& request, const Demand& demand, const Hit& hit,
                    const TokenRanges& tokens, int64_t num_releasable) const {
        int64_t lookahead = demand.num_lookahead_tokens;
        if (live == nullptr && !fits_alone(request, lookahead, demand.num_encoder_tokens)) return {.fit = Fit::never};
        for (size_t i = 0; i < groups_.size(); ++i) {
            if (!groups_[i].is_computed(pool_, hit.of(i))) return {.fit = Fit::next_step};
        }
        FitReport report{.fit = Fit::now, .needs = plan(live, hit, tokens)};
        auto sum = [](const std::vector<int64_t>& needs) {
            int64_t total = 0;
            for (int64_t need : needs) total += need;
            return total;
        };
        if (demand.full_sequence_must_fit) {
            TokenRanges whole = tokens;
            whole.num_main = std::min(std::max(request.num_tokens, tokens.num_main), options_.max_model_len);
            whole.num_slots = std::min(whole.num_main + lookahead, options_.max_model_len);
            if (whole.num_main != tokens.num_main || whole.num_slots != tokens.num_slots || has_step_states_) {
                std::vector<int64_t> needs = plan_sequence(live, hit, whole, lookahead);
                if (sum(needs) > sum(report.needs)) report.needs = std::move(needs);
            }
        }
        int64_t to_keep = demand.reserved_blocks;
        if (request.is_waiting && demand.has_scheduled_requests) to_keep += options_.watermark_blocks;
        report.num_needed = sum(report.needs);
        report.num_short = std::max<int64_t>(0, report.num_needed - (pool_.num_free() + num_releasable - to_keep));
        if (report.num_short > 0) report.fit = Fit::not_now;
        return report;
    }
    void release_dead(LiveRequest& live, int64_t num_processed_tokens, int64_t num_prompt_tokens) {
        live.num_prompt_tokens = num_prompt_tokens;
        for (size_t i = 0; i < groups_.size(); ++i) {
            groups_[i].release(pool_, live.tables[i], num_processed_tokens, num_prompt_tokens, live.branch_point);
        }
    }
    void step_ends(LiveRequest& live, int64_t num_tokens) {
        for (size_t i = 0; i < groups_.size(); ++i) groups_[i].step_ends(live.tables[i], num_tokens);
    }
    // A new request takes its hits, of all groups before any block is allocated, so that no allocation evicts a hit.
    LiveRequest& admit(const void* key, const void* name, const Hit& hit, const TokenRanges& tokens) {
        LiveRequest& live = live_.add(std::make_unique<LiveRequest>(key, groups_.size()));
        live.name = name;
        live.num_prompt_tokens = tokens.num_prompt_tokens;
        live.branch_point = hit.branch_point;
        for (size_t i = 0; i < groups_.size(); ++i) groups_[i].adopt(pool_, live.tables[i], hit.of(i), tokens);
        return live;
    }
    // Takes what the plan said; leaves in `lengths_` where each table's new positions begin.
    void apply(LiveRequest& live, const TokenRanges& tokens) {
        lengths_.clear();
        live.num_computed_tokens = tokens.num_main;  // once the step is over
        for (size_t i = 0; tokens.loads() && i < groups_.size(); ++i)
            groups_[i].extend_loaded(pool_, live.tables[i], tokens);
        for (size_t i = 0; i < groups_.size(); ++i) {
            lengths_.push_back(live.tables[i].size());
            groups_[i].extend(pool_, live.tables[i], tokens);
        }
    }
    void commit_step(LiveRequest& live, const RequestSnapshot& request, const Demand& demand,
                     const TokenRanges& tokens) {
        std::optional<int64_t>& limit = live.commit_limit;
        if (!demand.delays_commit && limit && request.num_computed_tokens <= *limit) {
            // What a load did not bring is computed here after all, states included.
            for (size_t i = 0; i < groups_.size(); ++i)
                groups_[i].uncommit(live.tables[i], request.num_computed_tokens);
            limit.reset();
        }
        if (commits(live)) {
            if (tokens.loads()) step_ends(live, tokens.num_computed);
            // Behind unverified drafts lies nobody's state.
            if (demand.num_new_tokens > 0 && tokens.num_main <= request.num_tokens) step_ends(live, tokens.num_main);
        }
        if (demand.delays_commit) {
            limit = limit ? std::min(*limit, tokens.num_local) : tokens.num_local;
            live.load_end = tokens.num_computed;
        } else {
            commit(live, request, std::min(tokens.num_main, request.num_tokens));
        }
    }
    void commit(LiveRequest& live, const RequestSnapshot& request, int64_t num_tokens) {
        if (!commits(live)) return;
        if (live.commit_limit) num_tokens = std::min(num_tokens, *live.commit_limit);
        for (size_t i = 0; i < groups_.size(); ++i) {
            if (!groups_[i].has_to_commit(live.tables[i], num_tokens, request.num_prompt_tokens)) continue;
            runs_.clear();
            groups_[i].commit(pool_, live.tables[i], hashes_of(groups_[i], request.hashes), num_tokens,
                              request.num_prompt_tokens, live.branch_point, runs_);
            for (const Range& run : runs_) stored_.push_back({i, run});
        }
    }
    void find_bounds(LiveRequest& live) const {
        live.min_computed_tokens = 0;
        // While a load is under way, each call may be the one that computes what it did not bring.
        live.no_op_until = live.commit_limit ? -1 : unbounded;
        for (size_t i = 0; i < groups_.size(); ++i) {
            const Table& table = live.tables[i];
            int64_t least = groups_[i].min_computed_tokens(table, live.num_prompt_tokens);
            live.min_computed_tokens = std::max(live.min_computed_tokens, least);
            int64_t until = groups_[i].no_op_until(table, live.num_prompt_tokens, commits(live));
            live.no_op_until = std::min(live.no_op_until, until);
        }
    }
    // What a step touches of each group lies in many places: those of all groups are fetched side by side.
    void prefetch_step(const LiveRequest& live, const RequestSnapshot& request, int64_t num_tokens) const {
        for (const Table& table : live.tables) table.prefetch_ends();
        auto next_released = [&](size_t i) {
            const Table& table = live.tables[i];
            bool may_release = groups_[i].kind.can_die() && table.num_released < table.size();
            return may_release ? table.ids[table.num_released] : null_block;
        };
        for (size_t i = 0; i < groups_.size(); ++i) {
            const Table& table = live.tables[i];
            if (BlockId block = next_released(i); block != null_block) pool_.prefetch_block(block);
            if (!commits(live) || !groups_[i].has_to_commit(table, num_tokens, request.num_prompt_tokens)) continue;
            GroupHashes hashes = hashes_of(groups_[i], request.hashes);
            pool_.prefetch_commit(table.ids, groups_[i].id(), hashes, table.num_committed);
        }
        for (size_t i = 0; i < groups_.size(); ++i) {
            if (BlockId block = next_released(i); block != null_block) pool_.prefetch_eviction(block);
        }
    }
    std::vector<BlockIds*> tables_of(LiveRequest& live) {
        std::vector<BlockIds*> tables;
        for (Table& table : live.tables) tables.push_back(&table.ids);
        return tables;
    }
    int64_t first_bad_token(const LiveRequest& live, const std::vector<bool>& is_bad) const {
        int64_t first = unbounded;
        for (size_t i = 0; i < groups_.size(); ++i) {
            const BlockIds& ids = live.tables[i].ids;
            auto bad = std::find_if(ids.begin(), ids.end(),
                                    [&](BlockId block) { return block != null_block && is_bad[block]; });
            if (bad != ids.end()) first = std::min(first, groups_[i].first_token(bad - ids.begin()));
        }
        return first;
    }

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
