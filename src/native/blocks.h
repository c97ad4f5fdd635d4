// What is known of one block, and the lists of blocks that requests hold.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace kvpager {

using BlockId = int32_t;
using Group = uint16_t;

constexpr BlockId null_block = 0;
constexpr size_t digest_bytes = 32;

enum BlockFlag : uint16_t {
    in_index = 1,        // it carries a hash and can be hit
    serves = 2,          // the oldest copy of its hash: the one that the index finds
    has_copies = 4,      // other blocks carry the same hash
    hit_once = 8,        // useful, dead or not
    noted = 16,          // waits for take_new_block_ids
    held_outside = 32,   // some references are outsiders'
    computing = 64,      // holds a state that this very step computes
};

// Four to a cache line. A block with no references is in the free queue (but for the null block).
struct Block {
    int32_t refs;
    BlockId next;  // links of the free queue
    BlockId prev;
    Group group;   // of its hash
    uint16_t flags;

    bool is(uint16_t flag) const { return (flags & flag) != 0; }
};
static_assert(sizeof(Block) == 16);

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// Big tables are read at random places, and each of their small pages would cost a walk through the page table.
inline void ask_for_huge_pages(void* start, size_t size) {
#ifdef MADV_HUGEPAGE
    constexpr size_t page = 1 << 12, huge_page = 1 << 21;
    auto address = reinterpret_cast<uintptr_t>(start), inside = (address + page - 1) / page * page;
    if (size >= 2 * huge_page) madvise(reinterpret_cast<void*>(inside), address + size - inside, MADV_HUGEPAGE);
#else
    static_cast<void>(start), static_cast<void>(size);
#endif
}

// Zeros that cost no time and no memory until they are looked at.
template <typename Item>
class ZeroedArray {
public:
    explicit ZeroedArray(size_t size) : items_(static_cast<Item*>(std::calloc(size, sizeof(Item)))), size_(size) {
        if (!items_) throw std::bad_alloc();
        ask_for_huge_pages(items_.get(), size * sizeof(Item));
    }
    Item& operator[](size_t index) { return items_.get()[index]; }
    const Item& operator[](size_t index) const { return items_.get()[index]; }
    Item* data() const { return items_.get(); }
    size_t size() const { return size_; }
    void clear() { *this = ZeroedArray(size_); }

private:
    struct Free {
        void operator()(Item* items) const { std::free(items); }
    };
    std::unique_ptr<Item, Free> items_;
    size_t size_;
};

// Block ids by position: a request's table in one group, or the blocks of a hit. Nulls included.
struct BlockList {
    std::vector<BlockId> ids;
    int64_t num_committed = 0;
    int64_t num_released = 0;
    // Align groups only: whether a state runs, and positions at whose end a step ended, not committed yet.
    bool is_running = false;
    std::vector<int64_t> step_ends{};

    int64_t size() const { return static_cast<int64_t>(ids.size()); }

    void prefetch_all() const {
        prefetch(this);
        prefetch(this + 1);
    }
    // Where blocks are released, and where they are appended and committed.
    void prefetch_ends() const {
        if (num_released < size()) prefetch(&ids[num_released]);
        if (size() > 0) prefetch(&ids.back());
    }
};

}  // namespace kvpager
