// One group: its rules against their definitions, which say token by token who reads what, and its deeds on a table.
#include <doctest/doctest.h>

#include <functional>
#include <set>

#include "groups/group.h"
#include "support.h"

namespace kvpager {

namespace {

// -- the definitions --------------------------------------------------------------------------------

// Whether computing token `reader` reads what is kept of token `read` (of a state layer: the state after it).
using Reads = std::function<bool(int64_t reader, int64_t read, int64_t num_prompt)>;

struct NamedKind {
    const char* name;
    AttentionKind kind;
    Reads reads;
};

std::vector<NamedKind> some_kinds(Random& random) {
    int64_t block = random.between(1, 5), size = random.between(1, 14), chunk = block * random.between(1, 4);
    int64_t speculative = random.between(0, 6);
    auto reads_state = [](int64_t reader, int64_t read, int64_t) { return read >= reader - 1; };
    return {
        {"full", full(block), [](int64_t, int64_t, int64_t) { return true; }},
        {"window", window(block, size), [=](int64_t reader, int64_t read, int64_t) { return read > reader - size; }},
        {"chunks", chunks(block, chunk), [=](int64_t reader, int64_t read, int64_t) { return read / chunk == reader / chunk; }},
        {"reference window", reference_window(block, size),
         [=](int64_t reader, int64_t read, int64_t num_prompt) { return read < num_prompt || read >= reader - size; }},
        {"every state", every_state(block, speculative), reads_state},
        {"step states", step_states(block, speculative), reads_state},
    };
}

// Positions that none of the tokens from `num_computed` on reads.
std::set<int64_t> dead_positions(const NamedKind& named, int64_t num_computed, int64_t num_prompt) {
    std::set<int64_t> dead;
    int64_t block = named.kind.block_size, end = std::max<int64_t>(0, num_computed) + 60;
    for (int64_t position = 0; (position + 1) * block <= num_computed; ++position) {
        bool is_read = false;
        for (int64_t read = position * block; read < (position + 1) * block; ++read) {
            for (int64_t reader = num_computed; reader < end; ++reader) is_read |= named.reads(reader, read, num_prompt);
        }
        if (!is_read) dead.insert(position);
    }
    return dead;
}

std::set<int64_t> all_in(Range range) {
    std::set<int64_t> positions;
    for (int64_t position = range.start; position < range.stop; ++position) positions.insert(position);
    return positions;
}

// Blocks held while a step computes from `start` on, up to `max_step` slots, of `num_slots` in all.
int64_t held_in_step(const NamedKind& named, int64_t start, int64_t max_step, int64_t num_slots, int64_t num_prompt) {
    int64_t positions = ceil_div(std::min(start + max_step, num_slots), named.kind.block_size) + named.kind.num_speculative_states;
    int64_t held = positions;
    for (int64_t position : dead_positions(named, start - named.kind.num_speculative_states, num_prompt)) {
        held -= position < positions;
    }
    return held;
}

// -- deeds on a table -------------------------------------------------------------------------------

struct TestGroup {
    BlockPool pool;
    SingleTypeKVCacheManager group;
    Table table{};

    explicit TestGroup(const AttentionKind& kind, int64_t num_blocks = 200)
        : pool(num_blocks, 1, EvictionOrder::dead_first, false, false), group(plain_group(kind)) {}
    TestGroup(const AttentionKind& kind, const SingleTypeKVCacheManager::Options& options)
        : pool(200, 1, EvictionOrder::dead_first, false, false), group(kind, options) {}

    // A step from `num_computed` to `num_main` tokens of a prompt of 1000.
    void step(int64_t num_computed, int64_t num_main, int64_t num_lookahead = 0) {
        TokenRanges tokens = ranges(num_computed, num_main, num_lookahead);
        group.release(pool, table, num_computed, 1000, 0);
        int64_t need = group.need(pool, &table, {}, tokens), free = pool.num_free();
        group.extend(pool, table, tokens);
        CHECK(pool.num_free() == free - need);
        group.step_ends(table, num_main);
    }
    static TokenRanges ranges(int64_t num_computed, int64_t num_main, int64_t num_lookahead = 0) {
        return {.num_local = num_computed,
                .num_computed = num_computed,
                .num_start = num_computed,
                .num_main = num_main,
                .num_slots = num_main + num_lookahead,
                .num_prompt_tokens = 1000,
                .num_processed = num_computed};
    }
    std::vector<Range> commit(int64_t num_tokens, int64_t branch_point = 0, int64_t num_prompt = 1000) {
        std::vector<Range> runs;
        group.commit(pool, table, group_hashes(hashes), num_tokens, num_prompt, branch_point, runs);
        return runs;
    }
    std::set<int64_t> cached() const {
        std::set<int64_t> positions;
        for (int64_t position = 0; position < table.size(); ++position) {
            if (pool.is_cached(table.ids[static_cast<size_t>(position)])) positions.insert(position);
        }
        return positions;
    }

    std::vector<Hash> hashes = chained(std::vector<int>(200));
};

std::vector<int64_t> null_pattern(const BlockIds& ids) {
    std::vector<int64_t> pattern;
    for (BlockId block : ids) pattern.push_back(block != null_block);
    return pattern;
}

}  // namespace

// -- rules ----------------------------------------------------------------------------------------

TEST_CASE("dead is what no later token reads") {
    Random random(test_seed());
    for (int turn = 0; turn < 60; ++turn) {
        for (const NamedKind& named : some_kinds(random)) {
            int64_t prompt = random.between(0, 30);
            for (int64_t computed = prompt; computed <= prompt + 40; ++computed) {
                INFO(named.name, " of block size ", named.kind.block_size, ", prompt ", prompt, ", computed ", computed);
                REQUIRE(all_in(named.kind.dead(computed, prompt)) == dead_positions(named, computed, prompt));
            }
        }
    }
}

TEST_CASE("while a prompt is computed only those die that not even the rest of it reads") {
    CHECK(window(4, 5).dead(12, 100).stop == 2);
    CHECK(window(4, 5).dead(11, 100).stop == 1);
    CHECK(reference_window(4, 5).dead(50, 100).size() == 0);
    CHECK(reference_window(4, 5).dead(117, 102).start == 26);  // the block in which the prompt ends stays
    CHECK(reference_window(4, 5).dead(117, 102).stop == 28);
    CHECK(chunks(4, 8).dead(15, 100).stop == 2);
    CHECK(chunks(4, 8).dead(16, 100).stop == 4);
    CHECK(every_state(4).dead(8, 100).stop == 1);  // the state after 8 tokens is the one to go on from
    CHECK(full(4).dead(100, 100).size() == 0);
    CHECK(window(4, 5).dead(-3, 100).size() == 0);
}

TEST_CASE("releasing trails by the tokens that may be rolled back") {
    AttentionKind kind = every_state(4, 3);
    CHECK(kind.releasable(8, 100).stop == 1);
    CHECK(kind.releasable(7, 100).stop == 0);
    CHECK(kind.releasable(12, 100).stop == kind.dead(9, 100).stop);
}

TEST_CASE("a hit needs what is not dead where it ends") {
    Random random(test_seed());
    for (int turn = 0; turn < 60; ++turn) {
        for (const NamedKind& named : some_kinds(random)) {
            for (int64_t blocks = 0; blocks < 12; ++blocks) {
                int64_t length = blocks * named.kind.block_size;
                std::set<int64_t> needed = all_in({0, blocks});
                for (int64_t position : dead_positions(named, length, length)) needed.erase(position);
                INFO(named.name, " of block size ", named.kind.block_size, ", a hit of ", length);
                REQUIRE(all_in(named.kind.needed_for_hit(length)) == needed);
            }
        }
    }
}

TEST_CASE("a draft's lookahead is needed too, and no hit may end in it") {
    AttentionKind kind = window(4, 8);
    SingleTypeKVCacheManager::Options options = plain_options(kind);
    options.draft_lookahead = 4;
    SingleTypeKVCacheManager group(kind, options);
    CHECK((group.needed_for_hit(16).start == 2 && group.needed_for_hit(16).stop == 5));
    CHECK(group.longest_hit(20) == 16);
    CHECK(group.longest_hit(19) == 12);
    CHECK(group.longest_hit(3) == 0);
    CHECK(group.useful_at(0).size() == 0);
    CHECK(group.useful_at(16).start == 2);
}

TEST_CASE("most_held is the most that any step holds") {
    Random random(test_seed());
    for (int turn = 0; turn < 150; ++turn) {
        for (const NamedKind& named : some_kinds(random)) {
            if (named.kind.keeps_step_states()) continue;
            int64_t slots = random.between(1, 60), step = random.between(1, 25), prompt = random.between(0, slots);
            if (random.percent(50)) prompt = slots;
            int64_t most = 0;
            for (int64_t start = 0; start < slots; ++start) {
                most = std::max(most, held_in_step(named, start, step, slots, prompt));
            }
            INFO(named.name, " of block size ", named.kind.block_size, ", lag ", named.kind.lag, ", span ", named.kind.span,
                 ", speculative ", named.kind.num_speculative_states, ": ", slots, " slots in steps of ", step, ", prompt ", prompt);
            REQUIRE(named.kind.most_held(slots, step, prompt, 0) == most);
        }
    }
}

TEST_CASE("of step states at most the last two are held, and those that a rollback reaches") {
    CHECK(step_states(4, 0).most_held(100, 8, 100, 0) == 2);
    CHECK(step_states(4, 0).most_held(3, 8, 3, 0) == 1);
    CHECK(step_states(4, 3).most_held(100, 8, 100, 0) == 3 + 3);
    CHECK(last_state(4, 2).most_held(100, 8, 100, 0) == 3);
    CHECK(encoder(4).most_held(100, 8, 100, 9) == 3);
}

TEST_CASE("the counts to check hold the most of a range") {
    Random random(test_seed());
    for (int turn = 0; turn < 150; ++turn) {
        for (const NamedKind& named : some_kinds(random)) {
            int64_t first = random.between(0, 30), last = first + random.between(0, 40), prompt = random.between(0, 70);
            auto held = [&](int64_t start) {
                std::set<int64_t> dead = dead_positions(named, start - named.kind.num_speculative_states, prompt);
                return ceil_div(start + 1000, named.kind.block_size) - std::ssize(dead);
            };
            // Among the counts whose step ends as far from the last one's as they start from it.
            int64_t most = 0, visited = 0, calls = 0;
            for (int64_t start = first; start <= last; ++start) most = std::max(most, held(start));
            named.kind.step_starts_to_check(first, last, prompt, [&](int64_t start) {
                REQUIRE((first <= start && start <= last));
                visited = std::max(visited, held(start));
                ++calls;
            });
            INFO(named.name, " of block size ", named.kind.block_size, ", lag ", named.kind.lag, ", span ", named.kind.span,
                 ", from ", first, " to ", last, ", prompt ", prompt);
            REQUIRE(calls <= 2);
            REQUIRE(visited == most);
        }
    }
}

TEST_CASE("slots and positions undo each other") {
    Random random(test_seed());
    for (const NamedKind& named : some_kinds(random)) {
        for (int64_t slots = 0; slots < 50; ++slots) {
            int64_t positions = named.kind.num_positions(slots, 0);
            REQUIRE(named.kind.num_slots(positions) >= slots);
            REQUIRE(named.kind.num_slots(positions) < slots + named.kind.block_size);
        }
    }
    CHECK(encoder(4).num_positions(1000, 9) == 3);
    CHECK(last_state(4, 2).num_positions(1000, 0) == 3);
    CHECK(last_state(4, 2).num_slots(3) == unbounded);
}

TEST_CASE("numbers that describe no kind or no group are refused") {
    AttentionKind bad[] = {full(0), full(-1), window(4, 0), chunks(4, 6), every_state(4, -1), full(max_count + 1)};
    for (const AttentionKind& kind : bad) CHECK_THROWS_AS(kind.check(), Error);
    full(max_count).check();
    SingleTypeKVCacheManager::Options options = plain_options(full(4));
    options.alignment = 6;
    CHECK_THROWS_AS(SingleTypeKVCacheManager(full(4), options), Error);
    options = plain_options(full(4));
    options.hashes_per_block = 0;
    CHECK_THROWS_AS(SingleTypeKVCacheManager(full(4), options), Error);
    options = plain_options(full(4));
    options.interval = -1;
    CHECK_THROWS_AS(SingleTypeKVCacheManager(full(4), options), Error);
}

// -- growth ---------------------------------------------------------------------------------------

TEST_CASE("tokens get a block each block_size, lookahead included") {
    TestGroup test(full(4));
    test.step(0, 5, 3);
    CHECK(test.table.ids == BlockIds{1, 2});
    test.step(5, 8);
    CHECK(test.table.size() == 2);
    test.step(8, 9);
    CHECK(test.table.ids == BlockIds{1, 2, 3});
}

TEST_CASE("a window that starts late has nulls where nobody reads any more") {
    TestGroup test(window(4, 5));
    TokenRanges tokens = TestGroup::ranges(18, 22);  // say, a load brought the tokens before
    CHECK(test.group.need(test.pool, nullptr, {}, tokens) == 3);
    test.group.extend(test.pool, test.table, tokens);
    CHECK(null_pattern(test.table.ids) == std::vector<int64_t>{0, 0, 0, 1, 1, 1});
}

TEST_CASE("step states: memory for the running state only, and speculative ones move along") {
    TestGroup plain(step_states(4));
    plain.step(0, 12);
    CHECK(null_pattern(plain.table.ids) == std::vector<int64_t>{0, 0, 1});
    plain.step(12, 16);
    CHECK(null_pattern(plain.table.ids) == std::vector<int64_t>{0, 0, 1, 1});
    plain.step(16, 24);
    CHECK(null_pattern(plain.table.ids) == std::vector<int64_t>{0, 0, 0, 1, 0, 1});

    TestGroup drafts(step_states(4, 2));
    drafts.step(0, 4);
    CHECK(drafts.table.ids == BlockIds{1, 2, 3});
    drafts.step(4, 5);  // the first speculative block is the running state's now
    CHECK(drafts.table.ids == BlockIds{1, 2, 3, 4});
    drafts.step(5, 20);  // both move to the end
    CHECK(drafts.table.ids == BlockIds{1, 2, 0, 0, 3, 4, 5});
}

TEST_CASE("step states always have the running state and the speculative ones, each its own block") {
    Random random(test_seed());
    for (int life = 0; life < 200; ++life) {
        int64_t block = random.between(1, 6), speculative = random.between(0, 4), computed = 0;
        TestGroup test(step_states(block, speculative));
        while (computed < 150) {
            int64_t main = computed + random.between(1, random.percent(30) ? 40 : 3);
            test.step(computed, main);
            computed = main;
            int64_t positions = ceil_div(main, block) + speculative;
            REQUIRE(test.table.size() == positions);
            std::set<BlockId> own;
            for (int64_t position = positions - speculative - 1; position < positions; ++position) {
                own.insert(test.table.ids.at(static_cast<size_t>(position)));
            }
            REQUIRE(std::ssize(own) == speculative + 1);
            REQUIRE(!own.contains(null_block));
            REQUIRE(test.pool.num_held() <= test.group.most_held(TestGroup::ranges(0, 1000), 1000));
        }
    }
}

TEST_CASE("a group holds at most what most_held said, and releases what is dead") {
    Random random(test_seed());
    for (int life = 0; life < 100; ++life) {
        for (const NamedKind& named : some_kinds(random)) {
            TestGroup test(named.kind);
            int64_t computed = 0, max_step = random.between(1, 20);
            int64_t most = named.kind.most_held(100, max_step, 1000, 0);
            while (computed < 100) {
                int64_t main = std::min<int64_t>(100, computed + random.between(1, max_step));
                test.step(computed, main);
                INFO(named.name, " of block size ", named.kind.block_size, " at ", main);
                REQUIRE(test.pool.num_held() <= most);
                for (int64_t position : all_in(named.kind.releasable(computed, 1000))) {
                    if (position < test.table.size()) REQUIRE(test.table.ids[static_cast<size_t>(position)] == null_block);
                }
                computed = main;
            }
        }
    }
}

TEST_CASE("a hit is adopted but for what is dead where the request goes on") {
    TestGroup test(window(2, 5));
    BlockIds hits;
    test.pool.extend(hits, 6, false);
    test.group.adopt(test.pool, test.table, hits, TestGroup::ranges(12, 14));
    CHECK(test.table.ids == BlockIds{0, 0, 0, 0, 5, 6});
    CHECK((test.table.num_committed == 6 && test.table.num_released == 4));
    CHECK((test.pool.ref_count(4) == 1 && test.pool.ref_count(5) == 2));
}

// -- the index ------------------------------------------------------------------------------------

TEST_CASE("whole blocks are committed as soon as they are full, each once") {
    TestGroup test(full(4));
    test.step(0, 20);
    CHECK(test.commit(11).size() == 1);
    CHECK(test.cached() == std::set<int64_t>{0, 1});
    CHECK(test.commit(11).empty());
    CHECK(test.commit(20)[0].start == 2);
    CHECK(test.cached().size() == 5);
}

TEST_CASE("only aligned lengths are committed, plus what drafts look ahead") {
    SingleTypeKVCacheManager::Options options = plain_options(full(4));
    options.alignment = 8;
    TestGroup aligned(full(4), options);
    aligned.step(0, 40);
    aligned.commit(15);
    CHECK(aligned.cached() == std::set<int64_t>{0, 1});
    options.commit_lookahead = 4;
    TestGroup drafts(full(4), options);
    drafts.step(0, 40);
    drafts.commit(7);
    CHECK(drafts.cached().empty());
    drafts.commit(12);
    CHECK(drafts.cached() == std::set<int64_t>{0, 1, 2});
    drafts.commit(15);
    CHECK(drafts.cached().size() == 3);
}

TEST_CASE("decoded tokens that depend on where the prompt ended are not shared") {
    SingleTypeKVCacheManager::Options options = plain_options(reference_window(2, 3));
    options.shareable_decoded = 4;
    TestGroup test(reference_window(2, 3), options);
    test.step(0, 30);
    test.commit(30, 0, 10);
    CHECK(test.cached() == all_in({0, 7}));
}

TEST_CASE("of step states only those are committed that a step left") {
    TestGroup test(step_states(4));
    test.step(0, 8);
    CHECK(test.commit(8)[0].start == 1);
    test.step(8, 14);
    CHECK(test.commit(14).empty());
    test.step(14, 16);
    CHECK(test.commit(16)[0].start == 3);
    CHECK(test.cached() == std::set<int64_t>{3});
    CHECK(test.pool.is_computing(test.table.ids[3]));
    CHECK_FALSE(test.group.is_computed(test.pool, test.table.ids));
    test.pool.new_step_starts();
    CHECK(test.group.is_computed(test.pool, test.table.ids));
}

TEST_CASE("with an interval only what a hit worth caching for needs is committed") {
    Random random(test_seed());
    for (int life = 0; life < 400; ++life) {
        int64_t block = random.between(1, 4), alignment = block * random.between(1, 4);
        AttentionKind kind = random.percent(70) ? window(block, random.between(1, 12)) : every_state(block);
        SingleTypeKVCacheManager::Options options = plain_options(kind);
        options.alignment = alignment;
        options.interval = random.percent(20) ? 0 : alignment * random.between(1, 5);
        if (random.percent(30)) options.draft_lookahead = options.commit_lookahead = block;
        TestGroup test(kind, options);
        int64_t prompt = random.between(1, 90), branch = alignment * random.between(0, 10);
        TokenRanges tokens = TestGroup::ranges(0, 120);
        test.group.extend(test.pool, test.table, tokens);

        std::set<int64_t> lengths{branch};
        if (*options.interval != alignment) lengths.insert((prompt - 1) / alignment * alignment);
        for (int64_t length = *options.interval; *options.interval > 0 && length < 300; length += *options.interval) lengths.insert(length);
        std::set<int64_t> worth;
        for (int64_t length : lengths) {
            for (int64_t position : all_in(test.group.needed_for_hit(length))) {
                if (length > 0 && position < test.group.commit_stop(120, prompt)) worth.insert(position);
            }
        }
        for (int64_t done = 0; done < 120;) {
            done = std::min<int64_t>(120, done + random.between(1, 60));
            test.commit(done, branch, prompt);
        }
        INFO("block ", block, ", lag ", kind.lag, ", alignment ", alignment, ", interval ", *options.interval, ", draft ",
             options.draft_lookahead, ", prompt ", prompt, ", branch ", branch);
        REQUIRE(test.cached() == worth);
    }
}

// -- bounds and failed loads ------------------------------------------------------------------------

TEST_CASE("a request can go on from where its first released block is not missed") {
    TestGroup test(window(4, 5));
    test.step(0, 30);
    test.step(20, 30);  // positions 0 to 3 are gone
    CHECK(test.table.num_released == 4);
    CHECK(test.group.min_computed_tokens(test.table, 1000) == 20);
    CHECK(plain_group(full(4)).min_computed_tokens(test.table, 1000) == 0);
}

TEST_CASE("up to no_op_until nothing is taken, released or committed") {
    Random random(test_seed());
    for (int life = 0; life < 300; ++life) {
        for (const NamedKind& named : some_kinds(random)) {
            TestGroup test(named.kind);
            int64_t computed = random.between(0, 40), main = computed + random.between(1, 10), prompt = 1000;
            test.step(0, std::max<int64_t>(1, computed));
            test.commit(computed);
            test.step(computed, main);
            test.commit(main);
            int64_t until = test.group.no_op_until(test.table, prompt, true);
            Table before = test.table;
            int64_t free = test.pool.num_free();
            for (int64_t count = main; count < until; ++count) {
                test.step(count, count + 1);
                test.commit(count + 1);
            }
            INFO(named.name, " of block size ", named.kind.block_size, ", from ", main, " until ", until);
            REQUIRE(test.table.ids == before.ids);
            REQUIRE(test.table.num_committed == before.num_committed);
            REQUIRE(test.pool.num_free() == free);
            // And one token further something does happen, or the bound would be too low.
            if (main <= until && until < unbounded) {
                test.step(until, until + 1);
                test.commit(until + 1);
                bool is_same = test.table.ids == before.ids && test.table.num_committed == before.num_committed &&
                               test.table.num_released == before.num_released;
                if (named.kind.num_speculative_states == 0 && !named.kind.keeps_step_states()) CHECK_FALSE(is_same);
            }
        }
    }
}

TEST_CASE("who lost what it would go on from cannot resume") {
    TestGroup full_group(full(4));
    full_group.step(0, 12);
    CHECK(full_group.group.can_resume(full_group.pool, full_group.table, 5, 1000));

    TestGroup windowed(window(4, 5));
    windowed.step(0, 30);
    windowed.step(20, 30);
    CHECK(windowed.group.can_resume(windowed.pool, windowed.table, 20, 1000));
    CHECK_FALSE(windowed.group.can_resume(windowed.pool, windowed.table, 19, 1000));
    CHECK_FALSE(windowed.group.can_resume(windowed.pool, windowed.table, 0, 1000));

    TestGroup one_state(last_state(4));
    one_state.step(0, 9);
    CHECK(one_state.group.can_resume(one_state.pool, one_state.table, 0, 1000));
    CHECK_FALSE(one_state.group.can_resume(one_state.pool, one_state.table, 8, 1000));

    TestGroup states(step_states(4));
    states.step(0, 4);
    states.commit(4);
    states.step(4, 8);
    CHECK(states.group.can_resume(states.pool, states.table, 4, 1000));
    CHECK_FALSE(states.group.can_resume(states.pool, states.table, 5, 1000));
    CHECK_FALSE(states.group.can_resume(states.pool, states.table, 8, 1000));  // not committed: whose state it is, nobody knows
}

TEST_CASE("what is uncommitted is offered again") {
    TestGroup test(full(4));
    test.step(0, 16);
    test.commit(16);
    test.pool.evict_blocks(std::vector<BlockId>{3, 4});
    test.group.uncommit(test.table, 9);
    CHECK(test.table.num_committed == 2);
    CHECK(test.commit(16)[0].start == 2);
    CHECK(test.cached().size() == 4);
}

}  // namespace kvpager
