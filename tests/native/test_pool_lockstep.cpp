// The pool beside the naive one: the same random calls to both, and all that can be seen is the same after each.
#include <doctest/doctest.h>

#include <functional>
#include <sstream>

#include "naive_pool.h"
#include "pool/pool.h"
#include "support.h"

namespace kvpager {

namespace {

constexpr int num_groups = 3;
constexpr int64_t block_sizes[] = {2, 2, 4}, strides[] = {1, 1, 2};
constexpr int num_hashes = 80;

struct Prompt {
    std::vector<Hash> hashes;
    naive::Hashes texts;
};

// Prompts that share prefixes, so that several blocks carry one hash.
std::vector<Prompt> make_prompts() {
    std::vector<Prompt> prompts;
    for (int fork : {num_hashes, 4, 4, 40}) {
        std::vector<int> numbers(num_hashes);
        for (int i = fork; i < num_hashes; ++i) numbers[static_cast<size_t>(i)] = 1 + static_cast<int>(prompts.size());
        Prompt prompt{chained(numbers), {}};
        for (const Hash& hash : prompt.hashes) prompt.texts.push_back(digest_text(hash.bytes));
        prompts.push_back(prompt);
    }
    return prompts;
}

const char* name_of(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::out_of_blocks: return "out_of_blocks";
        case ErrorKind::block_state: return "block_state";
        case ErrorKind::invalid_request: return "invalid_request";
        default: return "another error";
    }
}

// All that can be seen of a pool.
struct State {
    std::vector<int64_t> counts{};
    naive::Ids queue{}, refs{}, externals{}, computing{}, reserved{};
    std::map<naive::Key, naive::Ids> index{};
    std::vector<std::optional<naive::Key>> keys{};

    bool operator==(const State&) const = default;
};

State state_of(const BlockPool& pool) {
    State state;
    state.counts = {pool.num_free(), pool.num_popped(), pool.num_held(), pool.num_evictions(), pool.index_version()};
    state.reserved = pool.reserved();
    pool.queue().for_each([&](BlockId block) { state.queue.push_back(block); });
    for (BlockId block = 0; block < pool.num_blocks(); ++block) {
        state.refs.push_back(pool.ref_count(block));
        state.externals.push_back(pool.external_count(block));
        state.computing.push_back(pool.is_computing(block));
        std::optional<naive::Key> key;
        if (pool.is_cached(block)) key = {pool.group_of(block), digest_text(pool.index().digest(block))};
        state.keys.push_back(key);
    }
    pool.index().for_each_hash([&](BlockId oldest) {
        naive::Ids& copies = state.index[{pool.group_of(oldest), digest_text(pool.index().digest(oldest))}];
        pool.index().for_each_copy(oldest, [&](BlockId block) { copies.push_back(block); });
    });
    return state;
}

State state_of(const naive::Pool& pool) {
    State state;
    state.counts = {pool.num_free(), pool.num_popped(), pool.num_held(), pool.num_evictions, pool.index_version};
    state.reserved = pool.reserved;
    state.queue = pool.queue();
    for (const naive::Block& block : pool.blocks) {
        state.refs.push_back(block.refs());
        state.externals.push_back(block.external);
        state.computing.push_back(block.is_computing);
        state.keys.push_back(block.key);
    }
    for (const auto& [key, copies] : pool.index) state.index[key] = naive::Ids(copies.begin(), copies.end());
    return state;
}

std::string text_of(const naive::Ids& ids) {
    std::ostringstream text;
    for (int id : ids) text << id << ' ';
    return text.str();
}

// One pool's life.
class Lockstep {
public:
    Lockstep(Random& random, EvictionOrder order)
        : random_(random),
          num_blocks_(static_cast<int>(random.percent(20) ? random.between(100, 160) : random.between(2, 40))),
          pool_(num_blocks_, num_groups, order, true, true),
          naive_(num_blocks_, order == EvictionOrder::dead_first) {}

    void step() {
        static const std::vector<std::pair<int, void (Lockstep::*)()>> weighted = {
            {10, &Lockstep::hit},         {4, &Lockstep::adopt},       {14, &Lockstep::extend}, {3, &Lockstep::extend_null},
            {3, &Lockstep::move},         {10, &Lockstep::release},    {16, &Lockstep::commit}, {8, &Lockstep::free_tables},
            {3, &Lockstep::pop_tables},   {3, &Lockstep::compute},     {4, &Lockstep::allocate}, {4, &Lockstep::touch},
            {7, &Lockstep::free_blocks},  {3, &Lockstep::evict_blocks}, {1, &Lockstep::clear},  {1, &Lockstep::reserve},
            {8, &Lockstep::look_up},      {6, &Lockstep::count},       {2, &Lockstep::drain}};
        int total = 0;
        for (const auto& [weight, verb] : weighted) total += weight;
        int64_t drawn = random_.between(1, total);
        for (const auto& [weight, verb] : weighted) {
            if (drawn <= weight) {
                (this->*verb)();
                break;
            }
            drawn -= weight;
        }
        compare();
    }

private:
    struct Pair {
        BlockIds real{};
        naive::Ids plain{};
    };

    // The same call to both: equal answers, or refused alike.
    template <typename Real, typename Plain>
    bool both(const char* verb, Real real, Plain plain) {
        verb_ = verb;
        std::string refused, expected;
        std::vector<int64_t> answer, expected_answer;
        try {
            answer = real();
        } catch (const Error& error) {
            refused = name_of(error.kind());
        }
        try {
            expected_answer = plain();
        } catch (const naive::Refused& error) {
            expected = error.why;
        }
        INFO(verb);
        REQUIRE(refused == expected);
        REQUIRE(answer == expected_answer);
        return refused.empty();
    }

    static std::vector<int64_t> numbers(const std::vector<int>& ids) { return {ids.begin(), ids.end()}; }
    static std::vector<int64_t> nothing() { return {}; }

    Pair& table() {
        if (tables_.empty() || (tables_.size() < 6 && random_.percent(20))) tables_.emplace_back();
        return tables_[static_cast<size_t>(random_.between(0, std::ssize(tables_) - 1))];
    }
    // A range of positions within a table; sometimes an empty one.
    Range range_in(int64_t size) {
        int64_t start = random_.between(0, size);
        return {start, random_.between(start, size)};
    }
    int64_t size_of(const Pair& pair) { return std::ssize(pair.real); }
    GroupId group() { return static_cast<GroupId>(random_.between(0, num_groups - 1)); }
    const Prompt& prompt() { return random_.one_of(prompts_); }
    naive::Ids some_ids(int least) {
        naive::Ids ids;
        for (int64_t i = random_.between(0, 4); i > 0; --i) {
            ids.push_back(static_cast<int>(random_.between(least, num_blocks_ - 1)));
        }
        return ids;
    }
    int64_t some_count() {
        if (random_.percent(5)) return random_.one_of(std::vector<int64_t>{-1, num_blocks_, int64_t{1} << 40});
        return std::min(pool_.num_free(), random_.between(0, random_.percent(10) ? 70 : 8));
    }

    // -- the verbs

    void hit() {
        GroupId group = this->group();
        const Prompt& from = prompt();
        int64_t stride = strides[group], stop = random_.between(0, num_hashes / stride);
        Pair found, taken;
        both("prefix",
             [&] {
                 found.real = pool_.prefix(std::vector{group}, group_hashes(from.hashes, stride), stop)[0];
                 return numbers(found.real);
             },
             [&] {
                 found.plain = naive_.prefix({group}, from.texts, stride, stop)[0];
                 return numbers(found.plain);
             });
        if (found.real.empty()) return;
        Range part = range_in(size_of(found));
        both("adopt",
             [&] {
                 pool_.extend_null(taken.real, part.start);
                 pool_.adopt(taken.real, found.real, part.start, part.stop);
                 return nothing();
             },
             [&] {
                 taken.plain.resize(static_cast<size_t>(part.start));
                 naive_.adopt(taken.plain, found.plain, part.start, part.stop);
                 return nothing();
             });
        tables_.push_back(taken);
    }

    void adopt() {
        Pair& from = table();
        Pair taken;
        Range part = range_in(size_of(from));
        both("adopt", [&] { return pool_.adopt(taken.real, from.real, part.start, part.stop), nothing(); },
             [&] { return naive_.adopt(taken.plain, from.plain, part.start, part.stop), nothing(); });
        tables_.push_back(taken);
    }

    void extend() {
        Pair& pair = table();
        int64_t count = some_count();
        bool is_zeroed = random_.percent(50);
        both("extend", [&] { return pool_.extend(pair.real, count, is_zeroed), nothing(); },
             [&] { return naive_.extend(pair.plain, count, is_zeroed), nothing(); });
    }

    void extend_null() {
        Pair& pair = table();
        int64_t count = random_.between(-1, 3);
        pool_.extend_null(pair.real, count);
        pair.plain.insert(pair.plain.end(), static_cast<size_t>(std::max<int64_t>(0, count)), 0);
    }

    void move() {
        Pair& pair = table();
        if (pair.real.empty()) return;
        int64_t source = random_.between(0, size_of(pair) - 1);
        both("move", [&] { return pool_.move(pair.real, source), nothing(); },
             [&] { return naive_.move(pair.plain, source), nothing(); });
    }

    void release() {
        Pair& pair = table();
        Range part = range_in(size_of(pair)), keep = range_in(size_of(pair));
        both("release", [&] { return pool_.release(pair.real, part.start, part.stop, keep), nothing(); },
             [&] { return naive_.release(pair.plain, part.start, part.stop, {keep.start, keep.stop}), nothing(); });
    }

    void commit() {
        Pair& pair = table();
        GroupId group = this->group();
        const Prompt& of = prompt();
        int64_t stride = strides[group];
        Range part = random_.percent(60) ? Range{0, size_of(pair)} : range_in(size_of(pair));
        both("commit",
             [&] {
                 std::vector<Range> runs;
                 pool_.commit(pair.real, group, group_hashes(of.hashes, stride), part.start, part.stop, runs);
                 std::vector<int64_t> flat;
                 for (Range run : runs) flat.insert(flat.end(), {run.start, run.stop});
                 return flat;
             },
             [&] {
                 std::vector<int64_t> flat;
                 for (auto [start, stop] : naive_.commit(pair.plain, group, of.texts, stride, part.start, part.stop)) {
                     flat.insert(flat.end(), {start, stop});
                 }
                 return flat;
             });
    }

    // Some tables, as those of one request.
    std::vector<Pair> draw_tables() {
        std::vector<Pair> drawn;
        for (int64_t i = random_.between(0, 3); i > 0 && !tables_.empty(); --i) {
            size_t at = static_cast<size_t>(random_.between(0, std::ssize(tables_) - 1));
            drawn.push_back(tables_[at]);
            tables_.erase(tables_.begin() + static_cast<std::ptrdiff_t>(at));
        }
        return drawn;
    }

    void free_tables() {
        std::vector<Pair> freed = draw_tables();
        std::vector<BlockIds*> real;
        std::vector<naive::Ids*> plain;
        std::vector<Range> dead, keep;
        std::vector<naive::Positions> plain_dead, plain_keep;
        for (Pair& pair : freed) {
            real.push_back(&pair.real);
            plain.push_back(&pair.plain);
            dead.push_back(range_in(size_of(pair) + 2));
            keep.push_back(range_in(size_of(pair)));
            plain_dead.push_back({dead.back().start, dead.back().stop});
            plain_keep.push_back({keep.back().start, keep.back().stop});
        }
        std::vector<long> sizes(block_sizes, block_sizes + freed.size());
        both("free_tables",
             [&] { return pool_.free_tables(real, std::span(block_sizes, freed.size()), dead, keep), nothing(); },
             [&] { return naive_.free_tables(plain, sizes, plain_dead, plain_keep), nothing(); });
        for (const Pair& pair : freed) REQUIRE((pair.real.empty() && pair.plain.empty()));
    }

    void pop_tables() {
        std::vector<Pair> popped = draw_tables();
        std::vector<BlockIds*> real;
        std::vector<naive::Ids*> plain;
        for (Pair& pair : popped) {
            real.push_back(&pair.real);
            plain.push_back(&pair.plain);
        }
        std::vector<long> sizes(block_sizes, block_sizes + popped.size());
        naive::Ids blocks;
        both("pop_tables",
             [&] { return numbers(blocks = pool_.pop_tables(real, std::span(block_sizes, popped.size()))); },
             [&] { return numbers(naive_.pop_tables(plain, sizes)); });
        external_.insert(external_.end(), blocks.begin(), blocks.end());
    }

    void compute() {
        Pair& pair = table();
        Range part = range_in(size_of(pair) + 2);
        pool_.compute(pair.real, part);
        naive_.compute(pair.plain, part.start, part.stop);
        if (!random_.percent(30)) return;
        pool_.new_step_starts();
        naive_.new_step_starts();
    }

    void allocate() {
        int64_t count = some_count();
        naive::Ids taken;
        both("allocate", [&] { return numbers(taken = pool_.allocate(count)); },
             [&] { return numbers(naive_.allocate(count)); });
        external_.insert(external_.end(), taken.begin(), taken.end());
    }

    void touch() {
        naive::Ids ids = some_ids(1);
        both("touch", [&] { return pool_.touch(ids), nothing(); }, [&] { return naive_.touch(ids), nothing(); });
        external_.insert(external_.end(), ids.begin(), ids.end());
    }

    void free_blocks() {
        naive::Ids ids;
        for (int64_t i = random_.between(0, 8); i > 0 && !external_.empty(); --i) {
            size_t at = static_cast<size_t>(random_.between(0, std::ssize(external_) - 1));
            ids.push_back(external_[at]);
            external_.erase(external_.begin() + static_cast<std::ptrdiff_t>(at));
        }
        naive::Ids wrong = ids;
        for (int block : some_ids(1)) wrong.push_back(block);
        auto free = [&](const naive::Ids& some) {
            return both("free_blocks", [&] { return pool_.free_blocks(some), nothing(); },
                        [&] { return naive_.free_blocks(some), nothing(); });
        };
        if (random_.percent(15) && free(wrong)) {
            for (size_t i = ids.size(); i < wrong.size(); ++i) external_.erase(std::find(external_.begin(), external_.end(), wrong[i]));
        } else {
            free(ids);
        }
    }

    void evict_blocks() {
        naive::Ids ids = some_ids(0);
        both("evict_blocks", [&] { return pool_.evict_blocks(ids), nothing(); },
             [&] { return naive_.evict_blocks(ids), nothing(); });
    }

    void clear() {
        if (random_.percent(50)) {
            both("reset_prefix_cache", [&] { return std::vector<int64_t>{pool_.reset_prefix_cache()}; },
                 [&] { return std::vector<int64_t>{naive_.reset_prefix_cache()}; });
        } else {
            both("clear_index", [&] { return pool_.clear_index(), nothing(); }, [&] { return naive_.clear_index(), nothing(); });
        }
    }

    void reserve() {
        int64_t count = random_.between(0, 1);
        both("reserve", [&] { return numbers(pool_.reserve(count)); }, [&] { return numbers(naive_.reserve(count)); });
    }

    void look_up() {
        std::vector<GroupId> groups;
        naive::Ids plain_groups;
        for (GroupId group = 0; group < num_groups; ++group) {
            if (random_.percent(50)) groups.push_back(group), plain_groups.push_back(group);
        }
        const Prompt& of = prompt();
        Range part = range_in(num_hashes + (random_.percent(5) ? 2 : 0));
        GroupHashes hashes = group_hashes(of.hashes);
        part = {std::min(part.start, hashes.num_positions()), std::min(part.stop, hashes.num_positions())};
        both("prefix",
             [&] {
                 std::vector<int64_t> flat;
                 for (const BlockIds& list : pool_.prefix(groups, hashes, part.stop)) flat.insert(flat.end(), list.begin(), list.end());
                 return flat;
             },
             [&] {
                 std::vector<int64_t> flat;
                 for (const auto& list : naive_.prefix(plain_groups, of.texts, 1, part.stop)) flat.insert(flat.end(), list.begin(), list.end());
                 return flat;
             });
        int64_t start = part.start;
        both("run_start",
             [&] { return std::vector{start = pool_.run_start(groups, hashes, part.start, part.stop)}; },
             [&] { return std::vector<int64_t>{naive_.run_start(plain_groups, of.texts, 1, part.start, part.stop)}; });
        for (GroupId group : groups) {
            both("lookup", [&] { return numbers(pool_.lookup(group, hashes, start, part.stop)); },
                 [&] { return numbers(naive_.lookup(group, of.texts, 1, start, part.stop)); });
        }
    }

    void count() {
        Pair& pair = table();
        const Prompt& of = prompt();
        GroupId group = this->group();
        int64_t start = random_.between(-1, 20), stop = random_.between(-1, 90), holders = random_.between(0, 3);
        both("counts",
             [&] {
                 return std::vector<int64_t>{pool_.count_evictable(pair.real, start, stop),
                                             pool_.count_exclusive(pair.real, start, stop),
                                             pool_.num_shared_by(pair.real, holders)};
             },
             [&] {
                 return std::vector<int64_t>{naive_.count_evictable(pair.plain, start, stop),
                                             naive_.count_exclusive(pair.plain, start, stop),
                                             naive_.num_shared_by(pair.plain, holders)};
             });
        both("serves", [&] { return std::vector<int64_t>{pool_.serves(pair.real, group, group_hashes(of.hashes), false)}; },
             [&] { return std::vector<int64_t>{naive_.serves(pair.plain, group, of.texts, 1)}; });
    }

    // What is told once: blocks to zero, what left the index, what a sampler is to know.
    void drain() {
        verb_ = "drain";
        REQUIRE(pool_.take_new_block_ids() == std::exchange(naive_.fresh, {}));
        IndexChanges changes = pool_.take_changes();
        std::vector<naive::Left> left;
        size_t told = 0;
        for (const IndexChange& change : changes.changes) {
            left.push_back({change.what == IndexChange::cleared ? -1 : change.group, {}});
            for (int64_t i = 0; i < change.num_hashes; ++i) left.back().hashes.push_back(digest_text(changes.removed.at(told++).bytes));
        }
        REQUIRE(told == changes.removed.size());
        REQUIRE((left == std::exchange(naive_.left, {})));
        std::vector<std::pair<char, int>> history;
        REQUIRE(pool_.has_history() == !naive_.history.empty());
        for (const BlockHistory& event : pool_.take_history()) history.push_back({"auer"[event.what], event.block});
        REQUIRE((history == std::exchange(naive_.history, {})));
    }

    void compare() {
        for (const Pair& pair : tables_) REQUIRE(pair.real == pair.plain);
        State real = state_of(pool_), plain = state_of(naive_);
        if (real == plain) return;
        INFO("after ", verb_, "; the queues: ", text_of(real.queue), " and ", text_of(plain.queue));
        INFO("references: ", text_of(real.refs), " and ", text_of(plain.refs));
        REQUIRE(real.counts == plain.counts);
        REQUIRE(real.queue == plain.queue);
        REQUIRE(real.refs == plain.refs);
        REQUIRE(real.externals == plain.externals);
        REQUIRE(real.computing == plain.computing);
        REQUIRE(real.reserved == plain.reserved);
        REQUIRE((real.keys == plain.keys));
        REQUIRE((real.index == plain.index));
    }

    Random& random_;
    int num_blocks_;
    BlockPool pool_;
    naive::Pool naive_;
    std::vector<Prompt> prompts_ = make_prompts();
    std::vector<Pair> tables_{};
    naive::Ids external_{};  // references that were handed out
    const char* verb_ = "";
};

void live(EvictionOrder order) {
    Random random(test_seed());
    for (int life = 0; life < 100; ++life) {
        CAPTURE(life);
        Lockstep lockstep(random, order);
        for (int step = 0; step < 250; ++step) {
            CAPTURE(step);
            lockstep.step();
        }
    }
}

}  // namespace

TEST_CASE("the pool and the naive one agree: dead first") { live(EvictionOrder::dead_first); }
TEST_CASE("the pool and the naive one agree: recency") { live(EvictionOrder::recency); }

}  // namespace kvpager
