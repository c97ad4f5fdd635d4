// Memory that is touched at random places: fetched ahead, in pages as big as the kernel gives.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvpager {

// Asks for a cache line that is needed soon: it comes while other work is done. Any address will do.
inline void prefetch(const void* address) { __builtin_prefetch(address); }

// Runs stages over items [0, count), each stage in order: a stage handles an item `ahead` items after the stage before
// it did. So the first stages ask for what the last one needs, and the loop reads as what it does.
template <typename... Stages>
[[gnu::flatten]] void pipelined(int64_t count, int64_t ahead, Stages... stages) {
    constexpr int64_t num_stages = sizeof...(Stages);
    ahead = std::min(ahead, count);
    for (int64_t step = 0; step < count + (num_stages - 1) * ahead; ++step) {
        int64_t item = step;
        ((item >= 0 && item < count ? stages(item) : void(), item -= ahead), ...);
    }
}

// Each small page of a big table would cost a walk through the page table.
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

}  // namespace kvpager
