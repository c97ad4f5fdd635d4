#include "hash_index.h"

#include <algorithm>
#include <random>

namespace kvpager {

HashIndex::HashIndex(Block* blocks, size_t num_blocks)
    : blocks_(blocks), slots_(4 * num_blocks), digests_(num_blocks * digest_bytes), tags_(num_blocks), copies_(num_blocks) {
    std::random_device random;
    for (uint64_t& seed : seeds_) seed = uint64_t{random()} << 32 | random() | 1;
}

bool HashIndex::insert(BlockId block, uint32_t tag, Digest digest, GroupId group) {
    std::memcpy(&digests_[static_cast<size_t>(block) * digest_bytes], digest, digest_bytes);
    blocks_[block].group = group;
    tags_[block] = tag;
    size_t slot = home(tag);
    for (; slots_[slot].block != null_block; slot = after(slot)) {
        if (slots_[slot].tag == tag && carries(slots_[slot].block, digest, group)) {
            join_copies(slots_[slot].block, block);
            return false;
        }
    }
    slots_[slot] = {tag, block};
    blocks_[block].flags |= in_index | oldest_copy;
    return true;
}

bool HashIndex::erase(BlockId block) {
    Block& erased = blocks_[block];
    bool alone = !erased.is(has_copies);
    if (alone) {
        erase_slot(slot_of(block));
    } else {
        BlockId next = leave_copies(block);
        if (erased.is(oldest_copy)) {
            slots_[slot_of(block)].block = next;
            blocks_[next].flags |= oldest_copy;
        }
    }
    erased.flags &= static_cast<uint16_t>(~(in_index | oldest_copy | has_copies));
    return alone;
}

void HashIndex::clear(BlockId num_used) {
    slots_.clear();
    for (BlockId block = 0; block < num_used; ++block) {
        blocks_[block].flags &= static_cast<uint16_t>(~(in_index | oldest_copy | has_copies));
    }
}

size_t HashIndex::slot_of(BlockId block) const {
    size_t slot = home(tags_[block]);
    while (slots_[slot].block != block) slot = after(slot);
    return slot;
}

// Whatever was pushed on past the hole moves back, so that no probe ever meets a gap.
void HashIndex::erase_slot(size_t hole) {
    for (size_t slot = after(hole); slots_[slot].block != null_block; slot = after(slot)) {
        size_t wanted = home(slots_[slot].tag);
        bool reaches = hole <= slot ? wanted <= hole || wanted > slot : wanted <= hole && wanted > slot;
        if (reaches) {
            slots_[hole] = slots_[slot];
            hole = slot;
        }
    }
    slots_[hole].block = null_block;
}

void HashIndex::join_copies(BlockId oldest, BlockId block) {
    if (!blocks_[oldest].is(has_copies)) copies_[oldest] = {oldest, oldest};
    BlockId youngest = copies_[oldest].prev;
    copies_[block] = {oldest, youngest};
    copies_[youngest].next = copies_[oldest].prev = block;
    blocks_[oldest].flags |= has_copies;
    blocks_[block].flags |= in_index | has_copies;
}

// Gives the next older-to-younger neighbour.
BlockId HashIndex::leave_copies(BlockId block) {
    auto [next, prev] = copies_[block];
    copies_[prev].next = next;
    copies_[next].prev = prev;
    if (next == prev) blocks_[next].flags &= static_cast<uint16_t>(~has_copies);
    return next;
}

}  // namespace kvpager
