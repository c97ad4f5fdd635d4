// (hash, group) to the blocks that carry it.
#pragma once

#include <random>

#include "../hashing/hash.h"
#include "../memory.h"
#include "blocks.h"

namespace kvpager {

// Open addressing, linear probing, sized for the whole pool at the start: at most a quarter full, never
// grown, no tombstones. Evictions and commits hardly ever meet a neighbour then, and what that costs is
// a mispredicted branch. A slot names the oldest block that carries a hash; the digest itself is stored
// once a block and always compared in full. Further copies hang on a ring, oldest first.
class HashIndex {
public:
    HashIndex(Block* blocks, size_t num_blocks)
        : blocks_(blocks),
          slots_(4 * num_blocks),
          digests_(num_blocks * digest_bytes),
          tags_(num_blocks),
          copies_(num_blocks) {
        std::random_device random;
        for (uint64_t& seed : seeds_) seed = uint64_t{random()} << 32 | random() | 1;
    }

    // Where a hash belongs; half of a look-up, so that `prefetch` can go between. The mix has a
    // secret seed: who can choose prompts cannot choose where they land.
    uint32_t tag(Digest digest, GroupId group) const {
        uint64_t words[4];
        std::memcpy(words, digest, sizeof words);
        uint64_t mixed = group * seeds_[4];
        for (int i = 0; i < 4; ++i) mixed += words[i] * seeds_[i];
        return static_cast<uint32_t>(mixed >> 32);
    }
    // The tag of a block in the index.
    uint32_t tag_of(BlockId block) const { return tags_[block]; }
    void prefetch_tag(BlockId block) const { prefetch(&tags_[block]); }

    void prefetch_slot(uint32_t tag) const { prefetch(&slots_[home(tag)]); }

    // The slot where a look-up ends, most likely; fetches the digest that it will compare.
    uint32_t prefetch_candidate(uint32_t tag) const {
        size_t slot = home(tag);
        while (slots_[slot].block != null_block && slots_[slot].tag != tag) slot = after(slot);
        prefetch(digest(slots_[slot].block));
        return static_cast<uint32_t>(slot);
    }
    void prefetch_digest(BlockId block) const { prefetch(digest(block)); }

    // The oldest block that carries the hash, or the null block: from the slot that `prefetch_candidate` gave.
    BlockId find_from(size_t slot, uint32_t tag, Digest digest, GroupId group) const {
        for (; slots_[slot].block != null_block; slot = after(slot)) {
            if (slots_[slot].tag == tag && carries(slots_[slot].block, digest, group)) return slots_[slot].block;
        }
        return null_block;
    }

    // Whether a block is in the index under that hash.
    bool carries(BlockId block, Digest hash, GroupId group) const {
        return blocks_[block].is(in_index) && blocks_[block].group == group && is_same(digest(block), hash);
    }

    // Enters a block that is not in the index. True: nobody carried the hash before.
    bool insert(BlockId block, uint32_t tag, Digest digest, GroupId group) {
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

    // Takes a block out. True: nobody carries the hash any more.
    bool erase(BlockId block) {
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

    // Takes every block out. O(pool)
    void clear(BlockId num_used) {
        slots_.clear();
        for (BlockId block = 0; block < num_used; ++block) {
            blocks_[block].flags &= static_cast<uint16_t>(~(in_index | oldest_copy | has_copies));
        }
    }

    Digest digest(BlockId block) const { return &digests_[static_cast<size_t>(block) * digest_bytes]; }

    // Calls visit(block) for the oldest carrier of each hash.
    template <typename Visit>
    void for_each_hash(Visit visit) const {
        for (size_t slot = 0; slot < slots_.size(); ++slot) {
            if (slots_[slot].block != null_block) visit(slots_[slot].block);
        }
    }

    // Calls visit(block) for each block that carries the same hash as its oldest carrier, in order of age.
    template <typename Visit>
    void for_each_copy(BlockId oldest, Visit visit) const {
        BlockId block = oldest;
        do {
            visit(block);
            block = blocks_[block].is(has_copies) ? copies_[block].next : oldest;
        } while (block != oldest);
    }

private:
    struct Slot {
        uint32_t tag;
        BlockId block;  // null: the slot is empty
    };
    struct Copies {
        BlockId next, prev;
    };

    static bool is_same(Digest a, Digest b) {
        uint64_t left[4], right[4];
        std::memcpy(left, a, sizeof left);
        std::memcpy(right, b, sizeof right);
        uint64_t differs = 0;
        for (int i = 0; i < 4; ++i) differs |= left[i] ^ right[i];
        return differs == 0;
    }

    // Slots are in order of their tags as far as they can, so that tags alone say what may move where.
    size_t home(uint32_t tag) const { return static_cast<size_t>(uint64_t{tag} * slots_.size() >> 32); }
    size_t after(size_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }
    size_t slot_of(BlockId block) const {
        size_t slot = home(tags_[block]);
        while (slots_[slot].block != block) slot = after(slot);
        return slot;
    }
    // Whatever was pushed on past the hole moves back, so that no probe ever meets a gap.
    void erase_slot(size_t hole) {
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
    void join_copies(BlockId oldest, BlockId block) {
        if (!blocks_[oldest].is(has_copies)) copies_[oldest] = {oldest, oldest};
        BlockId youngest = copies_[oldest].prev;
        copies_[block] = {oldest, youngest};
        copies_[youngest].next = copies_[oldest].prev = block;
        blocks_[oldest].flags |= has_copies;
        blocks_[block].flags |= in_index | has_copies;
    }
    // Gives the next older-to-younger neighbour.
    BlockId leave_copies(BlockId block) {
        auto [next, prev] = copies_[block];
        copies_[prev].next = next;
        copies_[next].prev = prev;
        if (next == prev) blocks_[next].flags &= static_cast<uint16_t>(~has_copies);
        return next;
    }

    Block* blocks_;
    ZeroedArray<Slot> slots_;
    ZeroedArray<uint8_t> digests_;
    ZeroedArray<uint32_t> tags_;  // so that an eviction needs no digest
    ZeroedArray<Copies> copies_;
    uint64_t seeds_[5];
};

}  // namespace kvpager
