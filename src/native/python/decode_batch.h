// allocate_slots for a whole batch of running requests.
#pragma once

#include "coordinator_object.h"

namespace kvpager {

// The positions that a batch's requests got, and who got none.
class DecodeSlots {
public:
    std::optional<int64_t> refused;

    // Each group's ids that were appended.
    void add(int64_t index, std::span<const std::span<const BlockId>> appended) {
        bool has_any = false;
        for (std::span<const BlockId> ids : appended) has_any |= !ids.empty();
        if (!has_any) return;
        entries_.push_back({index, ids_.size(), appended.size()});
        for (std::span<const BlockId> ids : appended) {
            ids_.push_back(static_cast<BlockId>(ids.size()));
            ids_.insert(ids_.end(), ids.begin(), ids.end());
        }
    }

    nanobind::list changed() const {
        return list_of(entries_, [](const Entry& entry) { return nanobind::int_(entry.index); });
    }

    nanobind::tuple block_ids(int64_t index) const {
        auto found = std::lower_bound(entries_.begin(), entries_.end(), index,
                                      [](const Entry& entry, int64_t wanted) { return entry.index < wanted; });
        nanobind::list groups;
        if (found == entries_.end() || found->index != index) return nanobind::tuple(groups);
        const BlockId* at = &ids_[found->begin];
        for (size_t i = 0; i < found->num_groups; ++i, at += 1 + *at) {
            groups.append(as_list(std::span(at + 1, static_cast<size_t>(*at))));
        }
        return nanobind::tuple(groups);
    }

private:
    struct Entry {
        int64_t index;
        size_t begin;  // into `ids_`: for each group a count, then the ids
        size_t num_groups;
    };
    std::vector<Entry> entries_;
    std::vector<BlockId> ids_;
};

// Serves the requests of a batch in order. In most steps most of them are no-ops; what the others touch is in no near
// cache, one thing found through the other. So whoever is not a no-op waits until some more of those have been found,
// and each time the next link of its chain is fetched.
class DecodeBatch {
public:
    // `requests` and `counts` are tuples; None: each computes one token.
    DecodeBatch(CoordinatorObject& coordinator, PyObject* requests, PyObject* counts, const Demand& demand,
                DecodeSlots& slots)
        : coordinator_(coordinator), requests_(requests), counts_(counts), demand_(demand), slots_(slots) {
        // Where blocks must be left free, the steps of those before decide whether a no-op is refused.
        if (coordinator.core().most_to_keep(demand) > 0) most_waiting_ = 0;
    }

    // The index of the first request that was refused or is to be told of, or their number.
    int64_t run(int64_t start) {
        for (int64_t index = start; index < PyTuple_GET_SIZE(requests_); ++index) {
            prefetch_requests(index);
            if (coordinator_.is_no_op(request(index), demand_of(index))) continue;
            fetch_links();
            coordinator_.reader().prefetch_values(request(index));
            waiting_[num_waiting_++] = index;
            if (num_waiting_ > most_waiting_ && !serve_first()) return waiting_[0];
        }
        while (num_waiting_ > 0) {
            fetch_links();
            if (!serve_first()) return waiting_[0];
        }
        return PyTuple_GET_SIZE(requests_);
    }

private:
    static constexpr int64_t max_waiting = 2;

    PyObject* request(int64_t index) const { return PyTuple_GET_ITEM(requests_, index); }

    Demand demand_of(int64_t index) const {
        Demand demand = demand_;
        demand.num_new_tokens = 1;
        if (counts_ != Py_None)
            demand.num_new_tokens = int_argument(PyTuple_GET_ITEM(counts_, index), "num_new_tokens", 0);
        check_something_to_do(demand);
        return demand;
    }

    // False: it was refused, or is to be told of.
    bool serve_first() {
        int64_t index = waiting_[0];
        Demand demand = demand_of(index);
        ReadRequest read = coordinator_.read(request(index), demand);
        if (coordinator_.is_told_of(request(index), read, demand)) return false;
        Outcome outcome = coordinator_.allocate(request(index), read, demand, {});
        if (outcome == Outcome::refused) {
            slots_.refused = index;
        } else {
            const KVCacheCoordinator& core = coordinator_.core();
            appended_.clear();
            for (size_t i = 0; i < core.groups().size(); ++i) {
                appended_.push_back(core.appended(*core.find(request(index)), i));
            }
            slots_.add(index, appended_);
        }
        coordinator_.tell_sampler();
        if (outcome == Outcome::refused) return false;
        std::copy(waiting_ + 1, waiting_ + num_waiting_, waiting_);
        --num_waiting_;
        return true;
    }

    // With thousands of running requests, what is read of each is in no near cache.
    void prefetch_requests(int64_t index) const {
        if (index + 8 < PyTuple_GET_SIZE(requests_)) {
            coordinator_.reader().prefetch_slots(request(index + 8));
            coordinator_.core().live().prefetch_slot(request(index + 8));
        }
        if (index + 4 < PyTuple_GET_SIZE(requests_)) {
            coordinator_.reader().prefetch_computed(request(index + 4));
            coordinator_.core().live().prefetch_live(request(index + 4));
        }
    }

    // The longer one has waited, the further its chain: its tables, then their ends.
    void fetch_links() const {
        for (int64_t i = 0; i < num_waiting_; ++i) {
            const LiveRequest* live = coordinator_.core().find(request(waiting_[i]));
            bool is_last = i == num_waiting_ - 1;
            if (is_last) coordinator_.reader().prefetch_last_hash(request(waiting_[i]));
            for (size_t group = 0; live != nullptr && group < live->tables.size(); ++group) {
                is_last ? live->tables[group].prefetch_all() : live->tables[group].prefetch_ends();
            }
        }
    }

    CoordinatorObject& coordinator_;
    PyObject *requests_, *counts_;
    const Demand& demand_;
    DecodeSlots& slots_;
    int64_t most_waiting_ = max_waiting, num_waiting_ = 0;
    int64_t waiting_[max_waiting + 1] = {};
    std::vector<std::span<const BlockId>> appended_;
};

}  // namespace kvpager
