// What is read of a host's request: every attribute that the compiled part knows by name stands here.
#pragma once

#include "../manager/coordinator.h"
#include "attributes.h"
#include "hash_reader.h"

namespace kvpager {

// A request's numbers, and what keeps its hashes where they are. Reading may run any Python; nothing may between the
// last reading and the use.
struct ReadRequest {
    RequestSnapshot numbers{};
    std::optional<HashReader> hashes{};
    nanobind::object id{};                          // under which it is live, or would be
    nanobind::object admission = nanobind::none();  // see RequestReader::admission
};

// Throws for a call that asks for nothing.
inline void check_something_to_do(const Demand& demand) {
    if (demand.num_new_tokens > 0 || demand.num_external_tokens > 0) return;
    raise(ErrorKind::invalid_request,
          "num_new_tokens is 0 and there are no external tokens: nothing to allocate; call it with at least one");
}

class RequestReader {
public:
    nanobind::object id(PyObject* request) {
        nanobind::object id = request_id_.get(request);
        if (!PyUnicode_Check(id.ptr()))
            raise(ErrorKind::invalid_request, "request_id must be a string, got %R", id.ptr());
        // An exact string: to look it up runs no Python.
        return PyUnicode_CheckExact(id.ptr()) ? id : nanobind::steal(PyUnicode_FromObject(id.ptr()));
    }

    int64_t num_computed_tokens(PyObject* request) { return num_computed_tokens_.read_int(request, -max_count); }

    // All that `free` needs.
    ReadRequest counts(PyObject* request) {
        ReadRequest read;
        read.numbers.num_computed_tokens = num_computed_tokens(request);
        nanobind::object in_flight = num_in_flight_tokens_.find(request);
        if (in_flight.is_valid()) {
            read.numbers.num_in_flight_tokens = int_argument(in_flight, "num_in_flight_tokens", 0);
        }
        read.numbers.num_prompt_tokens = num_prompt_tokens_.read_int(request, 0);
        return read;
    }

    // All that an allocation needs. `looks_at_status`: only where the watermark matters.
    ReadRequest all(PyObject* request, bool looks_at_status) {
        ReadRequest read = counts(request);
        read.numbers.num_tokens = read.numbers.max_num_tokens = num_tokens_.read_int(request, 0);
        if (looks_at_status) read.numbers.is_waiting = is_waiting(request);
        read.hashes.emplace(block_hashes_.get(request));
        read.numbers.hashes = read.hashes->source();
        return read;
    }

    // How long a request may become: as long as it is if it does not say.
    void read_max_tokens(PyObject* request, RequestSnapshot& numbers) {
        nanobind::object max_tokens = max_tokens_.find(request);
        if (!max_tokens.is_valid() || max_tokens.is_none()) return;
        int64_t most = numbers.num_prompt_tokens + int_argument(max_tokens, "max_tokens", 0);
        numbers.max_num_tokens = std::max(numbers.num_tokens, most);
    }

    // What statistics count of a new request: its tokens, and whether it was preempted; None if it may not hit.
    nanobind::object admission(PyObject* request, const RequestSnapshot& numbers) {
        int64_t preemptions = num_preemptions_.read_int(request, 0);
        if (is_true(skip_reading_prefix_cache_.get(request))) return nanobind::none();
        return nanobind::make_tuple(numbers.num_tokens, preemptions > 0);
    }

    bool reads_prefix_cache(PyObject* request) { return !is_true(skip_reading_prefix_cache_.get(request)); }

    // For a request that is read soon, then for what its slots name. None runs Python.
    void prefetch_slots(PyObject* request) const {
        prefetch(request);
        num_computed_tokens_.prefetch_slot(request);
    }
    void prefetch_computed(PyObject* request) const { num_computed_tokens_.prefetch_value(request); }
    void prefetch_values(PyObject* request) const {
        num_prompt_tokens_.prefetch_value(request);
        prefetch(block_hashes_.in_slot(request));
    }
    void prefetch_last_hash(PyObject* request) const {
        PyObject* hashes = block_hashes_.in_slot(request);
        if (hashes != nullptr && BlockHashes::of(hashes) != nullptr) BlockHashes::of(hashes)->prefetch_last();
    }

private:
    static bool is_true(const nanobind::object& value) {
        int truth = PyObject_IsTrue(value.ptr());
        if (truth < 0) throw nanobind::python_error();
        return truth != 0;
    }

    bool is_waiting(PyObject* request) {
        nanobind::object status = name_.get(status_.get(request).ptr());
        if (!PyUnicode_Check(status.ptr()))
            raise(ErrorKind::invalid_request, "status.name must be a string, got %R", status.ptr());
        return PyUnicode_CompareWithASCIIString(status.ptr(), "WAITING") == 0 ||
               PyUnicode_CompareWithASCIIString(status.ptr(), "PREEMPTED") == 0;
    }

    Attribute request_id_{"request_id"};
    Attribute num_computed_tokens_{"num_computed_tokens"};
    Attribute num_in_flight_tokens_{"num_in_flight_tokens"};
    Attribute num_prompt_tokens_{"num_prompt_tokens"};
    Attribute num_tokens_{"num_tokens"};
    Attribute block_hashes_{"block_hashes"};
    Attribute status_{"status"};
    Attribute name_{"name"};  // of the status
    Attribute max_tokens_{"max_tokens"};
    Attribute num_preemptions_{"num_preemptions"};
    Attribute skip_reading_prefix_cache_{"skip_reading_prefix_cache"};
};

}  // namespace kvpager
