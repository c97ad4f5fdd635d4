#include "coordinator_bindings.h"

namespace nb = nanobind;

namespace kvpager {

namespace {

// Calls the core on behalf of one request: what it refuses names the request.
template <typename Call>
auto for_request(nb::handle id, Call call) {
    try {
        return call();
    } catch (const Error& error) {
        raise(exception_of(error.kind()), "request %R: %s", id.ptr(), error.what());
    }
}

nb::list as_lists(const std::vector<BlockIds>& blocks) {
    return list_of(blocks, [](const BlockIds& ids) { return nb::cast(BlockList{ids}); });
}

nb::list as_runs(const std::vector<StoredRun>& stored) {
    return list_of(stored, [](const StoredRun& run) { return nb::make_tuple(run.group, as_python_range(run.positions)); });
}

bool is_true(nb::handle value) {
    int truth = PyObject_IsTrue(value.ptr());
    if (truth < 0) throw nb::python_error();
    return truth != 0;
}

}  // namespace

CoordinatorObject::CoordinatorObject(nb::object pool, nb::handle groups, nb::handle hash_block_size,
                                     nb::handle max_model_len, nb::handle max_num_batched_tokens,
                                     nb::handle watermark_blocks, bool can_hit, bool trusts_max_tokens,
                                     bool records_admissions)
    : pool_object_(std::move(pool)),
      pool_(as<PoolObject>(pool_object_)),
      core_(pool_.pool, groups_of(groups),
            {.hash_block_size = int_argument(hash_block_size, "hash_block_size", 1, config_error),
             .max_model_len = int_argument(max_model_len, "max_model_len", 1, config_error),
             .max_num_batched_tokens = int_argument(max_num_batched_tokens, "max_num_batched_tokens", 1, config_error),
             .watermark_blocks = int_argument(watermark_blocks, "watermark_blocks", 0, config_error),
             .can_hit = can_hit}),
      trusts_max_tokens_(trusts_max_tokens),
      records_admissions_(records_admissions) {}

std::vector<SingleTypeKVCacheManager> CoordinatorObject::groups_of(nb::handle groups) {
    std::vector<SingleTypeKVCacheManager> made;
    for (nb::handle group : as_tuple(groups)) made.push_back(as<SingleTypeKVCacheManager>(group));
    return made;
}

// -- reading --------------------------------------------------------------------------------------

Demand CoordinatorObject::demand_of(const DemandArguments& given) const {
    return {.num_new_tokens = int_argument(given.num_new_tokens, "num_new_tokens", 0),
            .num_hit_tokens = int_argument(given.num_hit_tokens, "num_new_computed_tokens", 0),
            .num_lookahead_tokens = int_argument(given.num_lookahead_tokens, "num_lookahead_tokens", 0),
            .num_external_tokens = int_argument(given.num_external_tokens, "num_external_computed_tokens", 0),
            .num_encoder_tokens = int_argument(given.num_encoder_tokens, "num_encoder_tokens", 0),
            .delays_commit = is_true(given.delays_commit),
            .full_sequence_must_fit = is_true(given.full_sequence_must_fit),
            .reserved_blocks = int_argument(given.reserved_blocks, "reserved_blocks", 0),
            .has_scheduled_requests = is_true(given.has_scheduled_requests)};
}

static void check_something_to_do(const Demand& demand) {
    if (demand.num_new_tokens > 0 || demand.num_external_tokens > 0) return;
    raise(invalid_request_error,
          "num_new_tokens is 0 and there are no external tokens: nothing to allocate; call it with at least one");
}

// `lists`: one block list a group, or None.
Hit CoordinatorObject::hit_of(nb::handle lists, nb::handle index_version, nb::handle branch_point, nb::tuple& held) const {
    if (lists.is_none()) return {};
    held = as_tuple(lists);
    Hit hit{.blocks = {},
            .index_version = int_argument(index_version, "generation", 0),
            .branch_point = int_argument(branch_point, "junction", 0)};
    size_t num_blocks = 0;
    for (nb::handle list : held) {
        hit.blocks.push_back(&as<BlockList>(list).ids);
        num_blocks += hit.blocks.back()->size();
    }
    if (hit.blocks.size() != core_.groups().size()) {
        raise(invalid_request_error, "a hit of %zu groups was given for %zu groups", hit.blocks.size(),
              core_.groups().size());
    }
    if (num_blocks == 0) hit.blocks.clear();
    return hit;
}

// The live request that it is. Null: it is none, and `id` its id, which no other live request has.
LiveRequest* CoordinatorObject::live(nb::handle request, nb::object& id) {
    if (LiveRequest* found = core_.find(request.ptr())) return found;
    id = reader_.id(request.ptr());
    LiveRequest* found = core_.find(request.ptr());
    if (found == nullptr && by_id_.contains(id)) {
        raise(duplicate_request_error,
              "request id %R is in use by another live request; free that one first or choose another id", id.ptr());
    }
    return found;
}

LiveRequest& CoordinatorObject::known(nb::handle request) {
    nb::object id;
    LiveRequest* found = live(request, id);
    if (found == nullptr) {
        raise(unknown_request_error, "request %R holds no blocks; allocate_slots must have admitted it first", id.ptr());
    }
    return *found;
}

ReadRequest CoordinatorObject::read(PyObject* request, const Demand& demand) {
    ReadRequest read = reader_.all(request, looks_at_status(demand));
    if (core_.find(request) == nullptr) {
        if (trusts_max_tokens_) reader_.read_max_tokens(request, read.numbers);
        if (records_admissions_) read.admission = reader_.admission(request, read.numbers);
    }
    // Reading may have run anything; from here on nothing does until the request is whole again.
    if (LiveRequest* found = live(request, read.id)) read.id = nb::borrow(static_cast<const PyObject*>(found->name));
    return read;
}

const LiveRequest* CoordinatorObject::find(nb::handle request_id) const {
    PyObject* request = PyDict_GetItemWithError(by_id_.ptr(), request_id.ptr());
    if (request == nullptr && PyErr_Occurred()) throw nb::python_error();
    return request == nullptr ? nullptr : core_.find(request);
}

// -- questions ------------------------------------------------------------------------------------

nb::tuple CoordinatorObject::match(nb::handle request) {
    Match match{0, std::vector<BlockIds>(core_.groups().size()), 0};
    if (core_.options().can_hit && reader_.reads_prefix_cache(request.ptr())) {
        ReadRequest read = reader_.all(request.ptr(), false);
        int64_t most = core_.num_shareable(read.numbers.num_tokens - 1, read.numbers.num_prompt_tokens);
        match = core_.match(read.numbers.hashes, std::max<int64_t>(0, most));
    }
    return nb::make_tuple(as_lists(match.blocks), match.num_tokens, match.branch_point);
}

nb::list CoordinatorObject::match_each(nb::handle hashes, nb::handle max_tokens) const {
    int64_t most = int_argument(max_tokens, "max_tokens", 0);
    HashReader reader(hashes);
    return list_of(core_.match_each(reader.source(), most), [](const Match& match) {
        return nb::make_tuple(nb::cast(BlockList{match.blocks[0]}), match.num_tokens);
    });
}

bool CoordinatorObject::fits_alone(nb::handle request, nb::handle num_lookahead, nb::handle num_encoder) {
    int64_t lookahead = int_argument(num_lookahead, "num_lookahead_tokens", 0);
    int64_t encoder = int_argument(num_encoder, "num_encoder_tokens", 0);
    ReadRequest read = reader_.all(request.ptr(), false);
    if (trusts_max_tokens_) reader_.read_max_tokens(request.ptr(), read.numbers);
    return core_.fits_alone(read.numbers, lookahead, encoder);
}

nb::tuple CoordinatorObject::check_fit(nb::handle request, nb::handle lists, nb::handle index_version,
                                       nb::handle branch_point, const DemandArguments& given) {
    Demand demand = demand_of(given);
    check_something_to_do(demand);
    nb::tuple held;
    Hit hit = hit_of(lists, index_version, branch_point, held);
    ReadRequest request_read = read(request.ptr(), demand);
    FitReport report =
        for_request(request_read.id, [&] { return core_.check_fit(request.ptr(), request_read.numbers, demand, hit); });
    return nb::make_tuple(static_cast<int>(report.fit), as_list(report.needs), report.num_needed, report.num_short);
}

nb::object CoordinatorObject::tokens_to_commit(nb::handle request, const DemandArguments& given) {
    Demand demand = demand_of(given);
    int64_t computed = reader_.num_computed_tokens(request.ptr());
    LiveRequest* found = core_.find(request.ptr());
    bool is_no_op = found != nullptr && demand.num_external_tokens == 0 && core_.is_no_op(*found, computed, demand);
    if (demand.delays_commit || is_no_op) return as_python_range({});
    ReadRequest request_read = read(request.ptr(), demand);
    return as_python_range(core_.tokens_to_commit(core_.find(request.ptr()), request_read.numbers, demand));
}

nb::object CoordinatorObject::tokens_to_cache(nb::handle request, nb::handle num_computed) {
    int64_t computed = int_argument(num_computed, "num_computed_tokens", 0);
    ReadRequest read = reader_.all(request.ptr(), false);
    LiveRequest& found = known(request);
    return as_python_range(core_.tokens_to_commit(&found, computed, std::min(computed, read.numbers.num_tokens)));
}

bool CoordinatorObject::can_continue(nb::handle request) {
    int64_t computed = reader_.num_computed_tokens(request.ptr());
    LiveRequest* found = core_.find(request.ptr());
    return found == nullptr || found->min_computed_tokens <= computed;
}

// -- deeds ----------------------------------------------------------------------------------------

nb::object CoordinatorObject::allocate(nb::handle request, nb::handle lists, nb::handle index_version,
                                       nb::handle branch_point, const DemandArguments& given) {
    Demand demand = demand_of(given);
    check_something_to_do(demand);
    bool is_plain = demand.num_external_tokens == 0 && demand.num_encoder_tokens == 0 && demand.num_hit_tokens == 0 &&
                    !demand.delays_commit && !demand.full_sequence_must_fit && lists.is_none();
    if (is_plain) {
        int64_t computed = reader_.num_computed_tokens(request.ptr());
        LiveRequest* found = core_.find(request.ptr());
        if (found != nullptr && core_.is_no_op(*found, computed, demand)) return nb::steal(PyTuple_New(0));
    }
    nb::tuple held;
    Hit hit = hit_of(lists, index_version, branch_point, held);
    ReadRequest request_read = read(request.ptr(), demand);
    Outcome outcome = allocate(request.ptr(), request_read, demand, hit);
    // What is told is copied first: to make Python's objects may run finalizers, which may call in here.
    std::vector<BlockIds> appended;
    bool has_any = false;
    for (size_t i = 0; outcome == Outcome::allocated && i < core_.groups().size(); ++i) {
        std::span<const BlockId> ids = core_.appended(*core_.find(request.ptr()), i);
        appended.emplace_back(ids.begin(), ids.end());
        has_any |= !ids.empty();
    }
    std::vector<StoredRun> stored = core_.stored();
    pool_.tell_sampler();
    if (outcome == Outcome::refused) return nb::none();
    return nb::make_tuple(has_any ? nb::object(as_lists(appended)) : nb::none(), as_runs(stored), request_read.admission);
}

Outcome CoordinatorObject::allocate(PyObject* request, const ReadRequest& read, const Demand& demand, const Hit& hit) {
    Outcome outcome =
        for_request(read.id, [&] { return core_.allocate(request, read.id.ptr(), read.numbers, demand, hit); });
    if (outcome == Outcome::allocated && !by_id_.contains(read.id)) by_id_[read.id] = nb::borrow(request);
    return outcome;
}

nb::list CoordinatorObject::cache_blocks(nb::handle request, nb::handle num_computed) {
    int64_t computed = int_argument(num_computed, "num_computed_tokens", 0);
    if (computed <= known(request).no_op_until) return nb::list();
    ReadRequest read = reader_.all(request.ptr(), false);
    LiveRequest& found = known(request);
    nb::object id = nb::borrow(static_cast<const PyObject*>(found.name));
    for_request(id, [&] { core_.cache_blocks(found, read.numbers, computed); });
    std::vector<StoredRun> stored = core_.stored();
    pool_.tell_sampler();
    return as_runs(stored);
}

void CoordinatorObject::step_ends(nb::handle request, nb::handle num_tokens) {
    int64_t count = int_argument(num_tokens, "num_tokens", 0);
    core_.note_step_end(known(request), count);
}

void CoordinatorObject::release(nb::handle request_id, nb::handle num_processed, nb::handle num_prompt) {
    int64_t processed = int_argument(num_processed, "total_computed_tokens", 0), prompt = -1;
    if (!num_prompt.is_none()) prompt = int_argument(num_prompt, "num_prompt_tokens", 0);
    const LiveRequest* found = find(request_id);
    if (found == nullptr) return;
    core_.release(*core_.find(found->key), processed, prompt < 0 ? found->num_prompt_tokens : prompt);
}

void CoordinatorObject::free(nb::handle request) {
    if (core_.find(request.ptr()) == nullptr) return;
    ReadRequest read = reader_.counts(request.ptr());
    LiveRequest* found = core_.find(request.ptr());
    if (found == nullptr) return;
    nb::object id = nb::borrow(static_cast<const PyObject*>(found->name)), kept = nb::borrow(request);
    core_.free(*found, read.numbers);
    nb::del(by_id_[id]);
    pool_.tell_sampler();
}

nb::list CoordinatorObject::pop(nb::handle request) {
    LiveRequest* found = core_.find(request.ptr());
    if (found == nullptr) return nb::list();
    nb::object id = nb::borrow(static_cast<const PyObject*>(found->name)), kept = nb::borrow(request);
    std::vector<BlockId> blocks = core_.pop(*found);
    nb::del(by_id_[id]);
    return as_list(blocks);
}

nb::dict CoordinatorObject::invalidate(nb::handle block_ids) {
    std::vector<BlockId> blocks = as_vector(block_ids, [&](nb::handle id) { return checked_id(pool_.pool, id); });
    auto holders = core_.invalidate(blocks);
    nb::dict first;
    for (nb::handle id : by_id_.keys()) {
        const LiveRequest* live = find(id);
        for (const auto& [holder, token] : holders) {
            if (holder == live) first[id] = token;
        }
    }
    pool_.tell_sampler();
    return first;
}

void CoordinatorObject::clear_index() {
    core_.clear_index();
    pool_.tell_sampler();
}

int CoordinatorObject::traverse(visitproc visit, void* arg) {
    Py_VISIT(pool_object_.ptr());
    Py_VISIT(by_id_.ptr());
    return 0;
}

// Whoever clears a cycle leaves nothing behind that could still be stepped. The pool stays: the core refers to it.
void CoordinatorObject::clear_references() {
    core_.forget_all();
    nb::dict requests = std::exchange(by_id_, nb::dict());
}

// -- batches --------------------------------------------------------------------------------------

void DecodeSlots::add(int64_t index, std::span<const std::span<const BlockId>> appended) {
    bool has_any = false;
    for (std::span<const BlockId> ids : appended) has_any |= !ids.empty();
    if (!has_any) return;
    entries_.push_back({index, ids_.size(), appended.size()});
    for (std::span<const BlockId> ids : appended) {
        ids_.push_back(static_cast<BlockId>(ids.size()));
        ids_.insert(ids_.end(), ids.begin(), ids.end());
    }
}

nb::list DecodeSlots::changed() const {
    return list_of(entries_, [](const Entry& entry) { return nb::int_(entry.index); });
}

nb::tuple DecodeSlots::block_ids(int64_t index) const {
    auto found = std::lower_bound(entries_.begin(), entries_.end(), index,
                                  [](const Entry& entry, int64_t wanted) { return entry.index < wanted; });
    nb::list groups;
    if (found != entries_.end() && found->index == index) {
        const BlockId* at = &ids_[found->begin];
        for (size_t i = 0; i < found->num_groups; ++i) {
            groups.append(as_list(std::span(at + 1, static_cast<size_t>(*at))));
            at += 1 + *at;
        }
    }
    return nb::tuple(groups);
}

// Serves the requests of a batch in order. In most steps most of them are no-ops; what the others touch is in no near
// cache, one thing found through the other. So whoever is not a no-op waits until some more of those have been found, and
// each time the next link of its chain is fetched.
class CoordinatorObject::Batch {
public:
    Batch(CoordinatorObject& coordinator, PyObject* requests, PyObject* counts, const Demand& demand, DecodeSlots& slots)
        : coordinator_(coordinator), requests_(requests), counts_(counts), demand_(demand), slots_(slots) {
        // Where blocks must be left free, the steps of those before decide whether a no-op is refused.
        if (coordinator.core_.most_to_keep(demand) > 0) most_waiting_ = 0;
    }

    // The index of the first request that was refused or is to be told of in events or statistics, or their number.
    int64_t run(int64_t start) {
        int64_t size = PyTuple_GET_SIZE(requests_);
        for (int64_t index = start; index < size; ++index) {
            prefetch_requests(index);
            if (is_no_op(index)) continue;
            fetch_links();
            coordinator_.reader_.prefetch_values(request(index));
            waiting_[num_waiting_++] = index;
            if (num_waiting_ > most_waiting_ && !serve_first()) return waiting_[0];
        }
        while (num_waiting_ > 0) {
            fetch_links();
            if (!serve_first()) return waiting_[0];
        }
        return size;
    }

private:
    static constexpr int64_t max_waiting = 2;

    PyObject* request(int64_t index) const { return PyTuple_GET_ITEM(requests_, index); }

    Demand demand_of(int64_t index) const {
        Demand demand = demand_;
        demand.num_new_tokens = 1;
        if (counts_ != Py_None) demand.num_new_tokens = int_argument(PyTuple_GET_ITEM(counts_, index), "num_new_tokens", 0);
        check_something_to_do(demand);
        return demand;
    }

    bool is_no_op(int64_t index) {
        Demand demand = demand_;
        if (uint32_t count = 1; counts_ == Py_None || small_int(PyTuple_GET_ITEM(counts_, index), count)) {
            demand.num_new_tokens = count;
        } else {
            return false;
        }
        LiveRequest* live = coordinator_.core_.find(request(index));
        if (live == nullptr || demand.num_new_tokens == 0) return false;
        int64_t computed = coordinator_.reader_.num_computed_tokens(request(index));
        live = coordinator_.core_.find(request(index));
        return live != nullptr && coordinator_.core_.is_no_op(*live, computed, demand);
    }

    // False: it was refused, or is to be told of in events or statistics.
    bool serve_first() {
        int64_t index = waiting_[0];
        Demand demand = demand_of(index);
        KVCacheCoordinator& core = coordinator_.core_;
        ReadRequest read = coordinator_.read(request(index), demand);
        const LiveRequest* live = core.find(request(index));
        if (live == nullptr && coordinator_.records_admissions_) return false;
        if (coordinator_.pool_.pool.logs_changes() && core.tokens_to_commit(live, read.numbers, demand).size() > 0) {
            return false;
        }
        Outcome outcome = coordinator_.allocate(request(index), read, demand, {});
        if (outcome == Outcome::refused) {
            slots_.refused = index;
        } else {
            appended_.clear();
            live = core.find(request(index));
            for (size_t i = 0; i < core.groups().size(); ++i) appended_.push_back(core.appended(*live, i));
            slots_.add(index, appended_);
        }
        coordinator_.pool_.tell_sampler();
        if (outcome == Outcome::refused) return false;
        std::copy(waiting_.begin() + 1, waiting_.begin() + num_waiting_, waiting_.begin());
        --num_waiting_;
        return true;
    }

    // With thousands of running requests, what is read of each is in no near cache.
    void prefetch_requests(int64_t index) const {
        int64_t size = PyTuple_GET_SIZE(requests_);
        if (index + 8 < size) {
            coordinator_.reader_.prefetch_slots(request(index + 8));
            coordinator_.core_.live().prefetch_slot(request(index + 8));
        }
        if (index + 4 < size) {
            coordinator_.reader_.prefetch_computed(request(index + 4));
            coordinator_.core_.live().prefetch_live(request(index + 4));
        }
    }

    // The longer one has waited, the further its chain: its tables, then their ends.
    void fetch_links() const {
        for (int64_t i = 0; i < num_waiting_; ++i) {
            const LiveRequest* live = coordinator_.core_.find(request(waiting_[i]));
            if (live == nullptr) continue;
            if (i == num_waiting_ - 1) {
                for (const Table& table : live->tables) table.prefetch_all();
                coordinator_.reader_.prefetch_last_hash(request(waiting_[i]));
            } else {
                for (const Table& table : live->tables) table.prefetch_ends();
            }
        }
    }

    CoordinatorObject& coordinator_;
    PyObject *requests_, *counts_;  // tuples, or None for the counts
    const Demand& demand_;
    DecodeSlots& slots_;
    int64_t most_waiting_ = max_waiting;
    std::array<int64_t, max_waiting + 1> waiting_{};
    int64_t num_waiting_ = 0;
    std::vector<std::span<const BlockId>> appended_;
};

int64_t CoordinatorObject::allocate_all(nb::handle requests, nb::handle counts, nb::handle num_lookahead,
                                        nb::handle reserved, nb::handle has_scheduled, int64_t start,
                                        DecodeSlots& slots) {
    nb::tuple batch = as_tuple(requests);
    nb::object given = counts.is_none() ? nb::none() : nb::object(as_tuple(counts));
    if (!given.is_none() && nb::len(given) != nb::len(batch)) {
        raise(invalid_request_error, "%zu numbers of new tokens were given for %zu requests; give one each", nb::len(given),
              nb::len(batch));
    }
    Demand demand;
    demand.num_lookahead_tokens = int_argument(num_lookahead, "num_lookahead_tokens", 0);
    demand.reserved_blocks = int_argument(reserved, "reserved_blocks", 0);
    demand.has_scheduled_requests = is_true(has_scheduled);
    return Batch(*this, batch.ptr(), given.ptr(), demand, slots).run(std::max<int64_t>(start, 0));
}

}  // namespace kvpager
