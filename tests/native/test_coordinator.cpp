// The coordinator by small examples: one request's way through all groups.
#include <doctest/doctest.h>

#include "manager/coordinator.h"
#include "support.h"

namespace kvpager {

namespace {

// A request as a host knows it; its address is its key.
struct Request {
    std::vector<Hash> hashes{};
    RequestSnapshot numbers{};

    // A prompt of so many tokens, hashed in blocks of `block_size` with these contents.
    Request(const std::vector<int>& contents, int64_t block_size, int64_t num_tokens) : hashes(chained(contents)) {
        numbers.num_prompt_tokens = numbers.num_tokens = numbers.max_num_tokens = num_tokens;
        size_t num_full = static_cast<size_t>(num_tokens / block_size);
        numbers.hashes = {.compact = std::span(hashes).first(std::min(num_full, hashes.size()))};
    }
    Request(const Request&) = delete;
};

// All that may be seen to change.
struct Snapshot {
    int64_t num_free, num_popped, index_version, num_live;
    std::vector<BlockIds> tables{};
    std::vector<int64_t> committed{};

    bool operator==(const Snapshot&) const = default;
};

struct Cache {
    BlockPool pool;
    KVCacheCoordinator coordinator;
    int64_t block_size;

    Cache(const std::vector<AttentionKind>& kinds, int64_t num_blocks, int64_t watermark = 0, int64_t max_step = 64)
        : pool(num_blocks, std::ssize(kinds), EvictionOrder::dead_first, true, true),
          coordinator(pool, cache_groups(kinds),
                      {.hash_block_size = hash_block_size(kinds),
                       .max_model_len = 1000,
                       .max_num_batched_tokens = max_step,
                       .watermark_blocks = watermark,
                       .can_hit = true}),
          block_size(hash_block_size(kinds)) {}

    LiveRequest& live(const Request& request) {
        LiveRequest* found = coordinator.find(&request);
        REQUIRE(found != nullptr);
        return *found;
    }
    const BlockIds& table(const Request& request, size_t group = 0) { return live(request).tables[group].ids; }

    Outcome allocate(const Request& request, const Demand& demand, const Hit& hit = {}) {
        return coordinator.allocate(&request, &request, request.numbers, demand, hit);
    }
    // A step that computes so many tokens; the request moves on.
    Outcome step(Request& request, int64_t num_new_tokens) {
        Outcome outcome = allocate(request, {.num_new_tokens = num_new_tokens});
        if (outcome != Outcome::refused) request.numbers.num_computed_tokens += num_new_tokens;
        return outcome;
    }
    // An admission with whatever is cached of it, then the rest of the prompt in one step. Gives the hit.
    int64_t admit(Request& request) {
        Match match = find(request);
        int64_t rest = request.numbers.num_tokens - match.num_tokens;
        Demand demand{.num_new_tokens = rest, .num_hit_tokens = match.num_tokens};
        REQUIRE(allocate(request, demand, hit_of(match)) == Outcome::allocated);
        request.numbers.num_computed_tokens = request.numbers.num_tokens;
        return match.num_tokens;
    }
    Match find(const Request& request) const {
        return coordinator.match(request.numbers.hashes, request.numbers.num_tokens - 1);
    }
    Hit hit_of(const Match& match) const {
        Hit hit{.index_version = pool.index_version(), .branch_point = match.branch_point};
        if (match.num_tokens == 0) return hit;
        for (const BlockIds& blocks : match.blocks) hit.blocks.push_back(&blocks);
        return hit;
    }
    void free(Request& request) {
        coordinator.free(live(request), request.numbers);
        request.numbers.num_computed_tokens = 0;
    }
    Snapshot snapshot() const {
        Snapshot now{pool.num_free(), pool.num_popped(), pool.index_version(), coordinator.live().size()};
        coordinator.live().for_each([&](const LiveRequest& live) {
            for (const Table& table : live.tables) {
                now.tables.push_back(table.ids);
                now.committed.push_back(table.num_committed);
            }
        });
        return now;
    }
    ErrorKind refusal(auto call) {
        Snapshot before = snapshot();
        try {
            call();
        } catch (const Error& error) {
            CHECK(snapshot() == before);
            return error.kind();
        }
        FAIL("nothing was refused");
        return {};
    }
};

const std::vector<int> prompt_a = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
const std::vector<int> prompt_b = {1, 2, 3, 4, 99, 98, 97, 96, 95, 94};

}  // namespace

// -- admission ------------------------------------------------------------------------------------

TEST_CASE("a first request gets blocks for its prompt, and its full ones are cached") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 10);
    CHECK(cache.admit(request) == 0);
    CHECK(cache.table(request) == BlockIds{1, 2, 3});
    REQUIRE(cache.coordinator.stored().size() == 1);
    CHECK(cache.coordinator.stored()[0].positions.stop == 2);
    CHECK(cache.coordinator.appended(cache.live(request), 0).size() == 3);
    CHECK(cache.pool.num_free() == 16);
}

TEST_CASE("a second one shares what the first has computed") {
    Cache cache({full(4)}, 20);
    Request first(prompt_a, 4, 18), second(prompt_b, 4, 22);
    cache.admit(first);
    CHECK(cache.admit(second) == 16);
    CHECK(cache.table(second) == BlockIds{1, 2, 3, 4, 6, 7});
    CHECK(cache.pool.ref_count(4) == 2);
    CHECK(cache.pool.num_held() == 7);
    cache.free(first);
    cache.free(second);
    CHECK(cache.pool.num_free() == 19);
}

TEST_CASE("the last token is always computed") {
    Cache cache({full(4)}, 20);
    Request first(prompt_a, 4, 16), again(prompt_a, 4, 16);
    cache.admit(first);
    CHECK(cache.find(again).num_tokens == 12);
}

TEST_CASE("a hit is still there after its request has gone, until somebody needs the memory") {
    Cache cache({full(4)}, 6);
    Request first(prompt_a, 4, 12), other({50, 51, 52, 53}, 4, 16), again(prompt_a, 4, 13);
    cache.admit(first);
    cache.free(first);
    CHECK(cache.find(again).num_tokens == 12);
    cache.admit(other);  // 4 of 5 blocks: it evicts the tail
    CHECK(cache.find(again).num_tokens == 4);
    CHECK(cache.pool.num_evictions() == 2);
}

TEST_CASE("a hit found before an eviction is looked at again, and refused if it is gone") {
    Cache cache({full(4)}, 6);
    Request first(prompt_a, 4, 9), late(prompt_a, 4, 9);
    cache.admit(first);
    cache.free(first);
    Match match = cache.find(late);
    Hit hit = cache.hit_of(match);
    Demand demand{.num_new_tokens = 1, .num_hit_tokens = 8};
    cache.pool.evict_blocks(std::vector<BlockId>{match.blocks[0][1]});
    CHECK(cache.refusal([&] { cache.allocate(late, demand, hit); }) == ErrorKind::invalid_request);
    CHECK(cache.refusal([&] { cache.coordinator.check_fit(&late, late.numbers, demand, hit); }) == ErrorKind::invalid_request);
}

TEST_CASE("a hit that some other eviction did not touch is taken all the same") {
    Cache cache({full(4)}, 8);
    Request first(prompt_a, 4, 9), other({50}, 4, 5), late(prompt_a, 4, 9);
    cache.admit(first);
    cache.admit(other);
    Match match = cache.find(late);
    Hit hit = cache.hit_of(match);
    cache.pool.evict_blocks(std::vector<BlockId>{cache.table(other)[0]});
    CHECK(cache.allocate(late, {.num_new_tokens = 1, .num_hit_tokens = 8}, hit) == Outcome::allocated);
}

TEST_CASE("a hit without blocks, of another length or for somebody live is refused") {
    Cache cache({full(4)}, 20);
    Request first(prompt_a, 4, 10), late(prompt_a, 4, 10);
    cache.admit(first);
    Match match = cache.find(late);
    Hit hit = cache.hit_of(match);
    CHECK(cache.refusal([&] { cache.allocate(late, {.num_new_tokens = 1, .num_hit_tokens = 8}); }) == ErrorKind::invalid_request);
    CHECK(cache.refusal([&] { cache.allocate(late, {.num_new_tokens = 1, .num_hit_tokens = 4}, hit); }) == ErrorKind::invalid_request);
    first.numbers.num_computed_tokens = 0;
    CHECK(cache.refusal([&] { cache.allocate(first, {.num_new_tokens = 1, .num_hit_tokens = 8}, hit); }) == ErrorKind::invalid_request);
}

TEST_CASE("a request that is new starts at 0") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 10);
    request.numbers.num_computed_tokens = 4;
    CHECK(cache.refusal([&] { cache.allocate(request, {.num_new_tokens = 1}); }) == ErrorKind::invalid_request);
}

// -- refusals ---------------------------------------------------------------------------------------

TEST_CASE("who does not fit now is refused, and nothing has changed") {
    Cache cache({full(4)}, 8);
    Request first(prompt_a, 4, 20), second({50, 51, 52}, 4, 12);
    cache.admit(first);
    Snapshot before = cache.snapshot();
    FitReport report = cache.coordinator.check_fit(&second, second.numbers, {.num_new_tokens = 12}, {});
    CHECK((report.fit == Fit::not_now && report.num_needed == 3 && report.num_short == 1));
    CHECK(cache.allocate(second, {.num_new_tokens = 12}) == Outcome::refused);
    CHECK(cache.snapshot() == before);
    CHECK(cache.coordinator.find(&second) == nullptr);
    CHECK(cache.allocate(second, {.num_new_tokens = 8}) == Outcome::allocated);
}

TEST_CASE("who could never fit is told so, however empty the cache is") {
    Cache cache({full(4)}, 8);
    Request request(prompt_a, 4, 29), grows(prompt_a, 4, 10);
    CHECK(cache.coordinator.longest_that_fits(0, 0) == 28);
    CHECK(cache.coordinator.check_fit(&request, request.numbers, {.num_new_tokens = 1}, {}).fit == Fit::never);
    CHECK(cache.allocate(request, {.num_new_tokens = 1}) == Outcome::refused);
    grows.numbers.max_num_tokens = 29;
    CHECK_FALSE(cache.coordinator.fits_alone(grows.numbers, 0, 0));
    grows.numbers.max_num_tokens = 28;
    CHECK(cache.coordinator.fits_alone(grows.numbers, 0, 0));
    CHECK_FALSE(cache.coordinator.fits_alone(grows.numbers, 1, 0));
}

TEST_CASE("evictable hits count as needed: to adopt them takes them from the free blocks") {
    Cache cache({full(4)}, 5);
    Request first(prompt_a, 4, 12), again(prompt_a, 4, 16), other({50}, 4, 4);
    cache.admit(first);
    cache.free(first);
    cache.admit(other);  // one of the four free blocks
    Match match = cache.find(again);
    CHECK(match.num_tokens == 12);
    Demand demand{.num_new_tokens = 4, .num_hit_tokens = 12};
    FitReport report = cache.coordinator.check_fit(&again, again.numbers, demand, cache.hit_of(match));
    CHECK((report.num_needed == 4 && report.num_short == 1));
}

TEST_CASE("a newcomer leaves the watermark while others run, and whoever comes what is reserved") {
    Cache cache({full(4)}, 8, 2);
    Request request(prompt_a, 4, 24);
    request.numbers.is_waiting = true;
    auto fits = [&](const Demand& demand) {
        return cache.coordinator.check_fit(&request, request.numbers, demand, {}).fit == Fit::now;
    };
    CHECK(fits({.num_new_tokens = 20}));
    CHECK_FALSE(fits({.num_new_tokens = 21}));
    CHECK(fits({.num_new_tokens = 24, .has_scheduled_requests = false}));
    CHECK_FALSE(fits({.num_new_tokens = 20, .reserved_blocks = 1}));
    request.numbers.is_waiting = false;
    CHECK(fits({.num_new_tokens = 24}));
    CHECK_FALSE(fits({.num_new_tokens = 24, .reserved_blocks = max_count}));
}

TEST_CASE("a whole sequence must fit where that is asked for") {
    Cache cache({full(4)}, 9);
    Request first(prompt_a, 4, 16), second({50, 51, 52, 53, 54}, 4, 20);
    cache.admit(first);
    CHECK(cache.allocate(second, {.num_new_tokens = 4, .full_sequence_must_fit = true}) == Outcome::refused);
    CHECK(cache.allocate(second, {.num_new_tokens = 4}) == Outcome::allocated);
}

TEST_CASE("a window needs no more than its window and a step") {
    Cache cache({window(4, 9)}, 6, 0, 8);
    Request request(prompt_a, 4, 400);
    CHECK(cache.coordinator.longest_that_fits(0, 0) == 1000);
    while (request.numbers.num_computed_tokens < 400) REQUIRE(cache.step(request, 8) == Outcome::allocated);
    CHECK(cache.pool.num_held() <= 5);
}

// -- a request that runs ----------------------------------------------------------------------------

TEST_CASE("a running request gets a block when it needs one") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 7);
    cache.admit(request);
    CHECK(cache.step(request, 1) == Outcome::allocated);
    CHECK(cache.table(request).size() == 2);
    CHECK(cache.step(request, 1) == Outcome::allocated);
    CHECK(cache.table(request).size() == 3);
    CHECK(cache.coordinator.appended(cache.live(request), 0).size() == 1);
    CHECK(cache.coordinator.num_slots(cache.live(request)) == 12);
}

TEST_CASE("only tokens that are there are committed, drafts are not") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 7);
    cache.admit(request);
    REQUIRE(cache.allocate(request, {.num_new_tokens = 5}) == Outcome::allocated);  // four drafts
    CHECK(cache.live(request).tables[0].num_committed == 1);
    CHECK(cache.table(request).size() == 3);
}

TEST_CASE("a refused step has released what is dead, and nothing else") {
    Cache cache({full(4), window(4, 4)}, 13);
    Request request(prompt_a, 4, 20), other({50}, 4, 4);
    cache.admit(request);  // 5 + 5
    cache.admit(other);    // the last 2
    request.numbers.num_tokens = 60;
    CHECK(cache.allocate(request, {.num_new_tokens = 40}) == Outcome::refused);
    CHECK(cache.table(request, 0) == BlockIds{1, 2, 3, 4, 5});
    CHECK(cache.table(request, 1) == BlockIds{0, 0, 0, 0, 10});
    CHECK(cache.pool.num_free() == 4);
}

TEST_CASE("tokens of a step in flight keep what they read") {
    Cache cache({window(4, 4)}, 20);
    Request request(prompt_a, 4, 40);
    cache.step(request, 16);
    request.numbers.num_in_flight_tokens = 16;
    cache.step(request, 4);
    CHECK(cache.table(request)[0] == 1);
    request.numbers.num_in_flight_tokens = 0;
    cache.step(request, 4);
    CHECK(cache.table(request)[3] == null_block);
}

TEST_CASE("a request cannot go back to before what it has released, nor beyond its slots") {
    Cache cache({window(4, 4)}, 20);
    Request request(prompt_a, 4, 40);
    cache.step(request, 16);
    cache.step(request, 4);
    int64_t least = cache.live(request).min_computed_tokens;
    CHECK(least == 15);
    for (int64_t wrong : {int64_t{0}, least - 1, int64_t{21}, max_count, -max_count}) {
        request.numbers.num_computed_tokens = wrong;
        CHECK(cache.refusal([&] { cache.allocate(request, {.num_new_tokens = 1}); }) == ErrorKind::invalid_request);
    }
    request.numbers.num_computed_tokens = least;
    CHECK(cache.allocate(request, {.num_new_tokens = 1}) == Outcome::allocated);
}

TEST_CASE("up to no_op_until a call changes nothing, whatever the groups") {
    Random random(test_seed());
    int64_t num_no_ops = 0;
    for (int life = 0; life < 300; ++life) {
        std::vector<AttentionKind> kinds{full(4)};
        if (random.percent(50)) kinds.push_back(window(random.percent(50) ? 4 : 8, random.between(1, 20)));
        if (random.percent(30)) kinds.push_back(every_state(8, random.between(0, 3)));
        if (random.percent(30)) kinds.push_back(chunks(4, 4 * random.between(1, 3)));
        Cache cache(kinds, 200);
        Request request(std::vector<int>(60), 4, 200);
        while (request.numbers.num_computed_tokens < 190) {
            Demand demand{.num_new_tokens = random.percent(80) ? 1 : random.between(1, 9)};
            if (random.percent(20)) demand.num_lookahead_tokens = random.between(0, 5);
            LiveRequest* live = cache.coordinator.find(&request);
            bool is_no_op = live != nullptr && cache.coordinator.is_no_op(*live, request.numbers.num_computed_tokens, demand);
            Snapshot before = cache.snapshot();
            REQUIRE(cache.allocate(request, demand) == Outcome::allocated);
            if (is_no_op) REQUIRE(cache.snapshot() == before);
            num_no_ops += is_no_op;
            request.numbers.num_computed_tokens += demand.num_new_tokens;
        }
    }
    CHECK(num_no_ops > 10000);  // most steps are, or the bound is of no use
}

TEST_CASE("a call is no no-op where more blocks must be left than there are") {
    Cache cache({full(4)}, 5);
    Request request(prompt_a, 4, 5);
    cache.admit(request);
    LiveRequest& live = cache.live(request);
    CHECK(cache.coordinator.is_no_op(live, 5, {.num_new_tokens = 1, .reserved_blocks = 2}));
    CHECK_FALSE(cache.coordinator.is_no_op(live, 5, {.num_new_tokens = 1, .reserved_blocks = 3}));
    CHECK(cache.allocate(request, {.num_new_tokens = 1, .reserved_blocks = 3}) == Outcome::refused);
}

// -- loads ------------------------------------------------------------------------------------------

TEST_CASE("what a load brings is cached at once, or only once it has arrived") {
    for (bool delays : {false, true}) {
        Cache cache({full(4)}, 20);
        Request request(prompt_a, 4, 20);
        Demand demand{.num_new_tokens = 4, .num_external_tokens = 12, .delays_commit = delays};
        REQUIRE(cache.allocate(request, demand) == Outcome::allocated);
        CHECK(cache.table(request).size() == 4);
        CHECK(cache.live(request).tables[0].num_committed == (delays ? 0 : 4));
        CHECK(cache.coordinator.appended(cache.live(request), 0).size() == 1);  // what a load fills is not for the step
        request.numbers.num_computed_tokens = 12;
        if (!delays) continue;
        CHECK(cache.live(request).no_op_until == -1);
        cache.coordinator.cache_blocks(cache.live(request), request.numbers, 8);
        CHECK(cache.live(request).tables[0].num_committed == 2);
        cache.coordinator.cache_blocks(cache.live(request), request.numbers, 12);
        CHECK(cache.live(request).tables[0].num_committed == 3);
        REQUIRE(cache.coordinator.stored().size() == 1);
        CHECK(cache.coordinator.stored()[0].positions.start == 2);
    }
}

TEST_CASE("steps beyond a load that is under way commit nothing behind it") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 24);
    Demand demand{.num_new_tokens = 4, .num_external_tokens = 12, .delays_commit = true};
    REQUIRE(cache.allocate(request, demand) == Outcome::allocated);
    request.numbers.num_computed_tokens = 16;
    CHECK(cache.step(request, 4) == Outcome::allocated);
    CHECK(cache.live(request).tables[0].num_committed == 0);
    cache.coordinator.cache_blocks(cache.live(request), request.numbers, 12);
    CHECK(cache.live(request).tables[0].num_committed == 3);
    CHECK(cache.step(request, 4) == Outcome::allocated);
    CHECK(cache.live(request).tables[0].num_committed == 6);
}

TEST_CASE("what a load did not bring is computed after all, and cached then") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 20);
    REQUIRE(cache.allocate(request, {.num_external_tokens = 12, .delays_commit = true}) == Outcome::allocated);
    request.numbers.num_computed_tokens = 0;  // nothing came
    CHECK(cache.step(request, 8) == Outcome::allocated);
    CHECK(cache.live(request).tables[0].num_committed == 2);
    CHECK_FALSE(cache.live(request).commit_limit.has_value());
}

TEST_CASE("more than there are slots for cannot be cached") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 20);
    cache.step(request, 8);
    CHECK(cache.refusal([&] { cache.coordinator.cache_blocks(cache.live(request), request.numbers, 12); }) ==
          ErrorKind::invalid_request);
    CHECK(cache.refusal([&] { cache.coordinator.cache_blocks(cache.live(request), request.numbers, max_count); }) ==
          ErrorKind::invalid_request);
}

TEST_CASE("blocks of garbage leave the index with all that was computed from them") {
    Cache cache({full(4)}, 30);
    Request first(prompt_a, 4, 22), second(prompt_b, 4, 22), apart({50, 51}, 4, 9);
    cache.admit(first);
    cache.admit(second);  // shares four blocks
    cache.admit(apart);
    auto holders = cache.coordinator.invalidate(std::vector<BlockId>{cache.table(first)[2]});
    REQUIRE(holders.size() == 2);
    for (auto [live, token] : holders) {
        CHECK(live->key != &apart);
        CHECK(token == 8);
        CHECK(live->tables[0].num_committed == 2);
    }
    CHECK(cache.find(first).num_tokens == 8);
    CHECK(cache.find(second).num_tokens == 8);
    first.numbers.num_computed_tokens = 8;
    CHECK(cache.step(first, 14) == Outcome::allocated);  // the same blocks, computed again
    CHECK(cache.find(first).num_tokens == 20);
}

TEST_CASE("garbage spreads through those who share a block that is garbage only further on") {
    Cache cache({full(4)}, 30);
    Request first(prompt_a, 4, 22), second(prompt_b, 4, 22);
    cache.admit(first);
    cache.admit(second);
    // Bad is a block of the first one's own, from which nobody else has computed anything.
    auto holders = cache.coordinator.invalidate(std::vector<BlockId>{cache.table(first)[4]});
    REQUIRE(holders.size() == 1);
    CHECK((holders[0].first->key == &first && holders[0].second == 16));
}

TEST_CASE("who has released what it would go on from starts over") {
    Cache cache({full(4), window(4, 4)}, 40);
    Request request(prompt_a, 4, 24);
    cache.step(request, 16);
    cache.step(request, 8);
    auto holders = cache.coordinator.invalidate(std::vector<BlockId>{cache.table(request, 0)[1]});
    REQUIRE(holders.size() == 1);
    CHECK(holders[0].second == 0);
    CHECK(cache.refusal([&] {
        request.numbers.num_computed_tokens = 0;
        cache.allocate(request, {.num_new_tokens = 1});
    }) == ErrorKind::invalid_request);
    cache.free(request);
    CHECK(cache.pool.num_held() == 0);
}

// -- the end ----------------------------------------------------------------------------------------

TEST_CASE("a request that is freed leaves what the next turn starts from, longest") {
    Cache cache({full(4), window(4, 4)}, 40);
    Request request(prompt_a, 4, 20);
    cache.admit(request);
    cache.free(request);
    CHECK(cache.coordinator.find(&request) == nullptr);
    Request next(prompt_a, 4, 21);
    CHECK(cache.find(next).num_tokens == 20);
    std::vector<BlockId> order;
    cache.pool.queue().for_each([&](BlockId block) { order.push_back(block); });
    // Never used blocks, then the window's dead ones, then the tail of what a hit of 20 needs.
    CHECK(std::vector(order.end() - 10, order.end()) == std::vector<BlockId>{9, 8, 7, 6, 5, 10, 4, 3, 2, 1});
}

TEST_CASE("popped blocks are their taker's until they are freed") {
    Cache cache({full(4), window(8, 8)}, 40);
    Request request(prompt_a, 4, 12);
    cache.admit(request);
    std::vector<BlockId> blocks = cache.coordinator.pop(cache.live(request));
    CHECK(blocks == std::vector<BlockId>{1, 4, 2, 3, 5});
    CHECK((cache.pool.num_popped() == 5 && cache.pool.num_held() == 0));
    std::reverse(blocks.begin(), blocks.end());
    cache.pool.free_blocks(blocks);
    CHECK(cache.pool.num_free() == 39);
}

TEST_CASE("after the index was cleared, who holds blocks commits nothing any more") {
    Cache cache({full(4)}, 40);
    Request old(prompt_a, 4, 8), fresh(prompt_a, 4, 8);
    cache.admit(old);
    cache.coordinator.clear_index();
    CHECK(cache.live(old).is_stale);
    old.numbers.num_tokens = 16;
    old.numbers.hashes = {.compact = std::span(old.hashes).first(4)};
    CHECK(cache.step(old, 8) == Outcome::allocated);
    CHECK(cache.coordinator.stored().empty());
    CHECK(cache.admit(fresh) == 0);
    CHECK(cache.coordinator.stored().size() == 1);
    CHECK(cache.find(old).num_tokens == 8);  // the fresh one's
}

// -- one hit over all groups --------------------------------------------------------------------------

TEST_CASE("a hit ends where every group has what it reads") {
    Cache cache({full(4), window(8, 8)}, 60);
    Request first(prompt_a, 4, 28), again(prompt_a, 4, 36);
    cache.admit(first);
    Match match = cache.find(again);
    CHECK(match.num_tokens == 24);  // 28 is no multiple of 8
    CHECK(match.blocks[0].size() == 6);
    CHECK((match.blocks[1].size() == 3 && match.blocks[1][1] == null_block && match.blocks[1][2] != null_block));
    cache.pool.evict_blocks(std::vector<BlockId>{match.blocks[1][2]});
    match = cache.find(again);
    CHECK(match.num_tokens == 16);
    CHECK(match.branch_point == 24);  // the full group still has it
    cache.pool.evict_blocks(std::vector<BlockId>{match.blocks[0][0]});
    match = cache.find(again);
    CHECK((match.num_tokens == 0 && match.branch_point == 0));
}

TEST_CASE("each group's own hit is no shorter than that of all") {
    Cache cache({full(4), window(4, 4)}, 60);
    Request first(prompt_a, 4, 24), again(prompt_a, 4, 25);
    cache.admit(first);
    cache.pool.evict_blocks(std::vector<BlockId>{cache.table(first, 1)[5]});
    auto alone = [&](size_t i) {
        return cache.coordinator.match_alone(again.numbers.hashes, 24, cache.coordinator.groups()[i]).num_tokens;
    };
    CHECK((alone(0) == 24 && alone(1) == 20));
    CHECK(cache.find(again).num_tokens == 20);
}

TEST_CASE("a match is the longest length that all groups have, by trying every one") {
    Random random(test_seed());
    int64_t num_hits = 0;
    for (int life = 0; life < 400; ++life) {
        std::vector<AttentionKind> kinds;
        for (int64_t i = random.between(1, 3); i > 0; --i) {
            int64_t block = random.percent(50) ? 2 : 4;
            std::vector<AttentionKind> some{full(block), window(block, random.between(1, 9)), chunks(block, 2 * block), every_state(block)};
            kinds.push_back(random.one_of(some));
        }
        Cache cache(kinds, 200);
        Request first(prompt_a, cache.block_size, 10 * cache.block_size);
        Request again(prompt_a, cache.block_size, 10 * cache.block_size);
        cache.admit(first);
        cache.pool.new_step_starts();
        std::vector<BlockId> evicted;
        for (BlockId block = 1; block < cache.pool.num_blocks(); ++block) {
            if (random.percent(8)) evicted.push_back(block);
        }
        cache.pool.evict_blocks(evicted);
        int64_t most = again.numbers.num_tokens - 1, longest = 0;
        int64_t alignment = cache.coordinator.groups()[0].options.alignment;
        for (int64_t length = alignment; length <= most; length += alignment) {
            bool has_all = true;
            for (size_t i = 0; i < kinds.size(); ++i) {
                Range needed = cache.coordinator.groups()[i].needed_for_hit(length);
                for (int64_t position = needed.start; position < needed.stop; ++position) {
                    has_all &= cache.pool.is_cached(cache.table(first, i)[static_cast<size_t>(position)]);
                }
            }
            if (has_all) longest = length;
        }
        REQUIRE(cache.find(again).num_tokens == longest);
        num_hits += longest > 0;
    }
    CHECK(num_hits > 50);
}

TEST_CASE("a state that this step computes is hit in the next one") {
    Cache cache({full(4), step_states(4)}, 60);
    Request first(prompt_a, 4, 16), again(prompt_a, 4, 20);
    cache.step(first, 16);
    Match match = cache.find(again);
    REQUIRE(match.num_tokens == 16);
    Demand demand{.num_new_tokens = 4, .num_hit_tokens = 16};
    Hit hit = cache.hit_of(match);
    CHECK(cache.coordinator.check_fit(&again, again.numbers, demand, hit).fit == Fit::next_step);
    CHECK(cache.allocate(again, demand, hit) == Outcome::refused);
    cache.pool.new_step_starts();
    CHECK(cache.allocate(again, demand, hit) == Outcome::allocated);
}

TEST_CASE("a cache that cannot hit looks nothing up and commits nothing") {
    BlockPool pool(20, 1, EvictionOrder::recency, false, false);
    KVCacheCoordinator coordinator(pool, cache_groups({last_state(4)}), {4, 1000, 64, 0, false});
    Request request(prompt_a, 4, 20);
    coordinator.allocate(&request, &request, request.numbers, {.num_new_tokens = 20}, {});
    CHECK(coordinator.stored().empty());
    CHECK(coordinator.match(request.numbers.hashes, 19).num_tokens == 0);
    CHECK(coordinator.match_alone(request.numbers.hashes, 19, coordinator.groups()[0]).num_tokens == 0);
    CHECK(pool.num_held() == 1);
}

TEST_CASE("a group at another's place is refused") {
    BlockPool pool(20, 2, EvictionOrder::recency, false, false);
    SingleTypeKVCacheManager::Options options = plain_options(full(4));
    options.group_id = 1;
    std::vector<SingleTypeKVCacheManager> groups{{full(4), options}};
    CHECK_THROWS_AS(KVCacheCoordinator(pool, groups, {4, 1000, 64, 0, true}), Error);
}

TEST_CASE("the tokens that a call may commit are told before it") {
    Cache cache({full(4)}, 20);
    Request request(prompt_a, 4, 22);
    Range tokens = cache.coordinator.tokens_to_commit(nullptr, 0, 10);
    CHECK((tokens.start == 0 && tokens.stop == 8));
    cache.step(request, 10);
    tokens = cache.coordinator.tokens_to_commit(&cache.live(request), 10, 22);
    CHECK((tokens.start == 8 && tokens.stop == 20));
    tokens = cache.coordinator.tokens_to_commit(&cache.live(request), 10, 11);
    CHECK(tokens.size() == 0);
}

}  // namespace kvpager
