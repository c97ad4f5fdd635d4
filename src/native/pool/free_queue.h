// The order in which free blocks are taken.
#pragma once

#include <span>

#include "blocks.h"

namespace kvpager {

// Three circular lists through the blocks' own links, taken front to back, and between the first
// two the blocks that were never used, in order of id: a new pool has nothing to link.
//
//     never cached │ never used: next_unused_ … │ cached, dead, not useful │ the others, least recently freed first
class FreeQueue {
public:
    // `blocks` has room for `num_sentinels` entries behind the pool's.
    static constexpr size_t num_sentinels = 3;

    FreeQueue(Block* blocks, BlockId num_blocks)
        : blocks_(blocks), front_(num_blocks), dead_(num_blocks + 1), recent_(num_blocks + 2), end_(num_blocks) {
        for (BlockId list : {front_, dead_, recent_}) blocks_[list].next = blocks_[list].prev = list;
    }

    // The next blocks to allocate; so many have to be free.
    void pop(std::span<BlockId> out) {
        auto at = pop_from(front_, out.begin(), out.end());
        while (at != out.end() && next_unused_ < end_) *at++ = next_unused_++;
        at = pop_from(dead_, at, out.end());
        pop_from(recent_, at, out.end());
    }

    void remove(BlockId block) {
        if (block >= next_unused_) {
            // Out of the middle of the unused ones: those before it are linked now, once in their lives.
            while (next_unused_ < block) link_before(front_, next_unused_++);
            ++next_unused_;
            return;
        }
        unlink(block);
    }

    // Several blocks one behind the other, somewhere in the queue: `close` when the last one is in.
    class Run {
    public:
        Run(Block* blocks, BlockId before, BlockId after) : blocks_(blocks), last_(before), after_(after) {}
        void push(BlockId block) {
            blocks_[last_].next = block;
            blocks_[block].prev = last_;
            last_ = block;
        }
        void close() {
            blocks_[last_].next = after_;
            blocks_[after_].prev = last_;
        }

    private:
        Block* blocks_;
        BlockId last_, after_;
    };
    // One run of each kind may be open at a time.
    Run at_front() { return {blocks_, front_, blocks_[front_].next}; }
    Run behind_dead() { return {blocks_, blocks_[dead_].prev, dead_}; }
    Run behind_recent() { return {blocks_, blocks_[recent_].prev, recent_}; }

    // No block carries a hash any more: those by recency go before whatever is cached from now on.
    void forget_recency() {
        BlockId first = blocks_[recent_].next, last = blocks_[recent_].prev, before = blocks_[dead_].prev;
        if (first == recent_) return;
        blocks_[before].next = first;
        blocks_[first].prev = before;
        blocks_[last].next = dead_;
        blocks_[dead_].prev = last;
        blocks_[recent_].next = blocks_[recent_].prev = recent_;
    }

    template <typename Visit>
    void for_each(Visit visit) const {
        visit_list(front_, visit);
        for (BlockId block = next_unused_; block < end_; ++block) visit(block);
        visit_list(dead_, visit);
        visit_list(recent_, visit);
    }

    // Blocks from here on have never been used.
    BlockId next_unused() const { return next_unused_; }

private:
    // As many as there are, out to `end`; gives where the next one goes.
    template <typename Iterator>
    Iterator pop_from(BlockId list, Iterator at, Iterator end) {
        BlockId block = blocks_[list].next;
        if (at == end || block == list) return at;
        for (; at != end && block != list; block = blocks_[block].next) *at++ = block;
        blocks_[list].next = block;
        blocks_[block].prev = list;
        return at;
    }

    void unlink(BlockId block) {
        BlockId before = blocks_[block].prev, after = blocks_[block].next;
        blocks_[before].next = after;
        blocks_[after].prev = before;
    }

    void link_before(BlockId after, BlockId block) {
        BlockId before = blocks_[after].prev;
        blocks_[block].prev = before;
        blocks_[block].next = after;
        blocks_[before].next = block;
        blocks_[after].prev = block;
    }

    template <typename Visit>
    void visit_list(BlockId list, Visit& visit) const {
        for (BlockId block = blocks_[list].next; block != list; block = blocks_[block].next) visit(block);
    }

    Block* blocks_;
    BlockId front_, dead_, recent_;
    BlockId next_unused_ = 1;  // block 0 is the null block
    BlockId end_;
};

}  // namespace kvpager
