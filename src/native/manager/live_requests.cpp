#include "live_requests.h"

#include <utility>

namespace kvpager {

LiveRequest& LiveRequests::add(std::unique_ptr<LiveRequest> live) {
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
void LiveRequests::remove(const void* key) {
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

LiveRequests::Slot& LiveRequests::free_slot(const void* key) {
    size_t slot = home(key);
    while (slots_[slot].key != nullptr) slot = after(slot);
    return slots_[slot];
}

}  // namespace kvpager
