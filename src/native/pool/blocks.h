// What is known of one block.
#pragma once

#include <cstdint>
#include <vector>

namespace kvpager {

using BlockId = int32_t;
using GroupId = uint16_t;
// Block ids by position: a request's table in one group, or the blocks of a hit. Nulls included.
using BlockIds = std::vector<BlockId>;

constexpr BlockId null_block = 0;

// Half-open, as Python's range with step 1.
struct Range {
    int64_t start = 0;
    int64_t stop = 0;

    bool holds(int64_t position) const { return start <= position && position < stop; }
    int64_t size() const { return stop > start ? stop - start : 0; }
};

enum BlockFlag : uint16_t {
    in_index = 1,          // it carries a hash and can be hit
    oldest_copy = 2,       // the copy of its hash that the index finds
    has_copies = 4,        // other blocks carry the same hash
    was_hit = 8,           // useful, dead or not
    needs_zeroing = 16,    // waits for take_new_block_ids
    held_externally = 32,  // some references are external
    computing = 64,        // holds a state that this very step computes
};

// Four to a cache line. A block with no references is in the free queue (but for the null block).
struct Block {
    int32_t refs;
    BlockId next;  // links of the free queue
    BlockId prev;
    GroupId group;  // of its hash
    uint16_t flags;

    bool is(uint16_t flag) const { return (flags & flag) != 0; }
};
static_assert(sizeof(Block) == 16);

}  // namespace kvpager
