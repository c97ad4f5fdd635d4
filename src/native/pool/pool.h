// The physical blocks: reference counts, free order, hash index.
#pragma once

#include <limits>
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
// carries a hash exactly if the index finds it. It does not know requests, tokens or attention kinds: a table is a list
// of ids to it, and whoever calls says what is dead. Ids that come in are ids of this pool.
class BlockPool {
public:
    BlockPool(int64_t num_blocks, int64_t num_groups, EvictionOrder order, bool logs_changes, bool is_observed)
        : num_blocks_(checked_size(num_blocks)),
          num_groups_(num_groups),
          order_(order),
          logs_changes_(logs_changes),
          is_observed_(is_observed),
          blocks_(static_cast<size_t>(num_blocks) + FreeQueue::num_sentinels),
          external_(static_cast<size_t>(num_blocks)),
          queue_(blocks_.data(), num_blocks_),
          index_(blocks_.data(), static_cast<size_t>(num_blocks)),
          num_free_(num_blocks - 1) {
        if (num_groups >= 0 && num_groups <= std::numeric_limits<GroupId>::max()) return;
        fail(ErrorKind::config, "num_groups must be 0 to %d, got %lld", std::numeric_limits<GroupId>::max(),
             Long{num_groups});
    }

    int64_t num_blocks() const { return num_blocks_; }
    int64_t num_groups() const { return num_groups_; }
    int64_t num_free() const { return num_free_; }
    int64_t num_popped() const { return num_popped_; }
    int64_t num_reserved() const { return std::ssize(reserved_); }
    int64_t num_held() const { return num_blocks_ - 1 - num_free_ - num_popped_ - num_reserved(); }
    int64_t num_evictions() const { return num_evictions_; }
    int64_t index_version() const { return index_version_; }
    EvictionOrder order() const { return order_; }
    bool logs_changes() const { return logs_changes_; }
    const std::vector<BlockId>& reserved() const { return reserved_; }
    int32_t ref_count(BlockId block) const { return blocks_[block].refs; }
    int32_t external_count(BlockId block) const { return external_[block]; }
    bool is_cached(BlockId block) const { return blocks_[block].is(in_index); }
    bool is_computing(BlockId block) const { return blocks_[block].is(computing); }
    GroupId group_of(BlockId block) const { return blocks_[block].group; }
    const FreeQueue& queue() const { return queue_; }
    const HashIndex& index() const { return index_; }

    // -- look-ups: read only -----------------------------------------------------------------------

    // Per group, the oldest copies of the leading positions (of `stop`) that all groups have. O(answer)
    std::vector<BlockIds> prefix(std::span<const GroupId> groups, const GroupHashes& hashes, int64_t stop) const {
        std::vector<BlockIds> found(groups.size());
        walk(groups, hashes, 0, 1, stop, [&](int64_t, size_t j, BlockId block) { found[j].push_back(block); });
        return found;
    }

    // The smallest p >= start such that positions [p, stop) are all cached in all groups. O(stop - p)
    int64_t run_start(std::span<const GroupId> groups, const GroupHashes& hashes, int64_t start, int64_t stop) const {
        if (start >= stop) return start;
        return stop - walk(groups, hashes, stop - 1, -1, stop - start, [](int64_t, size_t, BlockId) {});
    }

    // Nulls for [0, start), then the oldest copy of each of [start, stop), which are all cached. O(stop)
    BlockIds lookup(GroupId group, const GroupHashes& hashes, int64_t start, int64_t stop) const {
        BlockIds found(std::max(start, stop), null_block);
        walk({&group, 1}, hashes, start, 1, stop - start,
             [&](int64_t position, size_t, BlockId block) { found[position] = block; });
        return found;
    }

    // Whether every block, or the last one, still is in the index under its position's hash. O(blocks)
    bool serves(const BlockIds& blocks, GroupId group, const GroupHashes& hashes, bool last_only) const {
        for (int64_t position = std::ssize(blocks) - 1; position >= 0; --position) {
            BlockId block = blocks[position];
            if (block == null_block) continue;
            if (position >= hashes.num_positions() || !index_.carries(block, hashes[position], group)) return false;
            if (last_only) break;
        }
        return true;
    }

    // Blocks of [start, stop) that are free: adopting them takes from the supply. O(stop - start)
    int64_t count_evictable(const BlockIds& blocks, int64_t start, int64_t stop) const {
        return count_if(blocks, start, stop,
                        [&](BlockId block) { return block != null_block && blocks_[block].refs == 0; });
    }

    // Blocks of [start, stop) that nobody else refers to: releasing them adds to the supply. O(stop - start)
    int64_t count_exclusive(const BlockIds& blocks, int64_t start, int64_t stop) const {
        return count_if(blocks, start, stop, [&](BlockId block) { return blocks_[block].refs == 1; });
    }

    // Leading blocks that `num_holders` requests refer to. O(answer)
    int64_t num_shared_by(const BlockIds& blocks, int64_t num_holders) const {
        auto is_apart = [&](BlockId block) { return blocks_[block].refs - external_[block] != num_holders; };
        return std::find_if(blocks.begin(), blocks.end(), is_apart) - blocks.begin();
    }

    // -- tables: references of requests ------------------------------------------------------------

    // Appends the hits of positions [start, stop) and takes a reference to each.
    void adopt(BlockIds& table, const BlockIds& hits, int64_t start, int64_t stop) {
        for (int64_t position = start; position < stop; ++position) {
            BlockId block = hits[position];
            table.push_back(block);
            if (block == null_block) continue;
            refer(block, 0);
            blocks_[block].flags |= was_hit;
            remember(BlockHistory::used, block);
        }
    }

    // Appends blocks from the front of the queue; `zeroed`: take_new_block_ids tells of them.
    void extend(BlockIds& table, int64_t num_blocks, bool zeroed) {
        check_supply(num_blocks);
        size_t length = table.size();
        table.resize(length + num_blocks);
        std::span<BlockId> taken = std::span(table).subspan(length);
        take(taken);
        for (BlockId block : taken) {
            if (!zeroed || blocks_[block].is(needs_zeroing)) continue;
            blocks_[block].flags |= needs_zeroing;
            new_.push_back(block);
        }
    }

    // Appends positions that nobody will read.
    void extend_null(BlockIds& table, int64_t num_positions) {
        if (num_positions > 0) table.resize(table.size() + num_positions, null_block);
    }

    // Appends the block of position `source` and leaves null there.
    void move(BlockIds& table, int64_t source) {
        table.push_back(table[source]);
        table[source] = null_block;
    }

    // Gives back dead blocks of [start, stop), tail first, leaving nulls; those in `keep` are useful all the same.
    void release(BlockIds& table, int64_t start, int64_t stop, Range keep) {
        Freed* out = room_for_freed(stop - start);
        for (int64_t position = stop - 1; position >= start; --position) {
            out = drop(out, std::exchange(table[position], null_block), !keep.holds(position), 0);
        }
        requeue(out);
    }

    // Gives back all blocks of one request's tables, which end up empty. Tail first; across groups by end position, so
    // that what one prefix position needs dies together (by recency: group after group).
    void free_tables(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes,
                     std::span<const Range> dead, std::span<const Range> keep) {
        size_t most = 0;
        for (BlockIds* table : tables) most += table->size();
        Freed* out = room_for_freed(most);
        tail_first(tables, block_sizes, [&](size_t i, int64_t position) {
            bool is_dead = dead[i].holds(position) && !keep[i].holds(position);
            out = drop(out, (*tables[i])[position], is_dead, static_cast<uint16_t>(is_dead_first() ? 0 : i));
        });
        requeue(out);
        for (BlockIds* table : tables) table->clear();
    }

    // Hands a request's blocks out, in the reverse of the order in which free_tables gives them back (by recency: each
    // group's heads first); their references are external ones now.
    std::vector<BlockId> pop_tables(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes) {
        std::vector<BlockId> blocks;
        auto take_out = [&](size_t i, int64_t position) {
            if (BlockId block = (*tables[i])[position]; block != null_block) blocks.push_back(block);
        };
        if (is_dead_first()) {
            tail_first(tables, block_sizes, take_out);
            std::reverse(blocks.begin(), blocks.end());
        } else {
            for (size_t i = 0; i < tables.size(); ++i) {
                for (int64_t position = 0; position < std::ssize(*tables[i]); ++position) take_out(i, position);
            }
        }
        for (BlockId block : blocks) change_counts(block, 0, 1);
        for (BlockIds* table : tables) table->clear();
        return blocks;
    }

    // Enters the blocks of [start, stop) into the index; nulls and cached ones are passed over. Appends the runs of
    // positions whose hash was new to the index.
    void commit(BlockIds& table, GroupId group, const GroupHashes& hashes, int64_t start, int64_t stop,
                std::vector<Range>& runs) {
        stop = std::min(stop, hashes.num_positions());
        uint32_t tags[window];
        auto fetch = [&](int64_t i) {
            hashes.prefetch_hash(start + i + window);
            tags[i % window] = prefetch_insertion(table[start + i], hashes[start + i], group);
        };
        auto enter = [&](int64_t i) {
            int64_t position = start + i;
            BlockId block = table[position];
            if (block == null_block || is_cached(block)) return;
            if (!index_.insert(block, tags[i % window], hashes[position], group)) return;
            if (!runs.empty() && runs.back().stop == position) {
                ++runs.back().stop;
            } else {
                runs.push_back({position, position + 1});
            }
        };
        pipelined(stop - start, window - 1, fetch, enter);
    }

    // Ask for what a release, an eviction and a commit will touch of one block.
    void prefetch_block(BlockId block) const {
        prefetch(&blocks_[block]);
        index_.prefetch_tag(block);
    }
    void prefetch_eviction(BlockId block) const { index_.prefetch_slot(index_.tag_of(block)); }
    void prefetch_commit(const BlockIds& table, GroupId group, const GroupHashes& hashes, int64_t position) const {
        if (position >= std::min(std::ssize(table), hashes.num_positions())) return;
        prefetch_insertion(table[position], hashes[position], group);
    }

    // States that this step computes can be hit from the next one on.
    void compute(const BlockIds& table, Range positions) {
        for (int64_t position = positions.start; position < std::min(positions.stop, std::ssize(table)); ++position) {
            BlockId block = table[position];
            if (block == null_block || is_computing(block)) continue;
            blocks_[block].flags |= computing;
            computing_.push_back(block);
        }
    }
    void new_step_starts() {
        for (BlockId block : std::exchange(computing_, {})) unset(block, computing);
    }

    // -- blocks by id: external references ---------------------------------------------------------

    std::vector<BlockId> allocate(int64_t num_blocks) {
        std::vector<BlockId> taken = take_some(num_blocks);
        for (BlockId block : taken) change_counts(block, 0, 1);
        return taken;
    }

    void touch(std::span<const BlockId> blocks) {
        for (BlockId block : blocks) {
            refer(block, 1);
            remember(BlockHistory::used, block);
        }
    }

    // Returns what was popped, allocated or touched, tail first. O(ids log ids)
    void free_blocks(std::span<const BlockId> blocks) {
        check_external(blocks);
        Freed* out = room_for_freed(std::ssize(blocks));
        for (BlockId block : blocks) {
            change_counts(block, -1, -1);
            *out++ = {block, false, blocks_[block].refs == 0, 0};
        }
        requeue(out);
    }

    // Takes blocks out of the index; one that is free is next to be allocated.
    void evict_blocks(std::span<const BlockId> blocks) {
        for (BlockId block : blocks) {
            if (!is_cached(block)) continue;
            evict(block);
            if (blocks_[block].refs > 0 || !is_dead_first()) continue;
            queue_.remove(block);
            FreeQueue::Run front = queue_.at_front();
            front.push(block);
            front.close();
        }
    }

    // Empties the index if no block is in use. O(pool)
    bool reset_prefix_cache() {
        if (num_held() != 0 || num_popped_ != 0) return false;
        clear_index();
        return true;
    }

    // Takes every block out of the index, in use or not. O(pool)
    void clear_index() {
        ++index_version_;
        index_.clear(queue_.next_unused());
        for (BlockId block = 0; block < queue_.next_unused(); ++block) unset(block, was_hit);
        queue_.forget_recency();
        remember(BlockHistory::reset, null_block);
        if (logs_changes_) changes_.changes.push_back({IndexChange::cleared, 0, 0});
    }

    // Takes blocks for good.
    std::vector<BlockId> reserve(int64_t num_blocks) {
        std::vector<BlockId> taken = take_some(num_blocks);
        reserved_.insert(reserved_.end(), taken.begin(), taken.end());
        return taken;
    }

    // The blocks to be zeroed since the last call, each once: at most the pool's, however long nobody asks.
    std::vector<BlockId> take_new_block_ids() {
        for (BlockId block : new_) unset(block, needs_zeroing);
        return std::exchange(new_, {});
    }

    // What happened since the last time.
    IndexChanges take_changes() { return std::exchange(changes_, {}); }
    std::vector<BlockHistory> take_history() { return std::exchange(history_, {}); }
    bool has_history() const { return !history_.empty(); }

private:
    // How far look-ups and commits run ahead of themselves, so that memory is fetched while others are compared.
    static constexpr int64_t window = 32;

    // A block that loses a reference. `is_dead`: no later token of its request reads it, and no hit is known to need
    // it.
    struct Freed {
        BlockId block;
        bool is_dead;
        bool is_last;    // no reference is left
        uint16_t batch;  // blocks of one batch that were never cached keep their order at the queue's front
    };

    static BlockId checked_size(int64_t num_blocks) {
        constexpr int64_t most = std::numeric_limits<BlockId>::max() - int64_t{FreeQueue::num_sentinels};
        if (num_blocks >= 1 && num_blocks <= most) return static_cast<BlockId>(num_blocks);
        fail(ErrorKind::config, "num_blocks must be 1 to %lld, got %lld", Long{most}, Long{num_blocks});
    }

    bool is_dead_first() const { return order_ == EvictionOrder::dead_first; }
    void unset(BlockId block, BlockFlag flag) { blocks_[block].flags &= static_cast<uint16_t>(~flag); }

    template <typename Is>
    int64_t count_if(const BlockIds& blocks, int64_t start, int64_t stop, Is is) const {
        start = std::max<int64_t>(start, 0), stop = std::min(stop, std::ssize(blocks));
        return start >= stop ? 0 : std::count_if(blocks.begin() + start, blocks.begin() + stop, is);
    }

    // Looks positions first, first + step, … up in all groups, `count` of them, and calls visit(position, group's
    // place, oldest copy) until one is missing somewhere. Gives how many are there. Most prompts that miss do so at
    // once: little is fetched ahead for those.
    template <typename Visit>
    int64_t walk(std::span<const GroupId> groups, const GroupHashes& hashes, int64_t first, int64_t step, int64_t count,
                 Visit visit) const {
        const size_t size = groups.size();
        std::vector<uint32_t> tags(window * size), slots(window * size);
        BlockIds found(size);
        for (int64_t start = 0, stop; start < count; start = stop) {
            stop = std::min(count, start + (start == 0 ? 4 : window));
            for (int64_t i = stop; i < std::min(count, stop + window); ++i) hashes.prefetch_hash(first + i * step);
            size_t at = 0;
            for (int64_t i = start; i < stop; ++i) {
                Digest digest = hashes[first + i * step];
                for (GroupId group : groups) index_.prefetch_slot(tags[at++] = index_.tag(digest, group));
            }
            for (size_t i = 0; i < at; ++i) slots[i] = index_.prefetch_candidate(tags[i]);
            at = 0;
            for (int64_t i = start; i < stop; ++i) {
                Digest digest = hashes[first + i * step];
                for (size_t j = 0; j < size; ++j, ++at) {
                    found[j] = index_.find_from(slots[at], tags[at], digest, groups[j]);
                    if (found[j] == null_block) return i;
                }
                for (size_t j = 0; j < size; ++j) visit(first + i * step, j, found[j]);
            }
        }
        return std::max<int64_t>(count, 0);
    }

    void check_supply(int64_t num_blocks) const {
        if (num_blocks >= 0 && num_blocks <= num_free_) return;
        fail(ErrorKind::out_of_blocks, "%lld blocks were asked for, %lld are free", Long{num_blocks}, Long{num_free_});
    }

    void check_external(std::span<const BlockId> blocks) const {
        std::vector<BlockId> sorted(blocks.begin(), blocks.end());
        std::sort(sorted.begin(), sorted.end());
        for (auto at = sorted.begin(), next = at; at != sorted.end(); at = next) {
            next = std::upper_bound(at, sorted.end(), *at);
            if (external_[*at] >= next - at) continue;
            fail(ErrorKind::block_state,
                 "block %d is freed %dx, but only %d of its %d references were handed out; free what "
                 "pop_blocks_for_free, "
                 "allocate or touch gave you, once (a request's own blocks go back with manager.free)",
                 *at, static_cast<int>(next - at), external_[*at], blocks_[*at].refs);
        }
    }

    // Gives the tag under which the block is to be entered.
    uint32_t prefetch_insertion(BlockId block, Digest hash, GroupId group) const {
        uint32_t tag = index_.tag(hash, group);
        prefetch_block(block);
        index_.prefetch_digest(block);
        index_.prefetch_slot(tag);
        return tag;
    }

    std::vector<BlockId> take_some(int64_t num_blocks) {
        check_supply(num_blocks);
        std::vector<BlockId> taken(num_blocks);
        take(taken);
        return taken;
    }

    // Takes blocks from the front of the queue; there are enough. What a block's eviction touches is fetched while
    // those before it are evicted.
    void take(std::span<BlockId> out) {
        queue_.pop(out);
        auto fetch_tag = [&](int64_t i) { index_.prefetch_tag(out[i]); };
        auto fetch_slot = [&](int64_t i) {
            if (is_cached(out[i])) prefetch_eviction(out[i]);
        };
        auto allot = [&](int64_t i) {
            if (is_cached(out[i])) {
                evict(out[i]);
                ++num_evictions_;
            }
            blocks_[out[i]].refs = 1;
            remember(BlockHistory::allocated, out[i]);
        };
        pipelined(std::ssize(out), window / 2, fetch_tag, fetch_slot, allot);
        num_free_ -= std::ssize(out);
    }

    // Takes a block out of the index; logs it if it was the last copy.
    void evict(BlockId block) {
        if (index_.erase(block) && logs_changes_) {
            GroupId group = group_of(block);
            std::vector<IndexChange>& changes = changes_.changes;
            if (changes.empty() || changes.back().what != IndexChange::removed || changes.back().group != group) {
                changes.push_back({IndexChange::removed, group, 0});
            }
            ++changes.back().num_hashes;
            std::memcpy(changes_.removed.emplace_back().bytes, index_.digest(block), digest_bytes);
        }
        unset(block, was_hit);
        ++index_version_;
        remember(BlockHistory::evicted, block);
    }

    void refer(BlockId block, int external) {
        Block& referred = blocks_[block];
        if (referred.refs == 0) {
            queue_.remove(block);
            --num_free_;
        }
        if (external == 0 && !referred.is(held_externally)) {
            ++referred.refs;
        } else {
            change_counts(block, 1, external);
        }
    }

    // Keeps count of the blocks that have external references only.
    void change_counts(BlockId block, int refs, int external) {
        Block& changed = blocks_[block];
        int32_t& external_refs = external_[block];
        num_popped_ -= external_refs > 0 && external_refs == changed.refs;
        changed.refs += refs;
        external_refs += external;
        num_popped_ += external_refs > 0 && external_refs == changed.refs;
        unset(block, held_externally);
        if (external_refs > 0) changed.flags |= held_externally;
    }

    // Visits all positions, tail first: across tables by end position, or by recency table after table.
    template <typename Visit>
    void tail_first(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes, Visit visit) const {
        std::vector<int64_t> lengths;
        for (BlockIds* table : tables) lengths.push_back(std::ssize(*table));
        for (size_t i = 0; (!is_dead_first() || tables.size() == 1) && i < tables.size(); ++i) {
            while (lengths[i] > 0) visit(i, --lengths[i]);
        }
        for (;;) {
            int64_t end = 0;
            for (size_t i = 0; i < tables.size(); ++i) end = std::max(end, lengths[i] * block_sizes[i]);
            if (end == 0) return;
            for (size_t i = 0; i < tables.size(); ++i) {
                if (lengths[i] * block_sizes[i] == end) visit(i, --lengths[i]);
            }
        }
    }

    Freed* room_for_freed(int64_t most) {
        if (std::ssize(freed_) < most) freed_.resize(most);
        return freed_.data();
    }

    // Drops one reference that a request holds; the block goes to the end of `freed_`, which is at `out`.
    Freed* drop(Freed* out, BlockId id, bool is_dead, uint16_t batch) {
        if (id == null_block) return out;
        Block& block = blocks_[id];
        --block.refs;
        if (block.is(held_externally)) num_popped_ += block.refs == external_[id];
        *out = {id, is_dead, block.refs == 0, batch};
        return out + 1;
    }

    // Queues what has no reference left, in this order.
    void requeue(const Freed* end) {
        FreeQueue::Run front = queue_.at_front(), dead = queue_.behind_dead(), recent = queue_.behind_recent();
        uint16_t batch = 0;
        for (const Freed* one = freed_.data(); one != end; ++one) {
            if (!one->is_last) continue;
            uint16_t flags = blocks_[one->block].flags;
            ++num_free_;
            if ((flags & in_index) == 0) {
                if (one->batch != batch) {
                    front.close();
                    front = queue_.at_front();
                    batch = one->batch;
                }
                front.push(one->block);
            } else if (one->is_dead && is_dead_first() && (flags & was_hit) == 0) {
                dead.push(one->block);
            } else {
                recent.push(one->block);
            }
        }
        front.close();
        dead.close();
        recent.close();
    }

    void remember(BlockHistory::What what, BlockId block) {
        if (is_observed_) history_.push_back({what, block});
    }

    BlockId num_blocks_;
    int64_t num_groups_;
    EvictionOrder order_;
    bool logs_changes_, is_observed_;
    ZeroedArray<Block> blocks_;
    ZeroedArray<int32_t>
        external_;  // references to a block that no request holds: popped, allocated or touched by hand
    FreeQueue queue_;
    HashIndex index_;
    int64_t num_free_;
    int64_t num_popped_ = 0;  // blocks with external references only
    int64_t num_evictions_ = 0;
    int64_t index_version_ = 0;  // grows whenever a hash leaves the index
    std::vector<BlockId> reserved_, new_, computing_;
    std::vector<Freed> freed_;  // scratch, kept for its memory
    std::vector<BlockHistory> history_;
    IndexChanges changes_;
};

}  // namespace kvpager
