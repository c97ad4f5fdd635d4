#include "pool.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace kvpager {

namespace {

using Long = long long;  // what printf's %lld takes

// How far look-ups and commits run ahead of themselves, so that memory is fetched while others are compared.
constexpr int64_t window = 32;

BlockId checked_size(int64_t num_blocks) {
    constexpr int64_t most = std::numeric_limits<BlockId>::max() - static_cast<int64_t>(FreeQueue::num_sentinels);
    if (num_blocks < 1 || num_blocks > most) {
        fail(ErrorKind::config, "num_blocks must be 1 to %lld, got %lld", Long{most}, Long{num_blocks});
    }
    return static_cast<BlockId>(num_blocks);
}

}  // namespace

BlockPool::BlockPool(int64_t num_blocks, int64_t num_groups, EvictionOrder order, bool logs_changes, bool is_observed)
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
    if (num_groups < 0 || num_groups > std::numeric_limits<GroupId>::max()) {
        fail(ErrorKind::config, "num_groups must be 0 to %d, got %lld", std::numeric_limits<GroupId>::max(),
             Long{num_groups});
    }
}

void BlockPool::check_range(const BlockIds& list, int64_t start, int64_t stop) const {
    if (start < 0 || stop > std::ssize(list)) {
        fail(ErrorKind::invalid_request, "positions %lld to %lld are not in a list of %lld blocks", Long{start}, Long{stop},
              Long{std::ssize(list)});
    }
}

// A list may have been made by hand, or be another pool's.
void BlockPool::check_ids(const BlockIds& list, int64_t start, int64_t stop) const {
    for (int64_t position = start; position < stop; ++position) {
        if (list[position] >= num_blocks_) {
            fail(ErrorKind::unknown_block, "block id %d is not in the pool; ids are 0 to %d", list[position],
                  num_blocks_ - 1);
        }
    }
}

void BlockPool::check_supply(int64_t num_blocks) const {
    if (num_blocks < 0 || num_blocks > num_free_) {
        fail(ErrorKind::out_of_blocks, "%lld blocks were asked for, %lld are free", Long{num_blocks}, Long{num_free_});
    }
}

// -- look-ups -----------------------------------------------------------------------------------

// What look-ups of some positions in some groups need to know of each, fetched ahead.
class BlockPool::Probes {
public:
    Probes(const HashIndex& index, std::span<const GroupId> groups)
        : index_(index), groups_(groups), tags_(static_cast<size_t>(window) * groups.size()), slots_(tags_.size()) {}

    // Positions first, first + step, … : `count` of them.
    void fetch(const GroupHashes& hashes, int64_t first, int64_t step, int64_t count) {
        size_t at = 0;
        for (int64_t i = 0; i < count; ++i) {
            Digest digest = hashes[first + i * step];
            for (GroupId group : groups_) index_.prefetch_slot(tags_[at++] = index_.tag(digest, group));
        }
        for (size_t i = 0; i < at; ++i) slots_[i] = index_.prefetch_candidate(tags_[i]);
    }

    // The oldest block of position number `i` in group number `j`, or the null block.
    BlockId find(int64_t i, size_t j, Digest digest) const {
        size_t at = static_cast<size_t>(i) * groups_.size() + j;
        return index_.find_from(slots_[at], tags_[at], digest, groups_[j]);
    }

private:
    const HashIndex& index_;
    std::span<const GroupId> groups_;
    std::vector<uint32_t> tags_, slots_;
};

std::vector<BlockIds> BlockPool::prefix(std::span<const GroupId> groups, const GroupHashes& hashes, int64_t stop) const {
    hashes.require(0, stop);
    std::vector<BlockIds> found(groups.size());
    if (groups.empty()) return found;
    Probes probes(index_, groups);
    // Most prompts that miss do so at once: little is fetched for those.
    for (int64_t start = 0, count; start < stop; start += count) {
        count = std::min<int64_t>(start == 0 ? 4 : window, stop - start);
        for (int64_t i = 0; i < count; ++i) hashes.prefetch_hash(start + count + i);
        probes.fetch(hashes, start, 1, count);
        for (BlockIds& list : found) list.resize(start + count);
        for (int64_t i = 0; i < count; ++i) {
            Digest digest = hashes[start + i];
            for (size_t j = 0; j < groups.size(); ++j) {
                BlockId block = probes.find(i, j, digest);
                if (block == null_block) {
                    for (BlockIds& list : found) list.resize(start + i);
                    return found;
                }
                found[j][start + i] = block;
            }
        }
    }
    return found;
}

int64_t BlockPool::run_start(std::span<const GroupId> groups, const GroupHashes& hashes, int64_t start, int64_t stop) const {
    if (start >= stop) return start;
    hashes.require(start, stop);
    Probes probes(index_, groups);
    for (int64_t end = stop; end > start; end -= window) {
        int64_t count = std::min<int64_t>(window, end - start);
        probes.fetch(hashes, end - 1, -1, count);
        for (int64_t i = 0; i < count; ++i) {
            Digest digest = hashes[end - 1 - i];
            for (size_t j = 0; j < groups.size(); ++j) {
                if (probes.find(i, j, digest) == null_block) return end - i;
            }
        }
    }
    return start;
}

BlockIds BlockPool::lookup(GroupId group, const GroupHashes& hashes, int64_t start, int64_t stop) const {
    if (start < stop) hashes.require(start, stop);
    if (start < 0 || start > std::numeric_limits<int32_t>::max()) {
        fail(ErrorKind::invalid_request, "start must be at least 0 and below 2^31, got %lld", Long{start});
    }
    BlockIds found;
    found.reserve(std::max(start, stop));
    found.resize(start, null_block);
    for (int64_t position = start; position < stop; ++position) {
        if (position + 4 < stop) index_.prefetch_slot(index_.tag(hashes[position + 4], group));
        BlockId block = index_.find(index_.tag(hashes[position], group), hashes[position], group);
        if (block == null_block) {
            fail(ErrorKind::block_state, "position %lld is not cached in group %d", Long{position}, group);
        }
        found.push_back(block);
    }
    return found;
}

bool BlockPool::serves(const BlockIds& blocks, GroupId group, const GroupHashes& hashes) const {
    check_ids(blocks, 0, std::ssize(blocks));
    for (int64_t position = 0; position < std::ssize(blocks); ++position) {
        if (blocks[position] == null_block) continue;
        hashes.require(position, position + 1);
        if (!index_.carries(blocks[position], hashes[position], group)) return false;
    }
    return true;
}

int64_t BlockPool::count_evictable(const BlockIds& blocks, int64_t start, int64_t stop) const {
    start = std::max<int64_t>(start, 0), stop = std::min(stop, std::ssize(blocks));
    check_ids(blocks, start, stop);
    int64_t count = 0;
    for (int64_t position = start; position < stop; ++position) {
        BlockId block = blocks[position];
        count += block != null_block && at(block).refs == 0;
    }
    return count;
}

int64_t BlockPool::count_exclusive(const BlockIds& blocks, int64_t start, int64_t stop) const {
    start = std::max<int64_t>(start, 0), stop = std::min(stop, std::ssize(blocks));
    check_ids(blocks, start, stop);
    int64_t count = 0;
    for (int64_t position = start; position < stop; ++position) count += at(blocks[position]).refs == 1;
    return count;
}

int64_t BlockPool::num_shared_by(const BlockIds& blocks, int64_t num_holders) const {
    int64_t position = 0;
    for (; position < std::ssize(blocks); ++position) {
        check_ids(blocks, position, position + 1);
        BlockId block = blocks[position];
        if (at(block).refs - external_[block] != num_holders) break;
    }
    return position;
}

// -- tables -------------------------------------------------------------------------------------

void BlockPool::adopt(BlockIds& table, const BlockIds& hits, int64_t start, int64_t stop) {
    if (start >= stop) return;
    check_range(hits, start, stop);
    check_ids(hits, start, stop);
    table.reserve(std::ssize(table) + (stop - start));
    for (int64_t position = start; position < stop; ++position) {
        BlockId block = hits[position];
        if (block != null_block) {
            refer(block, 0);
            at(block).flags |= was_hit;
            remember(BlockHistory::used, block);
        }
        table.push_back(block);
    }
}

void BlockPool::extend(BlockIds& table, int64_t num_blocks, bool zeroed) {
    check_supply(num_blocks);
    size_t length = table.size();
    table.resize(length + num_blocks);
    std::span<BlockId> taken = std::span(table).subspan(length);
    take(taken);
    if (!zeroed) return;
    if (num_blocks > 64) new_.reserve(new_.size() + num_blocks);
    for (BlockId block : taken) {
        if (at(block).is(needs_zeroing)) continue;
        at(block).flags |= needs_zeroing;
        new_.push_back(block);
    }
}

void BlockPool::extend_null(BlockIds& table, int64_t num_positions) {
    if (num_positions > 0) table.resize(std::ssize(table) + num_positions, null_block);
}

void BlockPool::move(BlockIds& table, int64_t source) {
    check_range(table, source, source + 1);
    BlockId moved = table[source];
    table.push_back(moved);
    table[source] = null_block;
}

void BlockPool::release(BlockIds& table, int64_t start, int64_t stop, Range keep) {
    if (start >= stop) return;
    check_range(table, start, stop);
    Freed* out = room_for_freed(stop - start);
    for (int64_t position = stop - 1; position >= start; --position) {
        out = drop(out, table[position], !keep.holds(position), 0);
    }
    requeue(out);
    std::fill(table.begin() + start, table.begin() + stop, null_block);
}

void BlockPool::free_tables(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes,
                       std::span<const Range> dead, std::span<const Range> keep) {
    size_t most = 0;
    for (BlockIds* table : tables) most += table->size();
    Freed* out = room_for_freed(most);
    tail_first(tables, block_sizes, [&](size_t i, int64_t position) {
        bool gone = dead[i].holds(position) && !keep[i].holds(position);
        out = drop(out, (*tables[i])[position], gone, static_cast<uint16_t>(is_dead_first() ? 0 : i));
    });
    requeue(out);
    for (BlockIds* table : tables) table->clear();
}

// Visits all positions, tail first: across tables by end position, or with "recency" table after table.
template <typename Visit>
void BlockPool::tail_first(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes, Visit visit) const {
    if (!is_dead_first() || tables.size() == 1) {
        for (size_t i = 0; i < tables.size(); ++i) {
            for (int64_t position = std::ssize(*tables[i]) - 1; position >= 0; --position) visit(i, position);
        }
        return;
    }
    std::vector<int64_t> lengths(tables.size());
    for (size_t i = 0; i < tables.size(); ++i) lengths[i] = std::ssize(*tables[i]);
    for (;;) {
        int64_t end = 0;
        for (size_t i = 0; i < tables.size(); ++i) end = std::max(end, lengths[i] * block_sizes[i]);
        if (end == 0) return;
        for (size_t i = 0; i < tables.size(); ++i) {
            if (lengths[i] * block_sizes[i] == end) visit(i, --lengths[i]);
        }
    }
}

std::vector<BlockId> BlockPool::pop_tables(std::span<BlockIds* const> tables, std::span<const int64_t> block_sizes) {
    std::vector<BlockId> popped = heads_first(tables, block_sizes);
    for (size_t i = 0; i < popped.size(); ++i) {
        if (blocks_[popped[i]].refs <= external_[popped[i]]) {
            for (size_t j = 0; j < i; ++j) change_counts(popped[j], 0, -1);
            fail(ErrorKind::block_state, "block %d is in a table, but no request holds it", popped[i]);
        }
        change_counts(popped[i], 0, 1);
    }
    for (BlockIds* table : tables) table->clear();
    return popped;
}

std::vector<BlockId> BlockPool::heads_first(std::span<BlockIds* const> tables,
                                            std::span<const int64_t> block_sizes) const {
    std::vector<BlockId> blocks;
    for (BlockIds* table : tables) {
        check_ids(*table, 0, std::ssize(*table));
        if (is_dead_first()) continue;
        std::copy_if(table->begin(), table->end(), std::back_inserter(blocks),
                     [](BlockId block) { return block != null_block; });
    }
    if (!is_dead_first()) return blocks;
    tail_first(tables, block_sizes, [&](size_t i, int64_t position) {
        if (BlockId block = (*tables[i])[position]; block != null_block) blocks.push_back(block);
    });
    std::reverse(blocks.begin(), blocks.end());
    return blocks;
}

void BlockPool::commit(BlockIds& table, GroupId group, const GroupHashes& hashes, int64_t start, int64_t stop,
                       std::vector<Range>& runs) {
    stop = std::min(stop, hashes.num_positions());
    if (start >= stop) return;
    check_range(table, start, stop);
    check_ids(table, start, stop);
    hashes.check(start, stop);
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

void BlockPool::prefetch_commit(const BlockIds& table, GroupId group, const GroupHashes& hashes, int64_t position) const {
    if (position >= std::min(std::ssize(table), hashes.num_positions())) return;
    prefetch_insertion(table[position], hashes[position], group);
}

// Gives the tag under which the block is to be entered.
uint32_t BlockPool::prefetch_insertion(BlockId block, Digest hash, GroupId group) const {
    uint32_t tag = index_.tag(hash, group);
    prefetch_block(block);
    index_.prefetch_digest(block);
    index_.prefetch_slot(tag);
    return tag;
}

void BlockPool::compute(const BlockIds& table, Range positions) {
    int64_t stop = std::min(positions.stop, std::ssize(table));
    for (int64_t position = positions.start; position < stop; ++position) {
        BlockId block = table[position];
        if (block == null_block || is_computing(block)) continue;
        at(block).flags |= computing;
        computing_.push_back(block);
    }
}

void BlockPool::new_step_starts() {
    for (BlockId block : computing_) at(block).flags &= static_cast<uint16_t>(~computing);
    computing_.clear();
}

// -- blocks by id -------------------------------------------------------------------------------

std::vector<BlockId> BlockPool::allocate(int64_t num_blocks) {
    check_supply(num_blocks);
    std::vector<BlockId> taken(num_blocks);
    take(taken);
    for (BlockId block : taken) change_counts(block, 0, 1);
    return taken;
}

void BlockPool::touch(std::span<const BlockId> blocks) {
    for (BlockId block : blocks) {
        refer(block, 1);
        remember(BlockHistory::used, block);
    }
}

void BlockPool::free_blocks(std::span<const BlockId> blocks) {
    std::vector<BlockId> sorted(blocks.begin(), blocks.end());
    std::sort(sorted.begin(), sorted.end());
    int32_t times = 0;
    for (size_t i = 0; i < sorted.size(); ++i) {
        ++times;
        BlockId block = sorted[i];
        if (i + 1 < sorted.size() && sorted[i + 1] == block) continue;
        if (external_[block] < times) {
            fail(ErrorKind::block_state,
                  "block %d is freed %dx, but only %d of its %d references were handed out; free what "
                  "pop_blocks_for_free, allocate or touch gave you, once (a request's own blocks go back with "
                  "manager.free)",
                  block, times, external_[block], at(block).refs);
        }
        times = 0;
    }
    Freed* out = room_for_freed(blocks.size());
    for (BlockId block : blocks) {
        change_counts(block, -1, -1);
        *out++ = {block, false, at(block).refs == 0, 0};
    }
    requeue(out);
}

void BlockPool::evict_blocks(std::span<const BlockId> blocks) {
    for (BlockId block : blocks) {
        if (!is_cached(block)) continue;
        evict(block);
        if (at(block).refs == 0 && is_dead_first()) {
            queue_.remove(block);
            FreeQueue::Run front = queue_.at_front();
            front.push(block);
            front.close();
        }
    }
}

bool BlockPool::reset_prefix_cache() {
    if (num_held() != 0 || num_popped_ != 0) return false;
    clear_index();
    return true;
}

void BlockPool::clear_index() {
    ++index_version_;
    index_.clear(queue_.next_unused());
    for (BlockId block = 0; block < queue_.next_unused(); ++block) {
        at(block).flags &= static_cast<uint16_t>(~was_hit);
    }
    queue_.forget_recency();
    remember(BlockHistory::reset, null_block);
    if (logs_changes_) changes_.changes.push_back({IndexChange::cleared, 0, 0});
}

std::vector<BlockId> BlockPool::reserve(int64_t num_blocks) {
    check_supply(num_blocks);
    std::vector<BlockId> taken(num_blocks);
    take(taken);
    reserved_.insert(reserved_.end(), taken.begin(), taken.end());
    return taken;
}

std::vector<BlockId> BlockPool::take_new_block_ids() {
    for (BlockId block : new_) at(block).flags &= static_cast<uint16_t>(~needs_zeroing);
    return std::exchange(new_, {});
}

// -- inside -------------------------------------------------------------------------------------

// Takes blocks from the front of the queue; there are enough.
void BlockPool::take(std::span<BlockId> out) {
    queue_.pop(out);
    // What a block's eviction touches is fetched while those before it are evicted.
    auto fetch_tag = [&](int64_t i) { index_.prefetch_tag(out[i]); };
    auto fetch_slot = [&](int64_t i) {
        if (is_cached(out[i])) prefetch_eviction(out[i]);
    };
    auto allot = [&](int64_t i) {
        if (is_cached(out[i])) {
            evict(out[i]);
            ++num_evictions_;
        }
        at(out[i]).refs = 1;
        remember(BlockHistory::allocated, out[i]);
    };
    pipelined(std::ssize(out), window / 2, fetch_tag, fetch_slot, allot);
    num_free_ -= std::ssize(out);
}

// Takes a block out of the index; tells it if it was the last copy.
void BlockPool::evict(BlockId block) {
    if (index_.erase(block) && logs_changes_) {
        GroupId group = group_of(block);
        std::vector<IndexChange>& changes = changes_.changes;
        if (changes.empty() || changes.back().what != IndexChange::removed || changes.back().group != group) {
            changes.push_back({IndexChange::removed, group, 0});
        }
        ++changes.back().num_hashes;
        std::memcpy(changes_.removed.emplace_back().bytes, index_.digest(block), digest_bytes);
    }
    at(block).flags &= static_cast<uint16_t>(~was_hit);
    ++index_version_;
    remember(BlockHistory::evicted, block);
}

void BlockPool::refer(BlockId block, int external) {
    Block& referred = at(block);
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
void BlockPool::change_counts(BlockId block, int refs, int external) {
    Block& changed = at(block);
    int32_t& external_refs = external_[block];
    num_popped_ -= external_refs > 0 && external_refs == changed.refs;
    changed.refs += refs;
    external_refs += external;
    num_popped_ += external_refs > 0 && external_refs == changed.refs;
    changed.flags = static_cast<uint16_t>(external_refs > 0 ? changed.flags | held_externally : changed.flags & ~held_externally);
}

BlockPool::Freed* BlockPool::room_for_freed(size_t most) {
    if (freed_.size() < most) freed_.resize(most);
    return freed_.data();
}

// Drops one reference that a request holds; the block goes to the end of `freed_`, which is at `out`.
inline BlockPool::Freed* BlockPool::drop(Freed* out, BlockId id, bool dead, uint16_t batch) {
    if (id == null_block) return out;
    if (id >= num_blocks_) refuse_drop(out, id);
    Block& block = at(id);
    int32_t external = block.is(held_externally) ? external_[id] : 0;
    if (block.refs <= external) refuse_drop(out, id);
    --block.refs;
    num_popped_ += external > 0 && block.refs == external;
    *out = {id, dead, block.refs == 0, batch};
    return out + 1;
}

// Takes back what was dropped so far.
void BlockPool::refuse_drop(const Freed* end, BlockId id) {
    for (const Freed* one = freed_.data(); one != end; ++one) {
        Block& restored = at(one->block);
        num_popped_ -= restored.is(held_externally) && restored.refs == external_[one->block];
        ++restored.refs;
    }
    if (id >= num_blocks_) {
        fail(ErrorKind::unknown_block, "block id %d is not in the pool; ids are 0 to %d", id, num_blocks_ - 1);
    }
    fail(ErrorKind::block_state, "block %d is in a table, but no request holds it", id);
}

// Queues what has no reference left, in this order.
void BlockPool::requeue(const Freed* end) {
    FreeQueue::Run front = queue_.at_front(), dead = queue_.behind_dead(), recent = queue_.behind_recent();
    int64_t num_freed = 0;
    uint16_t batch = 0;
    for (const Freed* one = freed_.data(); one != end; ++one) {
        if (!one->last) continue;
        uint16_t flags = at(one->block).flags;
        ++num_freed;
        if ((flags & in_index) == 0) {
            if (one->batch != batch) {
                front.close();
                front = queue_.at_front();
                batch = one->batch;
            }
            front.push(one->block);
        } else if (one->dead && is_dead_first() && (flags & was_hit) == 0) {
            dead.push(one->block);
        } else {
            recent.push(one->block);
        }
    }
    front.close();
    dead.close();
    recent.close();
    num_free_ += num_freed;
}

}  // namespace kvpager
