// KVCacheCoordinator as Python holds it: live requests by id and by object.
#pragma once

#include <nanobind/nanobind.h>

#include <array>

#include "arguments.h"
#include "pool_bindings.h"
#include "request_reader.h"

namespace kvpager {

// What allocate_slots asks for, as Python gives it.
struct DemandArguments {
    nanobind::handle num_new_tokens, num_hit_tokens, num_lookahead_tokens, num_external_tokens, num_encoder_tokens;
    nanobind::handle delays_commit, full_sequence_must_fit, reserved_blocks, has_scheduled_requests;
};

// The positions that a batch's requests got, and who got none.
class DecodeSlots {
public:
    std::optional<int64_t> refused;

    // Each group's ids that were appended.
    void add(int64_t index, std::span<const std::span<const BlockId>> appended);
    nanobind::list changed() const;
    nanobind::tuple block_ids(int64_t index) const;

private:
    struct Entry {
        int64_t index;
        size_t begin;  // into `ids_`: for each group a count, then the ids
        size_t num_groups;
    };
    std::vector<Entry> entries_;
    std::vector<BlockId> ids_;
};

// Owns the core's coordinator and the requests themselves. It reads requests and arguments first, then calls the core, which
// runs no Python, and tells the pool's sampler last. Invariant: exactly the requests of `by_id_` are live in the core.
class CoordinatorObject {
public:
    CoordinatorObject(nanobind::object pool, nanobind::handle groups, nanobind::handle hash_block_size,
                      nanobind::handle max_model_len, nanobind::handle max_num_batched_tokens,
                      nanobind::handle watermark_blocks, bool can_hit, bool trusts_max_tokens, bool records_admissions);

    CoordinatorObject(const CoordinatorObject&) = delete;

    const KVCacheCoordinator& core() const { return core_; }

    // -- questions
    nanobind::tuple match(nanobind::handle request);
    nanobind::list match_each(nanobind::handle hashes, nanobind::handle max_tokens) const;
    bool fits_alone(nanobind::handle request, nanobind::handle num_lookahead, nanobind::handle num_encoder);
    nanobind::tuple check_fit(nanobind::handle request, nanobind::handle hit, nanobind::handle index_version,
                              nanobind::handle branch_point, const DemandArguments& given);
    nanobind::object tokens_to_commit(nanobind::handle request, const DemandArguments& given);
    nanobind::object tokens_to_cache(nanobind::handle request, nanobind::handle num_computed);
    bool can_continue(nanobind::handle request);
    nanobind::list live_requests() const { return nanobind::list(by_id_.values()); }
    nanobind::list request_ids() const { return nanobind::list(by_id_.keys()); }
    // Null if the id is not live.
    const LiveRequest* find(nanobind::handle request_id) const;

    // -- deeds
    nanobind::object allocate(nanobind::handle request, nanobind::handle hit, nanobind::handle index_version,
                              nanobind::handle branch_point, const DemandArguments& given);
    // Serves requests [start, …) until one is refused, or is to be told of in events or statistics; gives its index, or
    // their number.
    int64_t allocate_all(nanobind::handle requests, nanobind::handle counts, nanobind::handle num_lookahead,
                         nanobind::handle reserved, nanobind::handle has_scheduled, int64_t start, DecodeSlots& slots);
    nanobind::list cache_blocks(nanobind::handle request, nanobind::handle num_computed);
    void step_ends(nanobind::handle request, nanobind::handle num_tokens);
    void release(nanobind::handle request_id, nanobind::handle num_processed, nanobind::handle num_prompt);
    void free(nanobind::handle request);
    nanobind::list pop(nanobind::handle request);
    nanobind::dict invalidate(nanobind::handle block_ids);
    void clear_index();

    int traverse(visitproc visit, void* argument);
    void clear_references();

private:
    class Batch;

    static std::vector<SingleTypeKVCacheManager> groups_of(nanobind::handle groups);
    Demand demand_of(const DemandArguments& given) const;
    bool looks_at_status(const Demand& demand) const {
        return core_.options().watermark_blocks > 0 && demand.has_scheduled_requests;
    }
    Hit hit_of(nanobind::handle lists, nanobind::handle index_version, nanobind::handle branch_point,
               nanobind::tuple& held) const;
    ReadRequest read(PyObject* request, const Demand& demand);
    LiveRequest* live(nanobind::handle request, nanobind::object& id);
    LiveRequest& known(nanobind::handle request);
    Outcome allocate(PyObject* request, const ReadRequest& read, const Demand& demand, const Hit& hit);

    nanobind::object pool_object_;
    PoolObject& pool_;
    KVCacheCoordinator core_;
    nanobind::dict by_id_;
    bool trusts_max_tokens_;  // else what a request has by now is all that counts
    bool records_admissions_;
    RequestReader reader_;
};

void bind_coordinator(nanobind::module_& module);

}  // namespace kvpager
