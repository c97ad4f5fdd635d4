// A request's block hashes, read where Python keeps them.
#pragma once

#include <nanobind/nanobind.h>

#include "errors.h"
#include "hash_index.h"
#include "hashing.h"

namespace kvpager {

// The hashes of one group: its block at position i ends with hash block (i + 1) * stride - 1. They are
// BlockHashes, or any sequence of bytes. Nothing may run Python code while this is read, since they can change.
class Hashes {
public:
    Hashes(nanobind::handle source, int64_t stride) : stride_(stride) {
        if (stride < 1) raise(invalid_request_error, "stride must be at least 1, got %lld", static_cast<long long>(stride));
        held_ = in_place(source);
        if (const BlockHashes* hashes = BlockHashes::of(held_)) {
            compact_ = hashes->all().data();
            num_positions_ = static_cast<int64_t>(hashes->all().size()) / stride;
        } else {
            items_ = PySequence_Fast_ITEMS(held_.ptr());
            num_positions_ = PySequence_Fast_GET_SIZE(held_.ptr()) / stride;
        }
    }

    // The same hashes as something that is read without running Python.
    static nanobind::object in_place(nanobind::handle source) {
        if (BlockHashes::of(source) != nullptr) return nanobind::borrow(source);
        nanobind::object fast = nanobind::steal(PySequence_Fast(source.ptr(), "block hashes must be a sequence of bytes"));
        if (!fast.is_valid()) throw nanobind::python_error();
        return fast;
    }

    // How many positions have a hash.
    int64_t num_positions() const { return num_positions_; }

    Digest operator[](int64_t position) const {
        if (compact_ != nullptr) return compact_[index(position)].bytes;
        PyObject* hash = items_[index(position)];
        if (!PyBytes_Check(hash) || PyBytes_GET_SIZE(hash) != static_cast<Py_ssize_t>(digest_bytes)) refuse(position);
        return reinterpret_cast<Digest>(PyBytes_AS_STRING(hash));
    }

    // Throws unless each of positions [start, stop) has a hash of the right size.
    void check(int64_t start, int64_t stop) const {
        if (compact_ != nullptr) return;
        for (int64_t position = start; position < stop; ++position) (*this)[position];
    }

    void prefetch_hash(int64_t position) const {
        if (position >= num_positions_) return;
        if (compact_ != nullptr) {
            prefetch(&compact_[index(position)]);
        } else {
            auto* hash = reinterpret_cast<const char*>(items_[index(position)]);
            prefetch(hash);
            prefetch(hash + 64);
        }
    }

    // Throws unless positions [start, stop) have hashes.
    void require(int64_t start, int64_t stop) const {
        if (start < 0 || stop > num_positions_) {
            raise(invalid_request_error, "positions %lld to %lld were asked for, hashes are there for 0 to %lld",
                  static_cast<long long>(start), static_cast<long long>(stop), static_cast<long long>(num_positions_));
        }
    }

private:
    int64_t index(int64_t position) const { return (position + 1) * stride_ - 1; }
    [[noreturn]] void refuse(int64_t position) const {
        raise(invalid_request_error, "block hash %lld is %R; a hash is %zu bytes",
              static_cast<long long>(index(position)), items_[index(position)], digest_bytes);
    }

    nanobind::object held_;
    const Hash* compact_ = nullptr;  // either these
    PyObject** items_ = nullptr;     // or those
    int64_t stride_;
    int64_t num_positions_;
};

}  // namespace kvpager
