// A request's block hashes, read where Python keeps them.
#pragma once

#include <nanobind/nanobind.h>

#include "errors.h"
#include "hash_index.h"

namespace kvpager {

// The hashes of one group: its block at position i ends with hash block (i + 1) * stride - 1.
// Nothing may run Python code while this is read, since a list can change.
class Hashes {
public:
    Hashes(nanobind::handle source, int64_t stride) : stride_(stride) {
        if (stride < 1) raise(invalid_request_error, "stride must be at least 1, got %lld", static_cast<long long>(stride));
        held_ = nanobind::steal(PySequence_Fast(source.ptr(), "block hashes must be a sequence of bytes"));
        if (!held_.is_valid()) throw nanobind::python_error();
        items_ = PySequence_Fast_ITEMS(held_.ptr());
        num_positions_ = PySequence_Fast_GET_SIZE(held_.ptr()) / stride;
    }

    // How many positions have a hash.
    int64_t num_positions() const { return num_positions_; }

    Digest operator[](int64_t position) const {
        PyObject* hash = item(position);
        if (!PyBytes_Check(hash) || PyBytes_GET_SIZE(hash) != static_cast<Py_ssize_t>(digest_bytes)) refuse(position);
        return reinterpret_cast<Digest>(PyBytes_AS_STRING(hash));
    }

    void prefetch_hash(int64_t position) const {
        if (position < num_positions_) {
            auto* hash = reinterpret_cast<const char*>(item(position));
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
    PyObject* item(int64_t position) const { return items_[(position + 1) * stride_ - 1]; }
    [[noreturn]] void refuse(int64_t position) const {
        raise(invalid_request_error, "block hash %lld is %R; a hash is %zu bytes",
              static_cast<long long>((position + 1) * stride_ - 1), item(position), digest_bytes);
    }

    nanobind::object held_;
    PyObject** items_;
    int64_t stride_;
    int64_t num_positions_;
};

}  // namespace kvpager
