// The pool by small examples: what each verb is for.
#include <doctest/doctest.h>

#include "pool/pool.h"
#include "support.h"

namespace kvpager {

namespace {

using Ids = std::vector<BlockId>;

// A pool of one group with what a test says over and over.
struct TestPool : BlockPool {
    explicit TestPool(int64_t num_blocks, EvictionOrder order = EvictionOrder::dead_first)
        : BlockPool(num_blocks, 1, order, true, true) {}

    BlockIds new_table(int64_t num_blocks) {
        BlockIds table;
        extend(table, num_blocks, false);
        return table;
    }
    BlockIds cached_table(const std::vector<Hash>& hashes) {
        BlockIds table = new_table(std::ssize(hashes));
        commit_all(table, hashes);
        return table;
    }
    std::vector<Range> commit_all(BlockIds& table, const std::vector<Hash>& hashes) {
        std::vector<Range> runs;
        commit(table, 0, group_hashes(hashes), 0, std::ssize(table), runs);
        return runs;
    }
    void free_table(BlockIds& table, Range dead = {}, Range keep = {}) {
        BlockIds* tables[] = {&table};
        int64_t sizes[] = {1};
        free_tables(tables, sizes, std::span(&dead, 1), std::span(&keep, 1));
    }
    BlockIds find(const std::vector<Hash>& hashes) const {
        return prefix(std::vector<GroupId>{0}, group_hashes(hashes), std::ssize(hashes))[0];
    }
    Ids queue_order() const {
        Ids order;
        queue().for_each([&](BlockId block) { order.push_back(block); });
        return order;
    }
};

ErrorKind refusal(auto call) {
    try {
        call();
    } catch (const Error& error) {
        CHECK(std::string(error.what()) != "");
        return error.kind();
    }
    FAIL("nothing was refused");
    return {};
}

}  // namespace

// -- counts ---------------------------------------------------------------------------------------

TEST_CASE("a new pool has all but the null block free, in order") {
    TestPool pool(5);
    CHECK(pool.num_free() == 4);
    CHECK(pool.queue_order() == Ids{1, 2, 3, 4});
    CHECK(pool.ref_count(null_block) == 0);
}

TEST_CASE("a pool of no blocks, too many or too many groups is none") {
    CHECK(refusal([] { BlockPool(0, 1, EvictionOrder::recency, false, false); }) == ErrorKind::config);
    CHECK(refusal([] { BlockPool(int64_t{1} << 31, 1, EvictionOrder::recency, false, false); }) == ErrorKind::config);
    CHECK(refusal([] { BlockPool(4, 1 << 16, EvictionOrder::recency, false, false); }) == ErrorKind::config);
    CHECK(refusal([] { BlockPool(4, -1, EvictionOrder::recency, false, false); }) == ErrorKind::config);
}

TEST_CASE("references are counted, and the last one frees") {
    TestPool pool(6);
    BlockIds one = pool.new_table(3), other;
    pool.adopt(other, one, 0, 2);
    CHECK(pool.ref_count(1) == 2);
    CHECK(pool.count_exclusive(one, 0, 3) == 1);
    CHECK(pool.num_shared_by(one, 2) == 2);
    pool.free_table(one);
    CHECK(pool.num_free() == 3);
    CHECK(pool.num_held() == 2);
    pool.free_table(other);
    CHECK(pool.num_free() == 5);
}

TEST_CASE("more than there is, or less than nothing, is refused and changes nothing") {
    TestPool pool(4);
    BlockIds table = pool.new_table(1);
    for (int64_t count : {int64_t{-1}, int64_t{3}, int64_t{1} << 40}) {
        CHECK(refusal([&] { pool.extend(table, count, true); }) == ErrorKind::out_of_blocks);
        CHECK(refusal([&] { pool.allocate(count); }) == ErrorKind::out_of_blocks);
        CHECK(refusal([&] { pool.reserve(count); }) == ErrorKind::out_of_blocks);
    }
    CHECK(table == BlockIds{1});
    CHECK(pool.num_free() == 2);
    CHECK(pool.take_new_block_ids().empty());
}

// -- free order -----------------------------------------------------------------------------------

TEST_CASE("what was never cached is taken again first, in the order it was given back") {
    for (EvictionOrder order : {EvictionOrder::dead_first, EvictionOrder::recency}) {
        TestPool pool(7, order);
        BlockIds table = pool.new_table(3);
        pool.free_table(table);  // tail first
        CHECK(pool.queue_order() == Ids{3, 2, 1, 4, 5, 6});
    }
}

TEST_CASE("dead first: cached blocks that are dead go before those that a next turn may hit") {
    TestPool pool(7);
    BlockIds table = pool.cached_table(chained({1, 2, 3, 4}));
    pool.free_table(table, {0, 2});
    CHECK(pool.queue_order() == Ids{5, 6, 2, 1, 4, 3});
}

TEST_CASE("recency: dead or not, the least recently freed goes first") {
    TestPool pool(7, EvictionOrder::recency);
    BlockIds table = pool.cached_table(chained({1, 2, 3, 4}));
    pool.free_table(table, {0, 2});
    CHECK(pool.queue_order() == Ids{5, 6, 4, 3, 2, 1});
}

TEST_CASE("a dead block that was hit, or that a hit is known to need, is kept as long as any") {
    TestPool pool(5);
    std::vector<Hash> hashes = chained({1, 2, 3});
    BlockIds table = pool.cached_table(hashes), other;
    pool.adopt(other, table, 0, 1);
    pool.free_table(other);
    pool.free_table(table, {0, 3}, {1, 2});
    CHECK(pool.queue_order() == Ids{4, 3, 2, 1});
}

TEST_CASE("a request's tables die together by where their blocks end, or by recency one after the other") {
    for (EvictionOrder order : {EvictionOrder::dead_first, EvictionOrder::recency}) {
        BlockPool pool(7, 2, order, false, false);
        BlockIds small, big;
        std::vector<Range> runs;
        std::vector<Hash> hashes = chained({1, 2, 3, 4});
        pool.extend(small, 4, false);  // 1 to 4, of 1 token each
        pool.extend(big, 2, false);    // 5 and 6, of 2 tokens
        pool.commit(small, 0, group_hashes(hashes), 0, 4, runs);
        pool.commit(big, 1, group_hashes(hashes, 2), 0, 2, runs);
        BlockIds* tables[] = {&small, &big};
        int64_t sizes[] = {1, 2};
        Range nothing[2];
        pool.free_tables(tables, sizes, nothing, nothing);
        Ids freed;
        pool.queue().for_each([&](BlockId block) { freed.push_back(block); });
        bool by_end = order == EvictionOrder::dead_first;
        CHECK(freed == (by_end ? Ids{4, 6, 3, 2, 5, 1} : Ids{4, 3, 2, 1, 6, 5}));
    }
}

TEST_CASE("release leaves nulls and gives back from the tail") {
    TestPool pool(6);
    BlockIds table = pool.new_table(4);
    pool.release(table, 1, 3, {});
    CHECK(table == BlockIds{1, 0, 0, 4});
    CHECK(pool.queue_order() == Ids{3, 2, 5});
    pool.release(table, 0, 4, {});  // nulls are nobody's
    CHECK(pool.num_free() == 5);
}

TEST_CASE("a move takes the block along and leaves null; nulls can be appended") {
    TestPool pool(6);
    BlockIds table = pool.new_table(2);
    pool.extend_null(table, 2);
    pool.extend_null(table, -1);
    pool.move(table, 1);
    CHECK(table == BlockIds{1, 0, 0, 0, 2});
    CHECK(pool.ref_count(2) == 1);
}

// -- index ----------------------------------------------------------------------------------------

TEST_CASE("a commit makes blocks found, and tells the runs that are new") {
    TestPool pool(10);
    std::vector<Hash> hashes = chained({1, 2, 3, 4});
    BlockIds table = pool.cached_table({hashes[0]});
    BlockIds other = pool.new_table(2);
    pool.extend_null(other, 1);
    pool.extend(other, 1, false);
    std::vector<Range> runs = pool.commit_all(other, hashes);  // position 0 is a copy, position 2 null
    REQUIRE(runs.size() == 2);
    CHECK((runs[0].start == 1 && runs[0].stop == 2 && runs[1].start == 3 && runs[1].stop == 4));
    CHECK(pool.find(hashes) == BlockIds{1, 2 + 1});
    CHECK(pool.commit_all(other, hashes).empty());
}

TEST_CASE("the oldest copy is found; when it leaves, the next oldest is") {
    TestPool pool(5);
    std::vector<Hash> hashes = chained({1});
    BlockIds tables[] = {pool.cached_table(hashes), pool.cached_table(hashes), pool.cached_table(hashes)};
    CHECK(pool.find(hashes) == BlockIds{1});
    pool.evict_blocks(Ids{1});
    CHECK(pool.find(hashes) == BlockIds{2});
    pool.evict_blocks(Ids{3});
    CHECK(pool.find(hashes) == BlockIds{2});
    pool.evict_blocks(Ids{2});
    CHECK(pool.find(hashes).empty());
    CHECK(pool.take_changes().removed.size() == 1);  // the last copy only
}

TEST_CASE("the same hash in another group is another") {
    BlockPool pool(5, 2, EvictionOrder::recency, false, false);
    std::vector<Hash> hashes = chained({1});
    BlockIds table;
    std::vector<Range> runs;
    pool.extend(table, 1, false);
    pool.commit(table, 1, group_hashes(hashes), 0, 1, runs);
    CHECK(pool.prefix(std::vector<GroupId>{1}, group_hashes(hashes), 1)[0] == BlockIds{1});
    CHECK(pool.prefix(std::vector<GroupId>{0}, group_hashes(hashes), 1)[0].empty());
    CHECK(pool.prefix(std::vector<GroupId>{1, 0}, group_hashes(hashes), 1)[0].empty());
    CHECK(pool.serves(table, 1, group_hashes(hashes), false));
    CHECK_FALSE(pool.serves(table, 0, group_hashes(hashes), false));
}

TEST_CASE("look-ups from the right stop at the rightmost gap") {
    TestPool pool(8);
    std::vector<Hash> hashes = chained({1, 2, 3, 4, 5});
    BlockIds table = pool.cached_table(hashes);
    pool.evict_blocks(Ids{3});
    std::vector<GroupId> groups{0};
    CHECK(pool.run_start(groups, group_hashes(hashes), 0, 5) == 3);
    CHECK(pool.run_start(groups, group_hashes(hashes), 4, 5) == 4);
    CHECK(pool.lookup(0, group_hashes(hashes), 3, 5) == BlockIds{0, 0, 0, 4, 5});
}

TEST_CASE("hashes that share a home in the index do not hide each other") {
    // Thousands of them in an index that is a quarter full: many probes meet a neighbour.
    TestPool pool(4097);
    std::vector<Hash> hashes;
    for (uint64_t i = 0; i < 4096; ++i) hashes.push_back(hash_of(i));
    BlockIds table = pool.cached_table(hashes);
    Random random(test_seed());
    Ids evicted;
    for (BlockId block = 1; block <= 4096; ++block) {
        if (random.percent(60)) evicted.push_back(block);
    }
    pool.evict_blocks(evicted);
    for (BlockId block = 1; block <= 4096; ++block) {
        size_t at = static_cast<size_t>(block) - 1;
        bool is_gone = std::binary_search(evicted.begin(), evicted.end(), block);
        REQUIRE(pool.find({hashes[at]}) == (is_gone ? BlockIds{} : BlockIds{block}));
    }
}

TEST_CASE("neighbours in the index survive each other's eviction, past the end of the table too") {
    Random random(test_seed());
    for (int life = 0; life < 200; ++life) {
        constexpr BlockId num_blocks = 9;
        std::vector<Block> blocks(num_blocks);
        HashIndex index(blocks.data(), num_blocks);
        // Tags that belong into the last slots and the first: those that are pushed on go round.
        std::vector<Hash> hashes;
        for (uint64_t number = 0; std::ssize(hashes) < num_blocks; ++number) {
            uint32_t tag = index.tag(hash_of(number).bytes, 0);
            if (tag > 0xf0000000u || tag < 0x08000000u) hashes.push_back(hash_of(number));
        }
        std::vector<bool> is_in(num_blocks);
        for (int turn = 0; turn < 60; ++turn) {
            BlockId block = static_cast<BlockId>(random.between(1, num_blocks - 1));
            size_t at = static_cast<size_t>(block);
            Digest digest = hashes[at].bytes;
            REQUIRE((is_in[at] ? index.erase(block) : index.insert(block, index.tag(digest, 0), digest, 0)));
            is_in[at] = !is_in[at];
            for (BlockId other = 1; other < num_blocks; ++other) {
                Digest wanted = hashes[static_cast<size_t>(other)].bytes;
                uint32_t tag = index.tag(wanted, 0);
                BlockId found = index.find_from(index.prefetch_candidate(tag), tag, wanted, 0);
                REQUIRE(found == (is_in[static_cast<size_t>(other)] ? other : null_block));
            }
        }
    }
}

// -- eviction -------------------------------------------------------------------------------------

TEST_CASE("an allocation that overwrites a cached block evicts it") {
    TestPool pool(3);
    std::vector<Hash> hashes = chained({1, 2});
    BlockIds table = pool.cached_table(hashes);
    pool.free_table(table);
    CHECK(pool.count_evictable(pool.find(hashes), 0, 2) == 2);
    int64_t version = pool.index_version();
    CHECK(pool.new_table(1) == BlockIds{2});  // the tail goes first: the head is worth more
    CHECK(pool.num_evictions() == 1);
    CHECK(pool.index_version() > version);
    CHECK(pool.find(hashes) == BlockIds{1});
}

TEST_CASE("a block evicted by hand is the next one taken, and is no eviction in the count") {
    TestPool pool(4);
    BlockIds table = pool.cached_table(chained({1, 2, 3}));
    pool.free_table(table);
    pool.evict_blocks(Ids{1, 1, 0});
    CHECK(pool.queue_order() == Ids{1, 3, 2});
    CHECK(pool.num_evictions() == 0);
}

TEST_CASE("the index can only be reset while nobody holds a block; it can be cleared at any time") {
    TestPool pool(4);
    std::vector<Hash> hashes = chained({1, 2});
    BlockIds table = pool.cached_table(hashes);
    CHECK_FALSE(pool.reset_prefix_cache());
    CHECK(pool.find(hashes).size() == 2);
    pool.clear_index();
    CHECK(pool.find(hashes).empty());
    CHECK_FALSE(pool.is_cached(1));
    pool.free_table(table);
    CHECK(pool.reset_prefix_cache());
    std::vector<BlockId> popped = pool.allocate(1);
    CHECK_FALSE(pool.reset_prefix_cache());
}

TEST_CASE("after a reset what was cached goes before whatever is cached from then on") {
    TestPool pool(5);
    BlockIds old = pool.cached_table(chained({1, 2}));
    pool.free_table(old);
    pool.clear_index();
    BlockIds fresh = pool.cached_table(chained({3, 4}));  // 3 and 4, never used before
    pool.free_table(fresh);
    CHECK(pool.queue_order() == Ids{2, 1, 4, 3});
}

// -- references of others -------------------------------------------------------------------------

TEST_CASE("popped blocks are counted apart until they come back") {
    TestPool pool(6);
    BlockIds table = pool.new_table(3), other;
    pool.adopt(other, table, 0, 1);
    BlockIds* tables[] = {&table};
    int64_t sizes[] = {1};
    CHECK(pool.pop_tables(tables, sizes) == Ids{1, 2, 3});
    CHECK(table.empty());
    CHECK(pool.num_popped() == 2);  // somebody else still holds block 1
    CHECK(pool.external_count(1) == 1);
    pool.free_blocks(Ids{3, 2, 1});
    CHECK(pool.num_popped() == 0);
    CHECK(pool.num_held() == 1);
    CHECK(pool.queue_order() == Ids{3, 2, 4, 5});
}

TEST_CASE("only what was handed out can be freed by id, as often as it was, and all or nothing") {
    TestPool pool(6);
    BlockIds table = pool.new_table(1);
    std::vector<BlockId> taken = pool.allocate(2);
    pool.touch(Ids{1, 2});
    for (const Ids& wrong : {Ids{2, 2, 2}, Ids{2, 5}, Ids{3, 1, 1}}) {
        CHECK(refusal([&] { pool.free_blocks(wrong); }) == ErrorKind::block_state);
    }
    CHECK(pool.ref_count(2) == 2);
    pool.free_blocks(Ids{2, 2, 3, 1});
    CHECK(pool.num_free() == 4);
    CHECK(pool.ref_count(1) == 1);
}

TEST_CASE("a touch takes a free block out of the queue, even out of those never used") {
    TestPool pool(7);
    pool.touch(Ids{4});
    CHECK(pool.queue_order() == Ids{1, 2, 3, 5, 6});
    CHECK(pool.new_table(4) == BlockIds{1, 2, 3, 5});
    pool.free_blocks(Ids{4});
    CHECK(pool.queue_order() == Ids{4, 6});
}

TEST_CASE("reserved blocks are gone for good and hinder no reset") {
    TestPool pool(6);
    CHECK(pool.reserve(2) == Ids{1, 2});
    CHECK(pool.reserved() == Ids{1, 2});
    CHECK((pool.num_free() == 3 && pool.num_held() == 0 && pool.num_reserved() == 2));
    CHECK(pool.reset_prefix_cache());
}

// -- what is told once ----------------------------------------------------------------------------

TEST_CASE("blocks to zero are told once, however often they were taken") {
    TestPool pool(5);
    BlockIds table;
    pool.extend(table, 2, true);
    pool.free_table(table);
    pool.extend(table, 3, true);
    pool.extend(table, 1, false);
    CHECK(pool.take_new_block_ids() == Ids{1, 2, 3});
    CHECK(pool.take_new_block_ids().empty());
}

TEST_CASE("the log tells in order what left the index, hashes of one group together") {
    BlockPool pool(6, 2, EvictionOrder::recency, true, false);
    std::vector<Hash> hashes = chained({1, 2});
    BlockIds first, second;
    std::vector<Range> runs;
    pool.extend(first, 2, false);
    pool.extend(second, 1, false);
    pool.commit(first, 0, group_hashes(hashes), 0, 2, runs);
    pool.commit(second, 1, group_hashes(hashes), 0, 1, runs);
    pool.evict_blocks(Ids{1, 2, 3});
    pool.clear_index();
    IndexChanges changes = pool.take_changes();
    REQUIRE(changes.changes.size() == 3);
    CHECK((changes.changes[0].group == 0 && changes.changes[0].num_hashes == 2));
    CHECK((changes.changes[1].group == 1 && changes.changes[1].num_hashes == 1));
    CHECK(changes.changes[2].what == IndexChange::cleared);
    CHECK((changes.removed[0] == hashes[0] && changes.removed[1] == hashes[1] && changes.removed[2] == hashes[0]));
    CHECK(pool.take_changes().changes.empty());
}

TEST_CASE("a sampler is told of each block that is allocated, used or evicted") {
    TestPool pool(3);
    BlockIds table = pool.cached_table(chained({1}));
    pool.touch(Ids{1});
    pool.evict_blocks(Ids{1});
    pool.clear_index();
    std::vector<BlockHistory> history = pool.take_history();
    std::string told;
    for (const BlockHistory& event : history) told += "auer"[event.what];
    CHECK(told == "auer");
    CHECK_FALSE(pool.has_history());
}

TEST_CASE("states that this step computes are marked until the next one") {
    TestPool pool(4);
    BlockIds table = pool.new_table(2);
    pool.extend_null(table, 1);
    pool.compute(table, {1, 9});
    CHECK((!pool.is_computing(1) && pool.is_computing(2) && !pool.is_computing(null_block)));
    pool.new_step_starts();
    CHECK_FALSE(pool.is_computing(2));
}

}  // namespace kvpager
