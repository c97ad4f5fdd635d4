#include "pool.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <utility>

#include "errors.h"

namespace nb = nanobind;

namespace kvpager {

namespace {

using Long = long long;  // what PyErr_Format's %lld takes

// How far look-ups run ahead of themselves, so that memory is fetched while others are compared.
constexpr size_t window = 32;

BlockId checked_size(int64_t num_blocks) {
    constexpr int64_t most = std::numeric_limits<BlockId>::max() - static_cast<int64_t>(FreeQueue::num_sentinels);
    if (num_blocks < 1 || num_blocks > most) {
        raise(config_error, "num_blocks must be 1 to %lld, got %lld", Long{most}, Long{num_blocks});
    }
    return static_cast<BlockId>(num_blocks);
}

bool is_dead_first(nb::handle eviction_order) {
    if (PyUnicode_Check(eviction_order.ptr())) {
        if (PyUnicode_CompareWithASCIIString(eviction_order.ptr(), "dead_first") == 0) return true;
        if (PyUnicode_CompareWithASCIIString(eviction_order.ptr(), "recency") == 0) return false;
    }
    raise(config_error, "eviction_order must be one of ('dead_first', 'recency'), got %R", eviction_order.ptr());
}

}  // namespace

Pool::Pool(int64_t num_blocks, int64_t num_groups, nb::handle eviction_order, bool enable_events, nb::object residency)
    : num_blocks_(checked_size(num_blocks)),
      num_groups_(num_groups),
      dead_first_(is_dead_first(eviction_order)),
      logs_events_(enable_events),
      observed_(!residency.is_none()),
      blocks_(num_blocks_ + FreeQueue::num_sentinels),
      outside_(num_blocks_),
      queue_(blocks_.data(), num_blocks_),
      index_(blocks_.data(), num_blocks_),
      num_free_(num_blocks - 1),
      residency_(std::move(residency)) {
    if (num_groups < 0 || num_groups > std::numeric_limits<Group>::max()) {
        raise(config_error, "num_groups must be 0 to %d, got %lld", std::numeric_limits<Group>::max(), Long{num_groups});
    }
}

// -- conversions --------------------------------------------------------------------------------

BlockId Pool::checked(nb::handle id) const {
    int overflow = 0;
    Long value = PyLong_Check(id.ptr()) ? PyLong_AsLongLongAndOverflow(id.ptr(), &overflow) : -1;
    if (overflow != 0 || value < 0 || value >= num_blocks_) {
        raise(unknown_block_error, "block id %R is not in the pool; ids are 0 to %d", id.ptr(), num_blocks_ - 1);
    }
    return static_cast<BlockId>(value);
}

BlockId Pool::checked_real(nb::handle id) const {
    BlockId block = checked(id);
    if (block == null_block) {
        raise(block_state_error, "block 0 is the null block: it is never held, touched or freed; leave it out");
    }
    return block;
}

Group Pool::checked_group(int64_t group) const {
    if (group < 0 || group >= num_groups_) {
        raise(invalid_request_error, "group %lld is not there; groups are 0 to %lld", Long{group}, Long{num_groups_ - 1});
    }
    return static_cast<Group>(group);
}

void Pool::check_range(const BlockList& list, int64_t start, int64_t stop) const {
    if (start < 0 || stop > list.size()) {
        raise(invalid_request_error, "positions %lld to %lld are not in a list of %lld blocks", Long{start}, Long{stop},
              Long{list.size()});
    }
}

// A list may have been made by hand, or be another pool's.
void Pool::check_ids(const BlockList& list, int64_t start, int64_t stop) const {
    for (int64_t position = start; position < stop; ++position) {
        if (list.ids[position] >= num_blocks_) {
            raise(unknown_block_error, "block id %d is not in the pool; ids are 0 to %d", list.ids[position],
                  num_blocks_ - 1);
        }
    }
}

void Pool::check_supply(int64_t num_blocks) const {
    if (num_blocks < 0 || num_blocks > num_free_) {
        raise(out_of_blocks_error, "%lld blocks were asked for, %lld are free", Long{num_blocks}, Long{num_free_});
    }
}

// -- look-ups -----------------------------------------------------------------------------------

// What look-ups of some positions in some groups need to know of each, fetched ahead.
class Pool::Probes {
public:
    Probes(const HashIndex& index, std::span<const Group> groups)
        : index_(index), groups_(groups), tags_(window * groups.size()), slots_(tags_.size()) {}

    // Positions first, first + step, … : `count` of them.
    void fetch(const Hashes& hashes, int64_t first, int64_t step, int64_t count) {
        size_t at = 0;
        for (int64_t i = 0; i < count; ++i) {
            Digest digest = hashes[first + i * step];
            for (Group group : groups_) index_.prefetch_slot(tags_[at++] = index_.tag(digest, group));
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
    std::span<const Group> groups_;
    std::vector<uint32_t> tags_, slots_;
};

std::vector<BlockList> Pool::prefix(std::span<const Group> groups, const Hashes& hashes, int64_t stop) const {
    hashes.require(0, stop);
    std::vector<BlockList> found(groups.size());
    if (groups.empty()) return found;
    Probes probes(index_, groups);
    // Most prompts that miss do so at once: little is fetched for those.
    for (int64_t start = 0, count; start < stop; start += count) {
        count = std::min<int64_t>(start == 0 ? 4 : window, stop - start);
        for (int64_t i = 0; i < count; ++i) hashes.prefetch_hash(start + count + i);
        probes.fetch(hashes, start, 1, count);
        for (BlockList& list : found) list.ids.resize(start + count);
        for (int64_t i = 0; i < count; ++i) {
            Digest digest = hashes[start + i];
            for (size_t j = 0; j < groups.size(); ++j) {
                BlockId block = probes.find(i, j, digest);
                if (block == null_block) {
                    for (BlockList& list : found) list.ids.resize(start + i);
                    return found;
                }
                found[j].ids[start + i] = block;
            }
        }
    }
    return found;
}

int64_t Pool::run_start(std::span<const Group> groups, const Hashes& hashes, int64_t start, int64_t stop) const {
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

BlockList Pool::lookup(Group group, const Hashes& hashes, int64_t start, int64_t stop) const {
    if (start < stop) hashes.require(start, stop);
    if (start < 0) raise(invalid_request_error, "start must be at least 0, got %lld", Long{start});
    BlockList found;
    found.ids.reserve(std::max(start, stop));
    found.ids.resize(start, null_block);
    for (int64_t position = start; position < stop; ++position) {
        if (position + 4 < stop) index_.prefetch_slot(index_.tag(hashes[position + 4], group));
        BlockId block = index_.find(index_.tag(hashes[position], group), hashes[position], group);
        if (block == null_block) {
            raise(block_state_error, "position %lld is not cached in group %d", Long{position}, group);
        }
        found.ids.push_back(block);
    }
    return found;
}

bool Pool::serves_hit(const BlockList& blocks, Group group, const Hashes& hashes) const {
    check_ids(blocks, 0, blocks.size());
    for (int64_t position = 0; position < blocks.size(); ++position) {
        if (blocks.ids[position] == null_block) continue;
        hashes.require(position, position + 1);
        if (!index_.carries(blocks.ids[position], hashes[position], group)) return false;
    }
    return true;
}

int64_t Pool::count_evictable(const BlockList& blocks, int64_t start, int64_t stop) const {
    start = std::max<int64_t>(start, 0), stop = std::min(stop, blocks.size());
    check_ids(blocks, start, stop);
    int64_t count = 0;
    for (int64_t position = start; position < stop; ++position) {
        BlockId block = blocks.ids[position];
        count += block != null_block && blocks_[block].refs == 0;
    }
    return count;
}

int64_t Pool::count_exclusive(const BlockList& blocks, int64_t start, int64_t stop) const {
    start = std::max<int64_t>(start, 0), stop = std::min(stop, blocks.size());
    check_ids(blocks, start, stop);
    int64_t count = 0;
    for (int64_t position = start; position < stop; ++position) count += blocks_[blocks.ids[position]].refs == 1;
    return count;
}

int64_t Pool::num_shared_by(const BlockList& blocks, int64_t num_holders) const {
    int64_t position = 0;
    for (; position < blocks.size(); ++position) {
        check_ids(blocks, position, position + 1);
        BlockId block = blocks.ids[position];
        if (blocks_[block].refs - outside_[block] != num_holders) break;
    }
    return position;
}

// -- tables -------------------------------------------------------------------------------------

void Pool::adopt(BlockList& table, const BlockList& hits, int64_t start, int64_t stop) {
    if (start >= stop) return;
    check_range(hits, start, stop);
    check_ids(hits, start, stop);
    table.ids.reserve(table.ids.size() + (stop - start));
    for (int64_t position = start; position < stop; ++position) {
        BlockId block = hits.ids[position];
        if (block != null_block) {
            refer(block, 0);
            blocks_[block].flags |= hit_once;
            note(Happened::used, block);
        }
        table.ids.push_back(block);
    }
}

void Pool::extend(BlockList& table, int64_t num_blocks, bool note_new) {
    check_supply(num_blocks);
    size_t length = table.ids.size();
    table.ids.resize(length + num_blocks);
    std::span<BlockId> taken = std::span(table.ids).subspan(length);
    take(taken);
    if (!note_new) return;
    if (num_blocks > 64) new_.reserve(new_.size() + num_blocks);
    for (BlockId block : taken) {
        if (blocks_[block].is(noted)) continue;
        blocks_[block].flags |= noted;
        new_.push_back(block);
    }
}

void Pool::extend_null(BlockList& table, int64_t num_positions) {
    if (num_positions > 0) table.ids.resize(table.ids.size() + num_positions, null_block);
}

void Pool::move(BlockList& table, int64_t source) {
    check_range(table, source, source + 1);
    BlockId moved = table.ids[source];
    table.ids.push_back(moved);
    table.ids[source] = null_block;
}

void Pool::release(BlockList& table, int64_t start, int64_t stop, Range keep) {
    if (start >= stop) return;
    check_range(table, start, stop);
    Freed* out = room_for_freed(stop - start);
    for (int64_t position = stop - 1; position >= start; --position) {
        out = drop(out, table.ids[position], !keep.holds(position), 0);
    }
    requeue(out);
    std::fill(table.ids.begin() + start, table.ids.begin() + stop, null_block);
}

void Pool::free_tables(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes,
                       std::span<const Range> dead, std::span<const Range> keep) {
    size_t most = 0;
    for (BlockList* table : tables) most += table->ids.size();
    Freed* out = room_for_freed(most);
    tail_first(tables, block_sizes, [&](size_t i, int64_t position) {
        bool gone = dead[i].holds(position) && !keep[i].holds(position);
        out = drop(out, tables[i]->ids[position], gone, static_cast<uint16_t>(dead_first_ ? 0 : i));
    });
    requeue(out);
    for (BlockList* table : tables) table->ids.clear();
}

// Visits all positions, tail first: across tables by end position, or with "recency" table after table.
template <typename Visit>
void Pool::tail_first(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes, Visit visit) const {
    if (!dead_first_ || tables.size() == 1) {
        for (size_t i = 0; i < tables.size(); ++i) {
            for (int64_t position = tables[i]->size() - 1; position >= 0; --position) visit(i, position);
        }
        return;
    }
    std::vector<int64_t> lengths(tables.size());
    for (size_t i = 0; i < tables.size(); ++i) lengths[i] = tables[i]->size();
    for (;;) {
        int64_t end = 0;
        for (size_t i = 0; i < tables.size(); ++i) end = std::max(end, lengths[i] * block_sizes[i]);
        if (end == 0) return;
        for (size_t i = 0; i < tables.size(); ++i) {
            if (lengths[i] * block_sizes[i] == end) visit(i, --lengths[i]);
        }
    }
}

std::vector<BlockId> Pool::pop_tables(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes) {
    std::vector<BlockId> popped = heads_first(tables, block_sizes);
    for (size_t i = 0; i < popped.size(); ++i) {
        if (blocks_[popped[i]].refs <= outside_[popped[i]]) {
            for (size_t j = 0; j < i; ++j) change_counts(popped[j], 0, -1);
            raise(block_state_error, "block %d is in a table, but no request holds it", popped[i]);
        }
        change_counts(popped[i], 0, 1);
    }
    for (BlockList* table : tables) table->ids.clear();
    return popped;
}

std::vector<BlockId> Pool::heads_first(std::span<BlockList* const> tables, std::span<const int64_t> block_sizes) {
    std::vector<BlockId> blocks;
    for (BlockList* table : tables) {
        check_ids(*table, 0, table->size());
        if (dead_first_) continue;
        std::copy_if(table->ids.begin(), table->ids.end(), std::back_inserter(blocks),
                     [](BlockId block) { return block != null_block; });
    }
    if (!dead_first_) return blocks;
    tail_first(tables, block_sizes, [&](size_t i, int64_t position) {
        if (tables[i]->ids[position] != null_block) blocks.push_back(tables[i]->ids[position]);
    });
    std::reverse(blocks.begin(), blocks.end());
    return blocks;
}

void Pool::commit(BlockList& table, Group group, const Hashes& hashes, int64_t start, int64_t stop,
                  std::vector<Range>& runs) {
    stop = std::min(stop, hashes.num_positions());
    if (start >= stop) return;
    check_range(table, start, stop);
    check_ids(table, start, stop);
    hashes.check(start, stop);
    std::array<uint32_t, window> tags;
    auto fetch = [&](int64_t position) {
        hashes.prefetch_hash(position + window);
        tags[position % window] = prefetch_insertion(table.ids[position], hashes[position], group);
    };
    for (int64_t position = start; position < std::min<int64_t>(start + window, stop); ++position) fetch(position);
    for (int64_t position = start; position < stop; ++position) {
        BlockId block = table.ids[position];
        uint32_t tag = tags[position % window];
        if (position + static_cast<int64_t>(window) < stop) fetch(position + window);
        if (block == null_block || is_cached(block)) continue;
        if (!index_.insert(block, tag, hashes[position], group)) continue;
        if (!runs.empty() && runs.back().stop == position) {
            ++runs.back().stop;
        } else {
            runs.push_back({position, position + 1});
        }
    }
}

void Pool::prefetch_commit(const BlockList& table, Group group, const Hashes& hashes, int64_t position) const {
    if (position >= std::min(table.size(), hashes.num_positions())) return;
    prefetch_insertion(table.ids[position], hashes[position], group);
}

// Gives the tag under which the block is to be entered.
uint32_t Pool::prefetch_insertion(BlockId block, Digest hash, Group group) const {
    uint32_t tag = index_.tag(hash, group);
    prefetch_block(block);
    index_.prefetch_digest(block);
    index_.prefetch_slot(tag);
    return tag;
}

void Pool::compute(const BlockList& table, Range positions) {
    int64_t stop = std::min(positions.stop, table.size());
    for (int64_t position = positions.start; position < stop; ++position) {
        BlockId block = table.ids[position];
        if (block == null_block || is_computing(block)) continue;
        blocks_[block].flags |= computing;
        computing_.push_back(block);
    }
}

void Pool::new_step_starts() {
    for (BlockId block : computing_) blocks_[block].flags &= static_cast<uint16_t>(~computing);
    computing_.clear();
}

// -- blocks by id -------------------------------------------------------------------------------

std::vector<BlockId> Pool::allocate(int64_t num_blocks) {
    check_supply(num_blocks);
    std::vector<BlockId> taken(num_blocks);
    take(taken);
    for (BlockId block : taken) change_counts(block, 0, 1);
    return taken;
}

void Pool::touch(std::span<const BlockId> blocks) {
    for (BlockId block : blocks) {
        refer(block, 1);
        note(Happened::used, block);
    }
}

void Pool::free_blocks(std::span<const BlockId> blocks) {
    std::vector<BlockId> sorted(blocks.begin(), blocks.end());
    std::sort(sorted.begin(), sorted.end());
    for (size_t i = 0, times = 1; i < sorted.size(); ++i, ++times) {
        BlockId block = sorted[i];
        if (i + 1 < sorted.size() && sorted[i + 1] == block) continue;
        if (outside_[block] < static_cast<int64_t>(times)) {
            raise(block_state_error,
                  "block %d is freed %zux, but only %d of its %d references were handed out; free what "
                  "pop_blocks_for_free, allocate or touch gave you, once (a request's own blocks go back with "
                  "manager.free)",
                  block, times, outside_[block], blocks_[block].refs);
        }
        times = 0;
    }
    Freed* out = room_for_freed(blocks.size());
    for (BlockId block : blocks) {
        change_counts(block, -1, -1);
        *out++ = {block, false, blocks_[block].refs == 0, 0};
    }
    requeue(out);
}

void Pool::evict_blocks(std::span<const BlockId> blocks) {
    for (BlockId block : blocks) {
        if (!is_cached(block)) continue;
        evict(block);
        if (blocks_[block].refs == 0 && dead_first_) {
            queue_.remove(block);
            FreeQueue::Run front = queue_.at_front();
            front.push(block);
            front.close();
        }
    }
}

bool Pool::reset_prefix_cache() {
    if (num_held() != 0 || num_popped_ != 0) return false;
    clear_index();
    return true;
}

void Pool::clear_index() {
    ++generation_;
    index_.clear(queue_.next_unused());
    for (BlockId block = 0; block < queue_.next_unused(); ++block) {
        blocks_[block].flags &= static_cast<uint16_t>(~hit_once);
    }
    queue_.forget_recency();
    note(Happened::reset, null_block);
    if (logs_events_) events_.push_back({Change::cleared, 0, 0, {}});
}

std::vector<BlockId> Pool::reserve(int64_t num_blocks) {
    check_supply(num_blocks);
    std::vector<BlockId> taken(num_blocks);
    take(taken);
    reserved_.insert(reserved_.end(), taken.begin(), taken.end());
    return taken;
}

std::vector<BlockId> Pool::take_new_block_ids() {
    for (BlockId block : new_) blocks_[block].flags &= static_cast<uint16_t>(~noted);
    return std::exchange(new_, {});
}

// -- inside -------------------------------------------------------------------------------------

// Takes blocks from the front of the queue; there are enough.
void Pool::take(std::span<BlockId> out) {
    queue_.pop(out);
    // What a block's eviction touches is fetched while those before it are evicted.
    const size_t ahead = std::min(window / 2, out.size());
    for (size_t i = 0; i < out.size() + 2 * ahead; ++i) {
        if (i < out.size()) index_.prefetch_tag(out[i]);
        if (size_t next = i - ahead; next < out.size() && is_cached(out[next])) index_.prefetch_slot(index_.tag_of(out[next]));
        if (size_t next = i - 2 * ahead; next < out.size()) {
            if (is_cached(out[next])) {
                evict(out[next]);
                ++num_evictions_;
            }
            blocks_[out[next]].refs = 1;
            note(Happened::allocated, out[next]);
        }
    }
    num_free_ -= static_cast<int64_t>(out.size());
}

// Takes a block out of the index; tells it if it was the last copy.
void Pool::evict(BlockId block) {
    if (index_.erase(block) && logs_events_) {
        Group group = blocks_[block].group;
        if (events_.empty() || events_.back().what != Change::removed || events_.back().group != group) {
            events_.push_back({Change::removed, group, 0, {}});
        }
        ++events_.back().num_hashes;
        std::memcpy(removed_.emplace_back().bytes, index_.digest(block), digest_bytes);
    }
    blocks_[block].flags &= static_cast<uint16_t>(~hit_once);
    ++generation_;
    note(Happened::evicted, block);
}

void Pool::refer(BlockId block, int outside) {
    Block& referred = blocks_[block];
    if (referred.refs == 0) {
        queue_.remove(block);
        --num_free_;
    }
    if (outside == 0 && !referred.is(held_outside)) {
        ++referred.refs;
    } else {
        change_counts(block, 1, outside);
    }
}

// Keeps count of the blocks that outsiders alone refer to.
void Pool::change_counts(BlockId block, int refs, int outside) {
    Block& changed = blocks_[block];
    int32_t& of_outsiders = outside_[block];
    num_popped_ -= of_outsiders > 0 && of_outsiders == changed.refs;
    changed.refs += refs;
    of_outsiders += outside;
    num_popped_ += of_outsiders > 0 && of_outsiders == changed.refs;
    changed.flags = static_cast<uint16_t>(of_outsiders > 0 ? changed.flags | held_outside : changed.flags & ~held_outside);
}

Freed* Pool::room_for_freed(size_t most) {
    if (freed_.size() < most) freed_.resize(most);
    return freed_.data();
}

// Drops one reference that a request holds; the block goes to the end of `freed_`, which is at `out`.
inline Freed* Pool::drop(Freed* out, BlockId id, bool dead, uint16_t batch) {
    if (id == null_block) return out;
    if (id >= num_blocks_) refuse_drop(out, id);
    Block& block = blocks_[id];
    int32_t outside = block.is(held_outside) ? outside_[id] : 0;
    if (block.refs <= outside) refuse_drop(out, id);
    --block.refs;
    num_popped_ += outside > 0 && block.refs == outside;
    *out = {id, dead, block.refs == 0, batch};
    return out + 1;
}

// Takes back what was dropped so far.
void Pool::refuse_drop(const Freed* end, BlockId id) {
    for (const Freed* one = freed_.data(); one != end; ++one) {
        Block& restored = blocks_[one->block];
        num_popped_ -= restored.is(held_outside) && restored.refs == outside_[one->block];
        ++restored.refs;
    }
    if (id >= num_blocks_) {
        raise(unknown_block_error, "block id %d is not in the pool; ids are 0 to %d", id, num_blocks_ - 1);
    }
    raise(block_state_error, "block %d is in a table, but no request holds it", id);
}

// Queues what has no reference left, in this order.
void Pool::requeue(const Freed* end) {
    FreeQueue::Run front = queue_.at_front(), dead = queue_.behind_dead(), recent = queue_.behind_recent();
    int64_t num_freed = 0;
    uint16_t batch = 0;
    for (const Freed* one = freed_.data(); one != end; ++one) {
        if (!one->last) continue;
        uint16_t flags = blocks_[one->block].flags;
        ++num_freed;
        if ((flags & in_index) == 0) {
            if (one->batch != batch) {
                front.close();
                front = queue_.at_front();
                batch = one->batch;
            }
            front.push(one->block);
        } else if (one->dead && dead_first_ && (flags & hit_once) == 0) {
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

// -- events -------------------------------------------------------------------------------------

void Pool::log(nb::object event) {
    if (logs_events_) events_.push_back({Change::logged, 0, 0, std::move(event)});
}

nb::list Pool::take_events() {
    std::vector<Event> events = std::exchange(events_, {});
    std::vector<Hash> hashes = std::exchange(removed_, {});
    const Hash* next = hashes.data();
    nb::list list;
    if (events.empty()) return list;
    nb::module_ classes = nb::module_::import_("kvpager.events");
    nb::object removed = classes.attr("BlockRemoved"), cleared = classes.attr("AllBlocksCleared");
    nb::object medium = classes.attr("MEDIUM_GPU");
    for (Event& event : events) {
        switch (event.what) {
            case Change::logged: list.append(event.object); break;
            case Change::cleared: list.append(cleared()); break;
            case Change::removed: {
                nb::list gone;
                for (const Hash* end = next + event.num_hashes; next != end; ++next) gone.append(as_bytes(*next));
                list.append(removed(gone, medium, event.group));
            }
        }
    }
    return list;
}

void Pool::tell_observer() {
    if (notes_.empty()) return;
    static constexpr const char* methods[] = {"allocated", "used", "evicted", "reset"};
    std::vector<Note> notes = std::exchange(notes_, {});
    nb::object observer = residency_;
    for (const Note& note : notes) {
        const char* method = methods[static_cast<size_t>(note.what)];
        try {
            note.what == Happened::reset ? observer.attr(method)() : observer.attr(method)(note.block);
        } catch (nb::python_error& error) {
            // The deed is done; an observer that fails cannot undo it.
            error.discard_as_unraisable(observer);
        }
    }
}

int Pool::traverse(visitproc visit, void* arg) {
    Py_VISIT(residency_.ptr());
    for (const Event& event : events_) Py_VISIT(event.object.ptr());
    return 0;
}

void Pool::clear_references() {
    std::vector<Event> events = std::exchange(events_, {});
    nb::object residency = std::exchange(residency_, nb::none());
    observed_ = false;
}

}  // namespace kvpager
