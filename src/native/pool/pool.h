// The physical blocks: reference counts, free order, hash index. What each verb promises is in _native.pyi.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "free_queue.h"
#include "hash_index.h"

namespace kvpager {

enum class EvictionOrder : uint8_t { dead_first, recency };

// What left the index, in order: the last copies of some hashes of one group, one after the other, or all at once.
struct IndexChange {
    enum What : uint8_t { removed, cleared } what;
    GroupId group;
    int64_t num_hashes;  // of IndexChanges::removed
};
struct IndexChanges {
    std::vector<IndexChange> changes{};
    std::vector<Hash> removed{};
};

// What a residency sampler is told of a block.
struct BlockHistory {
    enum What : uint8_t { allocated, used, evicted, reset } what;
    BlockId block;
};

// Owns the blocks and who comes next. Invariant: a block is null, reserved, referred to, or in the free queue once; it
// carries a hash exactly if the index finds it. An error changes nothing. It does not know requests, tokens or attention
// kinds: a table is a list of ids to it, and whoever calls says what is dead.
class BlockPool {
public:
    BlockPool(int64_t num_blocks, int64_t num_groups, EvictionOrder order, bool logs_changes, bool is_observed);

    int64_t num_blocks() const { return num_blocks_; }
    int64_t num_groups() const { return num_groups_; }
    int64_t num_free() const { return num_free_; }
    int64_t num_popped() const { return num_popped_; }
    int64_t num_reserved() const { return std::ssize(reserved_); }
    int64_t num_held() const { return num_blocks_ - 1 - num_free_ - num_popped_ - num_reserved(); }
    int64_t num_evictions() const { return num_evictions_; }
    // Grows whenever a hash leaves the index.
    int64_t index_version() const { return index_version_; }
    EvictionOrder order() const { return order_; }
    bool logs_changes() const { return logs_changes_; }
    const std::vector<BlockId>& reserved() const { return reserved_; }
    int32_t ref_count(BlockId block) const { return at(block).refs; }
    int32_t external_count(BlockId block) const { return external_[block]; }
    bool is_cached(BlockId block) const { return at(block).is(in_index); }
    const FreeQueue& queue() const { return queue_; }
    const HashIndex& index() const { return index_; }
    GroupId group_of(BlockId block) const { return at(block).group; }

    // Look-ups: read only.
    std::vector<BlockIds> prefix(std::span<const GroupId> groups, const GroupHashes& hashes, int64_t stop) const;
    int64_t run_start(std::span<const GroupId> groups, const GroupHashes& hashes, int64_t start, int64_t stop) const;
    BlockIds lookup(GroupId group, const GroupHashes& hashes, int64_t start, int64_t stop) const;
    bool serves(const BlockIds& blocks, GroupId group, const GroupHashes& hashes) const;
    int64_t count_evictable(const BlockIds& blocks, int64_t start, int64_t stop) const;
    int64_t count_exclusive(const BlockIds& blocks, int64_t start, int64_t stop) const;
    int64_t num_shared_by(const BlockIds& blocks, int64_t num_holders) const;

    // Tables: references of requests.
    void adopt(BlockIds& table, const BlockIds& hits, int64_t start, int64_t stop);
    void extend(BlockIds& table, int64_t num_blocks, bool zeroed);
    void extend_null(BlockIds& table, int64_t num_positions);
    void move(BlockIds& table, int64_t source);
    void release(BlockIds& table, int64_t start, int64_t stop, Range keep);
    void free_tables(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes,
                     std::span<const Range> dead, std::span<const Range> keep);
    std::vector<BlockId> pop_tables(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes);
    // Appends the runs of positions whose hash was new to the index.
    void commit(BlockIds& table, GroupId group, const GroupHashes& hashes, int64_t start, int64_t stop,
                std::vector<Range>& runs);

    // Ask for what a release, an eviction and a commit will touch of one block.
    void prefetch_block(BlockId block) const {
        prefetch(&at(block));
        index_.prefetch_tag(block);
    }
    void prefetch_eviction(BlockId block) const { index_.prefetch_slot(index_.tag_of(block)); }
    void prefetch_commit(const BlockIds& table, GroupId group, const GroupHashes& hashes, int64_t position) const;

    // States that this step computes: they can be hit from the next one on.
    void compute(const BlockIds& table, Range positions);
    bool is_computing(BlockId block) const { return at(block).is(computing); }
    void new_step_starts();

    // Blocks by id: external references.
    std::vector<BlockId> allocate(int64_t num_blocks);
    void touch(std::span<const BlockId> blocks);
    void free_blocks(std::span<const BlockId> blocks);
    void evict_blocks(std::span<const BlockId> blocks);
    bool reset_prefix_cache();
    void clear_index();
    std::vector<BlockId> reserve(int64_t num_blocks);
    std::vector<BlockId> take_new_block_ids();

    // What happened since the last time.
    IndexChanges take_changes() { return std::exchange(changes_, {}); }
    std::vector<BlockHistory> take_history() { return std::exchange(history_, {}); }
    bool has_history() const { return !history_.empty(); }

private:
    // A block that loses a reference. `dead`: no later token of its request reads it, and no hit is known to need it.
    struct Freed {
        BlockId block;
        bool dead;
        bool last;       // no reference is left
        uint16_t batch;  // blocks of one batch that were never cached keep their order at the queue's front
    };
    class Probes;

    Block& at(BlockId block) { return blocks_[block]; }
    const Block& at(BlockId block) const { return blocks_[block]; }
    bool is_dead_first() const { return order_ == EvictionOrder::dead_first; }
    void check_range(const BlockIds& list, int64_t start, int64_t stop) const;
    void check_ids(const BlockIds& list, int64_t start, int64_t stop) const;
    void check_supply(int64_t num_blocks) const;
    uint32_t prefetch_insertion(BlockId block, Digest hash, GroupId group) const;
    void take(std::span<BlockId> out);
    void evict(BlockId block);
    void refer(BlockId block, int external);
    void change_counts(BlockId block, int refs, int external);
    template <typename Visit>
    void tail_first(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes, Visit visit) const;
    std::vector<BlockId> heads_first(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes) const;
    Freed* room_for_freed(size_t most);
    Freed* drop(Freed* out, BlockId id, bool dead, uint16_t batch);
    [[noreturn]] void refuse_drop(const Freed* end, BlockId id);
    void requeue(const Freed* end);
    void remember(BlockHistory::What what, BlockId block) {
        if (is_observed_) history_.push_back({what, block});
    }

    BlockId num_blocks_;
    int64_t num_groups_;
    EvictionOrder order_;
    bool logs_changes_;
    bool is_observed_;
    ZeroedArray<Block> blocks_;
    ZeroedArray<int32_t> external_;  // references to a block that no request holds: popped, allocated or touched by hand
    FreeQueue queue_;
    HashIndex index_;
    int64_t num_free_;
    int64_t num_popped_ = 0;  // blocks with external references only
    int64_t num_evictions_ = 0;
    int64_t index_version_ = 0;
    std::vector<BlockId> reserved_;
    std::vector<BlockId> new_;
    std::vector<BlockId> computing_;
    std::vector<Freed> freed_;  // scratch, kept for its memory
    std::vector<BlockHistory> history_;
    IndexChanges changes_;
};

}  // namespace kvpager
