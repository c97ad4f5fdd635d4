// The table of live requests beside a std::map.
#include <doctest/doctest.h>

#include <map>

#include "manager/live_requests.h"
#include "support.h"

namespace kvpager {

namespace {

// An address that nobody looks behind.
const void* key_of(int64_t number, int64_t step) {
    return reinterpret_cast<const void*>(static_cast<uintptr_t>(0x10000 + number * step));
}

std::map<const void*, LiveRequest*> all_of(const LiveRequests& live) {
    std::map<const void*, LiveRequest*> all;
    live.for_each([&](LiveRequest& request) { CHECK(all.emplace(request.key, &request).second); });
    return all;
}

}  // namespace

TEST_CASE("who was added is found, who was removed is not") {
    LiveRequests live;
    const void *one = key_of(1, 64), *two = key_of(2, 64);
    LiveRequest& first = live.add(std::make_unique<LiveRequest>(one, 3));
    CHECK(first.tables.size() == 3);
    CHECK(live.find(one) == &first);
    CHECK(live.find(two) == nullptr);
    live.remove(one);
    CHECK(live.find(one) == nullptr);
    CHECK(live.size() == 0);
}

TEST_CASE("thousands of them come and go as in a map") {
    Random random(test_seed());
    // As close as the host's objects may lie, as far apart as pages, and as an allocator's size classes.
    for (int64_t step : {8, 16, 64, 1520, 4096, 1 << 21}) {
        CAPTURE(step);
        LiveRequests live;
        std::map<const void*, LiveRequest*> naive;
        for (int turn = 0; turn < 20000; ++turn) {
            const void* key = key_of(random.between(0, 4000), step);
            auto known = naive.find(key);
            REQUIRE(live.find(key) == (known == naive.end() ? nullptr : known->second));
            bool is_growing = turn / 4000 % 2 == 0;
            if (known == naive.end() && random.percent(is_growing ? 90 : 30)) {
                naive[key] = &live.add(std::make_unique<LiveRequest>(key, 1));
            } else if (known != naive.end() && random.percent(is_growing ? 30 : 90)) {
                live.remove(key);
                naive.erase(known);
            }
            REQUIRE(live.size() == std::ssize(naive));
            if (turn % 1000 == 0) REQUIRE(all_of(live) == naive);  // and nobody moved
        }
        REQUIRE(all_of(live) == naive);
        live.clear();
        REQUIRE(live.size() == 0);
        REQUIRE(all_of(live).empty());
    }
}

}  // namespace kvpager
