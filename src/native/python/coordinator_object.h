// KVCacheCoordinator as Python holds it: live requests by id and by object.
#pragma once

#include "pool_bindings.h"
#include "request_reader.h"

namespace kvpager {

// Owns the core's coordinator and the requests themselves. It reads requests and arguments first, then calls the core,
// which runs no Python, and tells the pool's sampler last. Invariant: exactly the requests of `by_id_` are live in the
// core.
class CoordinatorObject {
    // Calls the core on behalf of one request: what it refuses names the request.
    template <typename Call>
    static auto for_request(nanobind::handle id, Call call) {
        try {
            return call();
        } catch (const Error& error) {
            raise(error.kind(), "request %R: %s", id.ptr(), error.what());
        }
    }

public:
    CoordinatorObject(nanobind::object pool, nanobind::handle groups, const KVCacheCoordinator::Options& options,
                      bool trusts_max_tokens, bool records_admissions)
        : pool_object_(std::move(pool)),
          pool_(as<PoolObject>(pool_object_)),
          core_(pool_.pool, as_vector(as_tuple(groups), as<SingleTypeKVCacheManager>), options),
          trusts_max_tokens_(trusts_max_tokens),
          records_admissions_(records_admissions) {}
    CoordinatorObject(const CoordinatorObject&) = delete;

    const KVCacheCoordinator& core() const { return core_; }
    const nanobind::dict& by_id() const { return by_id_; }

    // -- reading -----------------------------------------------------------------------------------

    // Null if the id is not live.
    LiveRequest* find(nanobind::handle request_id) const {
        PyObject* request = PyDict_GetItemWithError(by_id_.ptr(), request_id.ptr());
        if (request == nullptr && PyErr_Occurred()) throw nanobind::python_error();
        return request == nullptr ? nullptr : core_.find(request);
    }

    // What an allocation needs of a request, and its id, which no other live request has.
    ReadRequest read(PyObject* request, const Demand& demand) {
        ReadRequest read = reader_.all(request, core_.options().watermark_blocks > 0 && demand.has_scheduled_requests);
        if (core_.find(request) == nullptr) {
            if (trusts_max_tokens_) reader_.read_max_tokens(request, read.numbers);
            if (records_admissions_) read.admission = reader_.admission(request, read.numbers);
        }
        // Reading may have run anything; from here on nothing does until the request is whole again.
        if (LiveRequest* found = live(request, read.id)) read.id = name_of(*found);
        return read;
    }

    // A list of blocks may have been made by hand.
    void check_id(BlockId id) const {
        if (id < pool_.pool.num_blocks()) return;
        raise(ErrorKind::unknown_block, "block id %d is not in the pool; ids are 0 to %zd", id,
              Py_ssize_t{pool_.pool.num_blocks() - 1});
    }

    // -- questions ---------------------------------------------------------------------------------

    nanobind::tuple match(nanobind::handle request) {
        Match match{0, std::vector<BlockIds>(core_.groups().size()), 0};
        if (core_.options().can_hit && reader_.reads_prefix_cache(request.ptr())) {
            ReadRequest read = reader_.all(request.ptr(), false);
            int64_t most = core_.num_shareable(read.numbers.num_tokens - 1, read.numbers.num_prompt_tokens);
            match = core_.match(read.numbers.hashes, std::max<int64_t>(0, most));
        }
        return nanobind::make_tuple(as_lists(match.blocks), match.num_tokens, match.branch_point);
    }

    nanobind::list match_each(nanobind::handle hashes, nanobind::handle max_tokens) const {
        int64_t most = int_argument(max_tokens, "max_tokens", 0);
        HashReader reader(hashes);
        return list_of(core_.groups(), [&](const SingleTypeKVCacheManager& group) {
            Match match = core_.match_alone(reader.source(), most, group);
            return nanobind::make_tuple(BlockList{match.blocks[group.id()]}, match.num_tokens);
        });
    }

    bool fits_alone(nanobind::handle request, nanobind::handle num_lookahead, nanobind::handle num_encoder) {
        int64_t lookahead = int_argument(num_lookahead, "num_lookahead_tokens", 0);
        int64_t encoder = int_argument(num_encoder, "num_encoder_tokens", 0);
        ReadRequest read = reader_.all(request.ptr(), false);
        if (trusts_max_tokens_) reader_.read_max_tokens(request.ptr(), read.numbers);
        return core_.fits_alone(read.numbers, lookahead, encoder);
    }

    nanobind::tuple check_fit(nanobind::handle request, const Demand& demand, const Hit& hit) {
        ReadRequest now = read(request.ptr(), demand);
        FitReport report =
            for_request(now.id, [&] { return core_.check_fit(request.ptr(), now.numbers, demand, hit); });
        return nanobind::make_tuple(static_cast<int>(report.fit), as_list(report.needs), report.num_needed,
                                    report.num_short);
    }

    // The tokens that a call may enter into the index: what events will tell of them is read before it.
    nanobind::object tokens_to_commit(nanobind::handle request, nanobind::handle num_hit, nanobind::handle num_external,
                                      nanobind::handle num_new) {
        int64_t hit = int_argument(num_hit, "num_new_computed_tokens", 0);
        int64_t external = int_argument(num_external, "num_external_computed_tokens", 0);
        int64_t added = external + int_argument(num_new, "num_new_tokens", 0);
        ReadRequest read = reader_.all(request.ptr(), false);
        int64_t start = read.numbers.num_computed_tokens + hit;
        return tokens_until(request, start, start + added, read);
    }
    nanobind::object tokens_to_cache(nanobind::handle request, nanobind::handle num_computed) {
        int64_t computed = int_argument(num_computed, "num_computed_tokens", 0);
        ReadRequest read = reader_.all(request.ptr(), false);
        return tokens_until(request, read.numbers.num_computed_tokens, computed, read);
    }

    bool can_continue(nanobind::handle request) {
        int64_t computed = reader_.num_computed_tokens(request.ptr());
        LiveRequest* found = core_.find(request.ptr());
        return found == nullptr || found->min_computed_tokens <= computed;
    }

    // -- deeds -------------------------------------------------------------------------------------

    // Whether the call changes nothing: two attributes are read.
    bool is_no_op(PyObject* request, const Demand& demand) {
        if (core_.find(request) == nullptr) return false;
        int64_t computed = reader_.num_computed_tokens(request);
        LiveRequest* found = core_.find(request);
        return found != nullptr && core_.is_no_op(*found, computed, demand);
    }

    nanobind::object allocate(nanobind::handle request, const Demand& demand, const Hit& hit) {
        ReadRequest now = read(request.ptr(), demand);
        Outcome outcome = allocate(request.ptr(), now, demand, hit);
        // What is told is copied first: to make Python's objects may run finalizers, which may call in here.
        std::vector<BlockIds> appended;
        bool has_any = false;
        for (size_t i = 0; outcome == Outcome::allocated && i < core_.groups().size(); ++i) {
            std::span<const BlockId> ids = core_.appended(*core_.find(request.ptr()), i);
            appended.emplace_back(ids.begin(), ids.end());
            has_any |= !ids.empty();
        }
        std::vector<StoredRun> stored = pool_.pool.logs_changes() ? core_.stored() : std::vector<StoredRun>();
        pool_.tell_sampler();
        if (outcome == Outcome::refused) return nanobind::none();
        nanobind::object lists = has_any ? nanobind::object(as_lists(appended)) : nanobind::none();
        return nanobind::make_tuple(lists, as_runs(stored), now.admission);
    }

    Outcome allocate(PyObject* request, const ReadRequest& read, const Demand& demand, const Hit& hit) {
        bool is_new = core_.find(request) == nullptr;
        Outcome outcome =
            for_request(read.id, [&] { return core_.allocate(request, read.id.ptr(), read.numbers, demand, hit); });
        if (outcome == Outcome::allocated && is_new) by_id_[read.id] = nanobind::borrow(request);
        return outcome;
    }

    // Whether events or statistics will tell of the call: what they tell is to be read before it.
    bool is_told_of(PyObject* request, const ReadRequest& read, const Demand& demand) const {
        const LiveRequest* found = core_.find(request);
        if (found == nullptr && records_admissions_) return true;
        int64_t computed = read.numbers.num_computed_tokens;
        int64_t end = std::min(computed + demand.num_new_tokens, read.numbers.num_tokens);
        return pool_.pool.logs_changes() && core_.tokens_to_commit(found, computed, end).size() > 0;
    }
    void tell_sampler() { pool_.tell_sampler(); }

    nanobind::object cache_blocks(nanobind::handle request, nanobind::handle num_computed) {
        int64_t computed = int_argument(num_computed, "num_computed_tokens", 0);
        if (computed <= known(request).no_op_until) return as_runs({});
        ReadRequest read = reader_.all(request.ptr(), false);
        LiveRequest& found = known(request);
        for_request(name_of(found), [&] { core_.cache_blocks(found, read.numbers, computed); });
        std::vector<StoredRun> stored = core_.stored();
        pool_.tell_sampler();
        return as_runs(stored);
    }

    void step_ends(nanobind::handle request, nanobind::handle num_tokens) {
        int64_t count = int_argument(num_tokens, "num_tokens", 0);
        core_.note_step_end(known(request), count);
    }

    void release(nanobind::handle request_id, nanobind::handle num_processed, nanobind::handle num_prompt) {
        int64_t processed = int_argument(num_processed, "total_computed_tokens", 0);
        int64_t prompt = num_prompt.is_none() ? -1 : int_argument(num_prompt, "num_prompt_tokens", 0);
        if (LiveRequest* found = find(request_id))
            core_.release(*found, processed, prompt < 0 ? found->num_prompt_tokens : prompt);
    }

    void free(nanobind::handle request) {
        if (core_.find(request.ptr()) == nullptr) return;
        ReadRequest read = reader_.counts(request.ptr());
        LiveRequest* found = core_.find(request.ptr());
        if (found == nullptr) return;
        nanobind::object id = name_of(*found), kept = nanobind::borrow(request);
        core_.free(*found, read.numbers);
        nanobind::del(by_id_[id]);
        pool_.tell_sampler();
    }

    nanobind::list pop(nanobind::handle request) {
        LiveRequest* found = core_.find(request.ptr());
        if (found == nullptr) return nanobind::list();
        nanobind::object id = name_of(*found), kept = nanobind::borrow(request);
        std::vector<BlockId> blocks = core_.pop(*found);
        nanobind::del(by_id_[id]);
        return as_list(blocks);
    }

    nanobind::dict invalidate(nanobind::handle block_ids) {
        std::vector<BlockId> blocks =
            as_vector(block_ids, [&](nanobind::handle id) { return checked_id(pool_.pool, id); });
        nanobind::list requests = by_id_.values();
        std::vector<int64_t> computed =
            as_vector(requests, [&](nanobind::handle one) { return reader_.num_computed_tokens(one.ptr()); });
        for (BlockId block : blocks) {
            if (pool_.pool.ref_count(block) > 0) continue;
            raise(
                ErrorKind::block_state,
                "block %d is neither held nor popped, so it may be somebody else's by now; report a failed load before "
                "its request is freed, or admit with delay_cache_blocks and commit once it has arrived",
                block);
        }
        for (size_t i = 0; i < computed.size(); ++i) {
            if (LiveRequest* live = core_.find(requests[i].ptr())) live->num_computed_tokens = computed[i];
        }
        auto holders = core_.invalidate(blocks);
        nanobind::dict first;
        for (const auto& [holder, token] : holders) first[name_of(*holder)] = token;
        pool_.tell_sampler();
        return first;
    }

    void clear_index() {
        core_.clear_index();
        pool_.tell_sampler();
    }

    // For Python's cycle collector. Whoever clears a cycle leaves nothing behind that could still be stepped.
    int traverse(visitproc visit, void* arg) {
        Py_VISIT(pool_object_.ptr());
        Py_VISIT(by_id_.ptr());
        return 0;
    }
    void clear_references() {
        core_.forget_all();
        nanobind::dict requests = std::exchange(by_id_, nanobind::dict());
    }

    // Requests that are served soon: what is read of them is in no near cache. None runs Python.
    const RequestReader& reader() const { return reader_; }

private:
    static nanobind::object name_of(const LiveRequest& live) {
        return nanobind::borrow(static_cast<PyObject*>(const_cast<void*>(live.name)));
    }

    static nanobind::object as_runs(const std::vector<StoredRun>& stored) {
        if (stored.empty()) return nanobind::steal(PyTuple_New(0));
        return list_of(stored, [](const StoredRun& run) {
            return nanobind::make_tuple(run.group, as_python_range(run.positions));
        });
    }

    nanobind::object tokens_until(nanobind::handle request, int64_t start, int64_t stop,
                                  const ReadRequest& read) const {
        int64_t end = std::min({stop, read.numbers.num_tokens, core_.options().max_model_len});
        return as_python_range(core_.tokens_to_commit(core_.find(request.ptr()), start, end));
    }

    // The live request that it is. Null: it is none, and `id` its id, which no other live request has.
    LiveRequest* live(nanobind::handle request, nanobind::object& id) {
        if (LiveRequest* found = core_.find(request.ptr())) return found;
        id = reader_.id(request.ptr());
        LiveRequest* found = core_.find(request.ptr());
        if (found == nullptr && by_id_.contains(id)) {
            raise(ErrorKind::duplicate_request,
                  "request id %R is in use by another live request; free that one first or choose another id",
                  id.ptr());
        }
        return found;
    }

    LiveRequest& known(nanobind::handle request) {
        nanobind::object id;
        if (LiveRequest* found = live(request, id)) return *found;
        raise(ErrorKind::unknown_request, "request %R holds no blocks; allocate_slots must have admitted it first",
              id.ptr());
    }

    nanobind::object pool_object_;
    PoolObject& pool_;
    KVCacheCoordinator core_;
    nanobind::dict by_id_;
    bool trusts_max_tokens_;  // else what a request has by now is all that counts
    bool records_admissions_;
    RequestReader reader_;
};

}  // namespace kvpager
