// The requests that hold blocks, and what is remembered of each.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "../groups/group.h"

namespace kvpager {

// One request while it holds blocks: owns its tables in all groups and what later calls must know. It does not know the
// request itself, which is the host's; `key` and `name` are only compared and handed back.
struct LiveRequest {
    const void* key;                  // beside the bounds: one cache line says whether a call changes anything
    int64_t min_computed_tokens = 0;  // the fewest computed tokens from which it can go on
    int64_t no_op_until = -1;         // the highest token count up to which a call changes nothing
    std::vector<Table> tables;        // one a group
    const void* name = nullptr;
    int64_t num_prompt_tokens = 0;          // as it was read last
    int64_t num_computed_tokens = 0;        // after its last call, or as the host has said since
    int64_t branch_point = 0;               // see KVCacheCoordinator::match
    bool is_stale = false;                  // its K/V is of weights from before a lazy reset
    std::optional<int64_t> commit_limit{};  // tokens beyond it are still being loaded …
    int64_t load_end = 0;                   // … up to here

    LiveRequest(const void* its_key, size_t num_groups) : key(its_key), tables(num_groups) {}
};

// Finds a live request by its key, an address; owns them. Open addressing, at most half full.
class LiveRequests {
public:
    LiveRequests() : slots_(16) {}

    LiveRequest* find(const void* key) const {
        for (size_t slot = home(key); slots_[slot].key != nullptr; slot = after(slot)) {
            if (slots_[slot].key == key) return slots_[slot].live.get();
        }
        return nullptr;
    }
    LiveRequest& add(std::unique_ptr<LiveRequest> live) {
        if (2 * (size_ + 1) > slots_.size()) {
            std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
            for (Slot& slot : old) {
                if (slot.key != nullptr) free_slot(slot.key) = std::move(slot);
            }
        }
        Slot& slot = free_slot(live->key);
        slot = {live->key, std::move(live)};
        ++size_;
        return *slot.live;
    }
    // Whoever was pushed on past the hole moves back, so that no search ever meets a gap.
    void remove(const void* key) {
        size_t hole = home(key);
        while (slots_[hole].key != key) hole = after(hole);
        for (size_t slot = after(hole); slots_[slot].key != nullptr; slot = after(slot)) {
            size_t distance = (slot - home(slots_[slot].key)) & (slots_.size() - 1);
            if (distance >= ((slot - hole) & (slots_.size() - 1))) {
                slots_[hole] = std::move(slots_[slot]);
                hole = slot;
            }
        }
        slots_[hole] = Slot();
        --size_;
    }
    void clear() { *this = LiveRequests(); }
    int64_t size() const { return static_cast<int64_t>(size_); }

    template <typename Visit>
    void for_each(Visit visit) const {
        for (const Slot& slot : slots_) {
            if (slot.key != nullptr) visit(*slot.live);
        }
    }

    // For one that is looked up soon: first the slot, then what it names.
    void prefetch_slot(const void* key) const { prefetch(&slots_[home(key)]); }
    void prefetch_live(const void* key) const { prefetch(slots_[home(key)].live.get()); }

private:
    struct Slot {
        const void* key = nullptr;
        std::unique_ptr<LiveRequest> live{};
    };
    // Addresses are multiples of 8 or more: a multiplicative mix spreads them.
    size_t home(const void* key) const {
        return (reinterpret_cast<uintptr_t>(key) * 0x9e3779b97f4a7c15u >> 20) & (slots_.size() - 1);
    }
    size_t after(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }
    Slot& free_slot(const void* key) {
        size_t slot = home(key);
        while (slots_[slot].key != nullptr) slot = after(slot);
        return slots_[slot];
    }

    std::vector<Slot> slots_;
    size_t size_ = 0;
};

}  // namespace kvpager
