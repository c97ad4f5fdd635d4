// The physical blocks: reference counts, free order, hash index, events. The contract of each verb
// is in _native.pyi.
//
// No verb lets Python run while the pool is between two states: arguments are converted before,
// answers are made and observers are told after. So a callback, a finalizer or another thread that
// calls into the pool finds it whole. An error changes nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <vector>

#include "free_queue.h"
#include "hash_index.h"
#include "hashes.h"
#include "hashing.h"

namespace kvpager {

// Half-open, as Python's range with step 1.
struct Range {
    int64_t start = 0;
    int64_t stop = 0;

    bool holds(int64_t position) const { return start <= position && position < stop; }
};

// A block that loses a reference. `dead`: no later token of its request reads it, and no hit is known to need it.
struct Freed {
    BlockId block;
    bool dead;
    bool last;       // no reference is left
    uint16_t batch;  // what was never cached of a batch goes to the queue's front in one piece
};

class Pool {
public:
    Pool(int64_t num_blocks, int64_t num_groups, nanobind::handle eviction_order, bool enable_events,
         nanobind::object residency);

    int64_t num_blocks() const { return num_blocks_; }
    int64_t num_free() const { return num_free_; }
    int64_t num_popped() const { return num_popped_; }
    int64_t num_reserved() const { return static_cast<int64_t>(reserved_.size()); }
    int64_t num_held() const { return num_blocks_ - 1 - num_free_ - num_popped_ - num_reserved(); }
    int64_t num_evictions() const { return num_evictions_; }
    int64_t generation() const { return generation_; }
    bool dead_first() const { return dead_first_; }
    bool logs_events() const { return logs_events_; }
    const std::vector<BlockId>& reserved() const { return reserved_; }
    int32_t ref_count(BlockId block) const { return blocks_[block].refs; }
    int32_t outside_count(BlockId block) const { return outside_[block]; }
    bool is_cached(BlockId block) const { return blocks_[block].is(in_index); }
    const FreeQueue& queue() const { return queue_; }
    const HashIndex& index() const { return index_; }
    Group group_of(BlockId block) const { return blocks_[block].group; }

    // Conversions that name what is wrong.
    BlockId checked(nanobind::handle id) const;
    BlockId checked_real(nanobind::handle id) const;
    Group checked_group(int64_t group) const;

    // Look-ups.
    std::vector<BlockList> prefix(std::span<const Group> groups, const Hashes& hashes, int64_t stop) const;
    int64_t run_start(std::span<const Group> groups, const Hashes& hashes, int64_t start, int64_t stop) const;
    BlockList lookup(Group group, const Hashes& hashes, int64_t start, int64_t stop) const;
    bool serves_hit(const BlockList& blocks, Group group, const Hashes& hashes) const;
    int64_t count_evictable(const BlockList& blocks, int64_t start, int64_t stop) const;
    int64_t count_exclusive(const BlockList& blocks, int64_t start, int64_t stop) const;
    int64_t num_shared_by(const BlockList& blocks, int64_t num_holders) const;

    // Tables.
    void adopt(BlockList& table, const BlockList& hits, int64_t start, int64_t stop);
    void extend(BlockList& table, int64_t num_blocks, bool note);
    void extend_null(BlockList& table, int64_t num_positions);
    void move(BlockList& table, int64_t source);
    void release(BlockList& table, int64_t start, int64_t stop, Range keep);
    void free_tables(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes,
                     std::span<const Range> dead, std::span<const Range> keep);
    std::vector<BlockId> pop_tables(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes);
    // Appends the runs of positions whose hash was new to the index.
    void commit(BlockList& table, Group group, const Hashes& hashes, int64_t start, int64_t stop,
                std::vector<Range>& runs);

    // Fetch what a release, an eviction and a commit will touch of one block.
    void prefetch_block(BlockId block) const {
        prefetch(&blocks_[block]);
        index_.prefetch_tag(block);
    }
    void prefetch_eviction(BlockId block) const {
        if (block < num_blocks_) index_.prefetch_slot(index_.tag_of(block));
    }
    void prefetch_commit(const BlockList& table, Group group, const Hashes& hashes, int64_t position) const;

    // States that this step computes: they can be hit from the next one on.
    void compute(const BlockList& table, Range positions);
    bool is_computing(BlockId block) const { return blocks_[block].is(computing); }
    void new_step_starts();

    // Blocks by id.
    std::vector<BlockId> allocate(int64_t num_blocks);
    void touch(std::span<const BlockId> blocks);
    void free_blocks(std::span<const BlockId> blocks);
    void evict_blocks(std::span<const BlockId> blocks);
    bool reset_prefix_cache();
    void clear_index();
    std::vector<BlockId> reserve(int64_t num_blocks);
    std::vector<BlockId> take_new_block_ids();

    // Events.
    void log(nanobind::object event);
    nanobind::list take_events();

    // Tells the residency sampler what happened since the last time: the last thing a verb does.
    void tell_observer();

    // For Python's cycle collector.
    int traverse(visitproc visit, void* argument);
    void clear_references();

private:
    enum class Happened : uint8_t { allocated, used, evicted, reset };
    struct Note {
        Happened what;
        BlockId block;
    };
    enum class Change : uint8_t { removed, cleared, logged };
    struct Event {
        Change what;
        Group group;
        uint32_t num_hashes;  // of `removed_`, in order: those that left one after the other are one event
        nanobind::object object;
    };

    class Probes;

    void check_range(const BlockList& list, int64_t start, int64_t stop) const;
    void check_ids(const BlockList& list, int64_t start, int64_t stop) const;
    void check_supply(int64_t num_blocks) const;
    uint32_t prefetch_insertion(BlockId block, Digest hash, Group group) const;
    void take(std::span<BlockId> out);
    void evict(BlockId block);
    void refer(BlockId block, int outside);
    void change_counts(BlockId block, int refs, int outside);
    template <typename Visit>
    void tail_first(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes, Visit visit) const;
    Freed* room_for_freed(size_t most);
    Freed* drop(Freed* out, BlockId id, bool dead, uint16_t batch);
    [[noreturn]] void refuse_drop(const Freed* end, BlockId id);
    void requeue(const Freed* end);
    std::vector<BlockId> heads_first(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes);
    void note(Happened what, BlockId block) {
        if (observed_) notes_.push_back({what, block});
    }

    BlockId num_blocks_;
    int64_t num_groups_;
    bool dead_first_;
    bool logs_events_;
    bool observed_;
    ZeroedArray<Block> blocks_;
    ZeroedArray<int32_t> outside_;  // references of outsiders: popped, allocated or touched by hand
    FreeQueue queue_;
    HashIndex index_;
    int64_t num_free_;
    int64_t num_popped_ = 0;  // blocks that outsiders alone refer to
    int64_t num_evictions_ = 0;
    int64_t generation_ = 0;
    std::vector<BlockId> reserved_;
    std::vector<BlockId> new_;
    std::vector<BlockId> computing_;
    std::vector<Freed> freed_;  // scratch, kept for its memory
    std::vector<Note> notes_;
    std::vector<Event> events_;
    std::vector<Hash> removed_;
    nanobind::object residency_;
};

}  // namespace kvpager
