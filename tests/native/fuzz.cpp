// Random bytes as the life of a cache: a configuration, then calls to the coordinator and the pool, most of them sane,
// some with numbers up to 2^40. After each call the invariants of docs/architecture.md are checked; an Error is an answer,
// anything else ends the process. With libFuzzer it finds its own bytes; without, `main` makes them up:
//   core_fuzz --runs 20000 --seed 7     input i of a run is made from seed 7 + i
#include <array>
#include <csignal>
#include <cstdio>
#include <map>
#include <memory>
#include <set>

#include "manager/coordinator.h"
#include "support.h"

namespace kvpager {

namespace {

const char* step_name = "";

[[noreturn]] void broken(const char* what, int64_t found, int64_t wanted) {
    std::fprintf(stderr, "%s, after %s: %lld is not %lld\n", what, step_name, static_cast<long long>(found),
                 static_cast<long long>(wanted));
    std::abort();
}
void require_equal(int64_t found, int64_t wanted, const char* what) {
    if (found != wanted) broken(what, found, wanted);
}
void require(bool holds, const char* what) { require_equal(holds, true, what); }

// The input, number by number; zeros once it is used up.
class Input {
public:
    Input(const uint8_t* bytes, size_t size) : bytes_(bytes, bytes + size) {}
    bool is_empty() const { return at_ == bytes_.size(); }
    int64_t between(int64_t least, int64_t most) { return least + byte() % (most - least + 1); }
    bool percent(int64_t chance) { return byte() % 100 < chance; }
    // Most of them small, some anything that the package lets through.
    int64_t any_count() {
        int64_t small = byte(), bits = byte() % 41;
        return percent(60) ? small : (int64_t{1} << bits) - (small % 3 == 0 && bits > 0);
    }

private:
    uint8_t byte() { return is_empty() ? 0 : bytes_[at_++]; }

    std::vector<uint8_t> bytes_;
    size_t at_ = 0;
};

AttentionKind kind_from(Input& input, int64_t unit) {
    int64_t block_size = unit << input.between(0, 1), num_speculative = input.between(0, 3);
    switch (input.between(0, 9)) {
        case 0: case 1: return full(block_size);
        case 2: case 3: return window(block_size, input.between(1, 12));
        case 4: return chunks(block_size, block_size * input.between(1, 3));
        case 5: return reference_window(block_size, input.between(1, 9));
        case 6: return every_state(block_size, num_speculative);
        case 7: return last_state(block_size, num_speculative);
        case 8: return encoder(block_size);
        default: return step_states(block_size, num_speculative);
    }
}

std::vector<AttentionKind> kinds_from(Input& input) {
    std::vector<AttentionKind> kinds;
    int64_t unit = input.between(1, 4);
    for (int64_t i = input.between(1, 3); i > 0; --i) kinds.push_back(kind_from(input, unit));
    return kinds;
}

bool can_hit(const std::vector<AttentionKind>& kinds) {
    return std::all_of(kinds.begin(), kinds.end(), [](const AttentionKind& kind) {
        return kind.content != Content::encoder_tokens && kind.content != Content::last_state;
    });
}

bool is_eagle(Input& input, const std::vector<AttentionKind>& kinds) {
    bool wanted = input.percent(25);  // chunks and drafts do not go together
    return wanted && std::none_of(kinds.begin(), kinds.end(), [](const AttentionKind& kind) { return kind.lag == 0; });
}

// One request as its host knows it.
struct Request {
    std::vector<Hash> hashes{};
    RequestSnapshot numbers{};
    bool is_odd = false;  // it jumped about while it held blocks, as no host's request does
};

// All that a call may change.
struct Tables {
    std::map<const void*, std::vector<Table>> of{};
    int64_t num_free = 0, num_popped = 0, index_version = 0;
};

bool is_same(const Table& a, const Table& b) {
    return a.ids == b.ids && a.num_committed == b.num_committed && a.num_released == b.num_released &&
           a.is_running == b.is_running && a.step_ends == b.step_ends;
}

class Life {
public:
    explicit Life(Input& input)
        : input_(input),
          kinds_(kinds_from(input)),
          hash_size_(hash_block_size(kinds_)),
          pool_{input.between(2, 60), std::ssize(kinds_),
                input.percent(50) ? EvictionOrder::dead_first : EvictionOrder::recency, true, true},
          coordinator_{pool_,
                       cache_groups(kinds_, is_eagle(input, kinds_)),
                       {.hash_block_size = hash_size_,
                        .max_model_len = input.between(1, 200),
                        .max_num_batched_tokens = input.between(1, 60),
                        .watermark_blocks = input.percent(30) ? input.between(0, 4) : 0,
                        .can_hit = can_hit(kinds_) && !input.percent(10)}} {
        if (input.percent(20) && pool_.num_free() > 2) pool_.reserve(1);
        for (Request& request : requests_) make(request);
    }

    void run() {
        while (!input_.is_empty()) {
            step();
            check();
        }
        step_name = "the end";
        for (Request& request : requests_) {
            if (LiveRequest* live = coordinator_.find(&request)) coordinator_.free(*live, request.numbers);
        }
        pool_.free_blocks(external_);
        external_.clear();
        check();
        require_equal(pool_.num_held(), 0, "blocks held by nobody");
        require_equal(pool_.num_free() + pool_.num_reserved() + 1, pool_.num_blocks(), "free at the end");
    }

private:
    // -- requests

    // Prompts from a small alphabet, alike for a while and then not.
    void make(Request& request) {
        int64_t fork = input_.between(0, 20), symbol = input_.between(0, 2);
        std::vector<int> contents;
        for (int64_t i = 0; i < 200 / hash_size_; ++i) contents.push_back(i < fork ? 0 : static_cast<int>(symbol));
        request.hashes = chained(contents);
        RequestSnapshot numbers;
        numbers.num_prompt_tokens = input_.between(1, 120);
        numbers.num_tokens = numbers.num_prompt_tokens;
        numbers.max_num_tokens = numbers.num_tokens + input_.between(0, 40);
        numbers.is_waiting = true;
        if (input_.percent(5)) numbers.num_prompt_tokens = input_.any_count();
        if (input_.percent(5)) numbers.num_tokens = input_.any_count();
        if (input_.percent(5)) numbers.max_num_tokens = input_.any_count();
        request.numbers = numbers;
        update_hashes(request);
        if (hit_.owner == &request) hit_ = {};
    }

    void update_hashes(Request& request) {
        size_t known = static_cast<size_t>(std::max<int64_t>(0, request.numbers.num_tokens) / hash_size_);
        std::span<const Hash> hashes = request.hashes;
        request.numbers.hashes = {.compact = hashes.first(std::min(known, hashes.size()))};
    }

    Request& some_request() { return requests_[static_cast<size_t>(input_.between(0, std::ssize(requests_) - 1))]; }

    std::vector<BlockId> some_blocks(int64_t least) {
        std::vector<BlockId> blocks;
        for (int64_t i = input_.between(0, 4); i > 0; --i) {
            blocks.push_back(static_cast<BlockId>(input_.between(least, pool_.num_blocks() - 1)));
        }
        return blocks;
    }

    // -- what is compared before and after

    Tables tables() const {
        Tables now{{}, pool_.num_free(), pool_.num_popped(), pool_.index_version()};
        coordinator_.live().for_each([&](const LiveRequest& live) { now.of[live.key] = live.tables; });
        return now;
    }

    void require_unchanged(const Tables& before, const char* what) const { require_equal_tables(tables(), before, what); }

    // A step's end is noted between two aligned lengths, too, where no hit will ever end: a no-op leaves it out.
    void require_no_op(Tables before) const {
        Tables now = tables();
        for (Tables* both : {&before, &now}) {
            for (auto& [key, tables] : both->of) {
                for (Table& table : tables) table.step_ends.clear();
            }
        }
        require_equal_tables(now, before, "a no-op changed something");
    }

    static void require_equal_tables(Tables now, const Tables& before, const char* what) {
        require_equal(now.num_free, before.num_free, what);
        require_equal(now.num_popped, before.num_popped, what);
        require_equal(now.index_version, before.index_version, what);
        require(now.of.size() == before.of.size(), what);
        for (const auto& [key, old] : before.of) {
            require(now.of.contains(key), what);
            for (size_t i = 0; i < old.size(); ++i) require(is_same(now.of[key][i], old[i]), what);
        }
    }

    // Nothing but dead blocks may be gone.
    void require_only_released(const Tables& before) const {
        Tables now = tables();
        require(now.num_free >= before.num_free, "a refusal took blocks");
        require(now.of.size() == before.of.size(), "a refusal made or lost a request");
        for (const auto& [key, old] : before.of) {
            for (size_t i = 0; i < old.size(); ++i) {
                const Table& table = now.of[key][i];
                require_equal(table.size(), old[i].size(), "a refusal changed a table's length");
                require_equal(table.num_committed, old[i].num_committed, "a refusal committed");
                for (size_t position = 0; position < table.ids.size(); ++position) {
                    BlockId block = table.ids[position], was = old[i].ids[position];
                    require(block == was || block == null_block, "a refusal replaced a block");
                }
            }
        }
    }

    // -- the calls

    void step() {
        switch (input_.between(0, 19)) {
            case 0: case 1: case 2: case 3: case 4: case 5: case 6: case 7: return allocate();
            case 8: case 9: return cache_blocks();
            case 10: return release();
            case 11: case 12: return free();
            case 13: return pop();
            case 14: return give_back();
            case 15: return invalidate();
            case 16: return evict();
            case 17: return input_.percent(30) ? clear() : new_step();
            case 18: return hand_out();
            default: return match();
        }
    }

    Demand demand_for(const Request& request, int64_t num_hit_tokens) {
        Demand demand;
        int64_t left = request.numbers.num_tokens - request.numbers.num_computed_tokens - num_hit_tokens;
        demand.num_new_tokens = std::clamp<int64_t>(left, 1, std::max<int64_t>(1, input_.between(1, 40)));
        demand.num_hit_tokens = num_hit_tokens;
        if (input_.percent(20)) demand.num_lookahead_tokens = input_.between(0, 6);
        if (input_.percent(15)) {
            demand.num_external_tokens = input_.between(1, 40);
            demand.delays_commit = input_.percent(50);
        }
        if (input_.percent(40)) demand.num_encoder_tokens = input_.between(0, 30);
        demand.full_sequence_must_fit = input_.percent(30);
        if (input_.percent(10)) demand.reserved_blocks = input_.between(0, 9);
        demand.has_scheduled_requests = input_.percent(70);
        if (input_.percent(6)) demand.num_new_tokens = input_.any_count();
        if (input_.percent(3)) demand.num_external_tokens = input_.any_count();
        if (input_.percent(3)) demand.num_lookahead_tokens = input_.any_count();
        if (input_.percent(3)) demand.num_encoder_tokens = input_.any_count();
        if (input_.percent(3)) demand.reserved_blocks = input_.any_count();
        if (input_.percent(2)) demand.num_hit_tokens = input_.any_count();
        // The bindings let no call through that has nothing to do.
        if (demand.num_new_tokens == 0 && demand.num_external_tokens == 0) demand.num_new_tokens = 1;
        return demand;
    }

    void allocate() {
        step_name = "allocate";
        Request& request = some_request();
        RequestSnapshot& numbers = request.numbers;
        bool is_live = coordinator_.find(&request) != nullptr;
        if (!is_live) {
            request.is_odd = false;
            if (!input_.percent(5)) numbers.num_computed_tokens = 0;
            numbers.num_in_flight_tokens = 0;
        }
        if (input_.percent(10)) numbers.num_in_flight_tokens = input_.percent(80) ? input_.between(0, 8) : input_.any_count();
        if (input_.percent(3)) {
            numbers.num_computed_tokens = input_.any_count() - (input_.percent(20) ? max_count : 0);
            if (input_.percent(50)) numbers.num_prompt_tokens = input_.any_count();
            request.is_odd = true;
        }
        numbers.is_waiting = !is_live;

        Hit hit;
        int64_t num_hit_tokens = 0;
        if (!is_live || input_.percent(3)) {
            if (!input_.percent(15)) look_up(request);  // else what was found before, maybe gone by now
            if (hit_.owner == &request && !hit_.is_empty()) {
                for (const BlockIds& blocks : hit_.match.blocks) hit.blocks.push_back(&blocks);
                hit.index_version = hit_.index_version;
                num_hit_tokens = hit_.match.num_tokens;
            }
            if (hit_.owner == &request) hit.branch_point = hit_.match.branch_point;
        }
        Demand demand = demand_for(request, num_hit_tokens);
        run_allocate(request, demand, hit);
    }

    void run_allocate(Request& request, const Demand& demand, const Hit& hit) {
        RequestSnapshot& numbers = request.numbers;
        Tables before = tables();
        LiveRequest* live = coordinator_.find(&request);
        bool is_plain = demand.num_external_tokens == 0 && demand.num_encoder_tokens == 0 && hit.blocks.empty() &&
                        demand.num_hit_tokens == 0 && !demand.delays_commit && !demand.full_sequence_must_fit;
        bool is_no_op = is_plain && live != nullptr && !request.is_odd &&
                        coordinator_.is_no_op(*live, numbers.num_computed_tokens, demand);
        int64_t num_releasable = 0;
        for (size_t i = 0; live != nullptr && i < kinds_.size(); ++i) {
            num_releasable += coordinator_.groups()[i].num_releasable(pool_, live->tables[i], numbers.num_processed_tokens(),
                                                                      numbers.num_prompt_tokens);
        }
        bool throws = false;
        FitReport report;
        try {
            report = coordinator_.check_fit(&request, numbers, demand, hit);
        } catch (const Error&) {
            throws = true;
        }
        require_unchanged(before, "check_fit changed something");
        Outcome outcome;
        try {
            outcome = coordinator_.allocate(&request, &request, numbers, demand, hit);
        } catch (const Error&) {
            require(throws, "allocate threw, check_fit did not");
            require(!is_no_op, "a no-op threw");
            return require_unchanged(before, "an error changed something");
        }
        require(!throws, "check_fit threw, allocate did not");
        require_equal(outcome == Outcome::allocated, report.fit == Fit::now, "allocate and check_fit");
        if (outcome == Outcome::refused) {
            require(!is_no_op, "a no-op was refused");
            return require_only_released(before);
        }
        live = coordinator_.find(&request);
        require(live != nullptr, "who was admitted is live");
        if (is_no_op) require_no_op(before);
        if (!demand.full_sequence_must_fit) {
            require_equal(pool_.num_free(), before.num_free + num_releasable - report.num_needed, "free, by the plan");
        }
        // The tables serve what was asked for, and what is appended is writable.
        int64_t computed = std::min(numbers.num_computed_tokens + demand.num_hit_tokens + demand.num_external_tokens,
                                    coordinator_.options().max_model_len);
        int64_t goal = std::min(computed + demand.num_new_tokens, coordinator_.options().max_model_len);
        require(coordinator_.num_slots(*live) >= goal, "slots for what was asked for");
        for (size_t i = 0; i < kinds_.size(); ++i) {
            for (BlockId block : coordinator_.appended(*live, i)) {
                if (block != null_block) require_equal(pool_.ref_count(block), 1 + pool_.external_count(block), "appended: its own");
            }
        }
        // As a scheduler goes on: all was computed, and a request that decodes gets one token more.
        if (!demand.delays_commit || input_.percent(20)) numbers.num_computed_tokens = std::min(goal, numbers.num_tokens);
        else numbers.num_computed_tokens = std::min(computed, numbers.num_tokens);
        if (numbers.num_computed_tokens >= numbers.num_tokens && numbers.num_tokens < 190) {
            ++numbers.num_tokens;
            update_hashes(request);
        }
    }

    void cache_blocks() {
        step_name = "cache_blocks";
        Request& request = some_request();
        LiveRequest* live = coordinator_.find(&request);
        if (live == nullptr) return;
        int64_t count = input_.percent(70) ? request.numbers.num_computed_tokens : input_.any_count();
        if (input_.percent(10)) {
            step_name = "note_step_end";
            coordinator_.note_step_end(*live, std::clamp<int64_t>(count, 0, max_count));
            return;
        }
        Tables before = tables();
        try {
            coordinator_.cache_blocks(*live, request.numbers, count);
        } catch (const Error&) {
            require_unchanged(before, "an error changed something");
        }
        require_equal(pool_.num_free(), before.num_free, "caching frees and takes nothing");
    }

    void release() {
        step_name = "release";
        Request& request = some_request();
        LiveRequest* live = coordinator_.find(&request);
        if (live == nullptr) return;
        int64_t processed = request.numbers.num_processed_tokens(), prompt = request.numbers.num_prompt_tokens;
        if (input_.percent(20)) processed = input_.any_count();
        if (input_.percent(5)) prompt = input_.any_count();
        request.is_odd |= processed != request.numbers.num_processed_tokens() || prompt != request.numbers.num_prompt_tokens;
        Tables before = tables();
        coordinator_.release(*live, processed, prompt);
        require_only_released(before);
    }

    void free() {
        step_name = "free";
        Request& request = some_request();
        if (LiveRequest* live = coordinator_.find(&request)) coordinator_.free(*live, request.numbers);
        require(coordinator_.find(&request) == nullptr, "who was freed is forgotten");
        if (input_.percent(50)) make(request);
    }

    void pop() {
        step_name = "pop";
        Request& request = some_request();
        LiveRequest* live = coordinator_.find(&request);
        if (live == nullptr) return;
        std::vector<BlockId> blocks = coordinator_.pop(*live);
        external_.insert(external_.end(), blocks.rbegin(), blocks.rend());
        make(request);
    }

    // Some of what was handed out, or more than that.
    void give_back() {
        step_name = "free_blocks";
        std::vector<BlockId> blocks;
        for (int64_t i = input_.between(0, 20); i > 0 && !external_.empty(); --i) {
            blocks.push_back(external_.front());
            external_.erase(external_.begin());
        }
        std::vector<BlockId> more = input_.percent(10) ? some_blocks(1) : std::vector<BlockId>();
        blocks.insert(blocks.end(), more.begin(), more.end());
        Tables before = tables();
        try {
            pool_.free_blocks(blocks);
            for (BlockId block : more) external_.erase(std::find(external_.begin(), external_.end(), block));
        } catch (const Error&) {
            require(!more.empty(), "what was handed out can be given back");
            require_unchanged(before, "an error changed something");
            external_.insert(external_.end(), blocks.begin(), blocks.end() - std::ssize(more));
        }
    }

    void invalidate() {
        step_name = "invalidate";
        std::vector<BlockId> blocks = some_blocks(0);
        auto holders = coordinator_.invalidate(blocks);
        for (BlockId block : blocks) require(!pool_.is_cached(block), "a block of garbage is found");
        for (auto [live, token] : holders) {
            require(token >= 0, "a token to go on from");
            for (Request& request : requests_) {
                if (&request != live->key) continue;
                if (token > 0 && !request.is_odd) require(token >= live->min_computed_tokens, "who is told to go on can");
                if (token > 0 || live->min_computed_tokens == 0) {
                    request.numbers.num_computed_tokens = std::min(request.numbers.num_computed_tokens, token);
                }
            }
        }
    }

    void evict() {
        step_name = "evict_blocks";
        std::vector<BlockId> blocks = some_blocks(0);
        pool_.evict_blocks(blocks);
        for (BlockId block : blocks) require(!pool_.is_cached(block), "a block that was evicted is found");
    }

    void clear() {
        step_name = "clear_index";
        if (input_.percent(50)) {
            coordinator_.clear_index();
        } else if (!pool_.reset_prefix_cache()) {
            return;
        }
        for (BlockId block = 0; block < pool_.num_blocks(); ++block) require(!pool_.is_cached(block), "cached after all");
    }

    void new_step() {
        step_name = "new_step_starts";
        pool_.new_step_starts();
        pool_.take_new_block_ids();
        IndexChanges changes = pool_.take_changes();
        int64_t told = 0;
        for (const IndexChange& change : changes.changes) told += change.num_hashes;
        require_equal(std::ssize(changes.removed), told, "hashes told");
        pool_.take_history();
    }

    void hand_out() {
        step_name = "allocate or touch";
        std::vector<BlockId> blocks;
        if (input_.percent(50)) {
            blocks = pool_.allocate(std::min(input_.between(0, 5), pool_.num_free()));
        } else {
            blocks = some_blocks(1);
            pool_.touch(blocks);
        }
        external_.insert(external_.end(), blocks.begin(), blocks.end());
    }

    void look_up(Request& request) {
        int64_t most = std::max<int64_t>(0, coordinator_.num_shareable(request.numbers.num_tokens - 1, request.numbers.num_prompt_tokens));
        hit_ = {&request, coordinator_.match(request.numbers.hashes, most), pool_.index_version()};
    }

    // A hit is aligned, whole and served, and no group alone would do with less.
    void match() {
        step_name = "match";
        Request& request = some_request();
        Tables before = tables();
        look_up(request);
        const Match& match = hit_.match;
        int64_t most = std::max<int64_t>(0, request.numbers.num_tokens);
        std::vector<int64_t> alone;
        for (const SingleTypeKVCacheManager& group : coordinator_.groups()) {
            alone.push_back(coordinator_.match_alone(request.numbers.hashes, most, group).num_tokens);
        }
        require_unchanged(before, "a look-up changed something");
        for (size_t i = 0; i < kinds_.size(); ++i) {
            const SingleTypeKVCacheManager& group = coordinator_.groups()[i];
            require_equal(std::ssize(match.blocks[i]) * kinds_[i].block_size, match.num_tokens, "a hit covers the same tokens");
            require_equal(match.num_tokens % group.options.alignment, 0, "a hit is aligned");
            require(alone[i] >= match.num_tokens, "a group alone hits at least as much");
            GroupHashes hashes(request.numbers.hashes, group.options.hashes_per_block);
            require(pool_.serves(match.blocks[i], group.id(), hashes, false), "a hit is served");
            Range needed = kinds_[i].needed_for_hit(match.num_tokens);
            for (int64_t position = needed.start; position < needed.stop; ++position) {
                require(match.blocks[i].at(static_cast<size_t>(position)) != null_block, "a hit has what it reads");
            }
        }
        require(match.branch_point == 0 || match.branch_point > match.num_tokens, "a branch point lies behind the hit");
    }

    // -- the invariants

    void check() const {
        std::vector<int64_t> held(static_cast<size_t>(pool_.num_blocks()));
        coordinator_.live().for_each([&](const LiveRequest& live) {
            for (const Table& table : live.tables) {
                for (BlockId block : table.ids) held.at(static_cast<size_t>(block)) += block != null_block;
            }
        });
        std::set<BlockId> reserved(pool_.reserved().begin(), pool_.reserved().end());
        int64_t num_held = 0, num_popped = 0, num_free = 0, num_cached = 0;
        for (BlockId block = 1; block < pool_.num_blocks(); ++block) {
            int64_t external = pool_.external_count(block), positions = held[static_cast<size_t>(block)];
            require_equal(pool_.ref_count(block), external + positions + reserved.contains(block),
                          "references");
            num_held += positions > 0;
            num_popped += positions == 0 && external > 0 && !reserved.contains(block);
            num_free += pool_.ref_count(block) == 0;
            num_cached += pool_.is_cached(block);
        }
        require_equal(pool_.ref_count(null_block), 0, "references to the null block");
        require_equal(pool_.num_held(), num_held, "held");
        require_equal(pool_.num_popped(), num_popped, "popped");
        require_equal(pool_.num_free(), num_free, "free");

        std::set<BlockId> queue;
        pool_.queue().for_each([&](BlockId block) {
            require(queue.insert(block).second, "a block is in the queue twice");
            require_equal(pool_.ref_count(block), 0, "references to a free block");
        });
        require_equal(std::ssize(queue), num_free, "the queue's length");

        std::set<BlockId> named;
        pool_.index().for_each_hash([&](BlockId oldest) {
            pool_.index().for_each_copy(oldest, [&](BlockId block) {
                require(named.insert(block).second, "a block is in the index twice");
                require(pool_.index().carries(block, pool_.index().digest(oldest), pool_.group_of(oldest)), "a copy's hash");
            });
        });
        require_equal(std::ssize(named), num_cached, "blocks that the index names");
        require(!named.contains(null_block), "the null block is cached");
        check_contents();
    }

    // A cached block in a request's table carries that request's hash of that position.
    void check_contents() const {
        coordinator_.live().for_each([&](const LiveRequest& live) {
            const Request& request = *static_cast<const Request*>(live.key);
            for (size_t i = 0; i < kinds_.size(); ++i) {
                const Table& table = live.tables[i];
                GroupHashes hashes({.compact = request.hashes}, coordinator_.groups()[i].options.hashes_per_block);
                std::set<BlockId> own;
                for (int64_t position = 0; position < table.size(); ++position) {
                    BlockId block = table.ids[static_cast<size_t>(position)];
                    if (block == null_block) continue;
                    require(own.insert(block).second, "a block is in a table twice");
                    if (!pool_.is_cached(block) || position >= hashes.num_positions()) continue;
                    require(pool_.index().carries(block, hashes[position], static_cast<GroupId>(i)), "what a block holds");
                }
            }
        });
    }

    struct Found {
        const Request* owner = nullptr;
        Match match{};
        int64_t index_version = 0;

        bool is_empty() const {
            return std::all_of(match.blocks.begin(), match.blocks.end(), [](const BlockIds& ids) { return ids.empty(); });
        }
    };

    Input& input_;
    std::vector<AttentionKind> kinds_;
    int64_t hash_size_;
    BlockPool pool_;
    KVCacheCoordinator coordinator_;
    std::array<Request, 5> requests_{};
    std::vector<BlockId> external_{};
    Found hit_{};
};

}  // namespace

}  // namespace kvpager

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
    kvpager::Input input(bytes, size);
    kvpager::Life(input).run();
    return 0;
}

#ifndef KVPAGER_LIBFUZZER

namespace {

unsigned long long input_seed = 0;

void say_how_to_repeat() { std::fprintf(stderr, "repeat it: core_fuzz --runs 1 --seed %llu\n", input_seed); }

}  // namespace

// Only where a sanitizer is linked in; it does not abort but exits.
extern "C" [[gnu::weak]] void __sanitizer_set_death_callback(void (*)());

int main(int count, char** arguments) {
    unsigned long long runs = 20000, seed = std::random_device()();
    for (int i = 1; i + 1 < count; i += 2) {
        std::string name = arguments[i];
        unsigned long long value = std::strtoull(arguments[i + 1], nullptr, 10);
        if (name == "--runs") runs = value;
        if (name == "--seed") seed = value;
    }
    std::printf("core_fuzz --runs %llu --seed %llu\n", runs, seed);
    std::fflush(stdout);
    std::signal(SIGABRT, [](int) { say_how_to_repeat(); });
    if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(say_how_to_repeat);
    for (unsigned long long run = 0; run < runs; ++run) {
        input_seed = seed + run;
        kvpager::Random random(input_seed);
        std::vector<uint8_t> bytes(static_cast<size_t>(random.between(50, 1500)));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.between(0, 255));
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    std::printf("%llu inputs, nothing found\n", runs);
}

#endif
