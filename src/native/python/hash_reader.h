// A request's block hashes, read where Python keeps them.
#pragma once

#include <nanobind/nanobind.h>

#include "hashing_bindings.h"
#include "raise.h"

namespace kvpager {

// They are BlockHashes, or any sequence of bytes. Nothing may run Python code while this is read, since they can
// change.
class HashReader {
public:
    explicit HashReader(nanobind::handle source) : held_(in_place(source)) {
        if (const BlockHashes* hashes = BlockHashes::of(held_)) {
            source_.compact = hashes->chain().all();
            return;
        }
        auto* items = reinterpret_cast<const void* const*>(PySequence_Fast_ITEMS(held_.ptr()));
        source_.objects = {items, static_cast<size_t>(PySequence_Fast_GET_SIZE(held_.ptr()))};
        source_.read = digest_of;
    }

    const HashSource& source() const { return source_; }

    // The same hashes as something that is read without running Python.
    static nanobind::object in_place(nanobind::handle source) {
        if (BlockHashes::of(source) != nullptr) return nanobind::borrow(source);
        nanobind::object fast =
            nanobind::steal(PySequence_Fast(source.ptr(), "block hashes must be a sequence of bytes"));
        if (!fast.is_valid()) throw nanobind::python_error();
        return fast;
    }

private:
    static Digest digest_of(const void* item) {
        PyObject* hash = const_cast<PyObject*>(static_cast<const PyObject*>(item));
        bool is_hash = PyBytes_Check(hash) && PyBytes_GET_SIZE(hash) == static_cast<Py_ssize_t>(digest_bytes);
        return is_hash ? reinterpret_cast<Digest>(PyBytes_AS_STRING(hash)) : nullptr;
    }

    nanobind::object held_;
    HashSource source_;
};

}  // namespace kvpager
