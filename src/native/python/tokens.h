// Token ids out of whatever Python has: a list or tuple of ints, or a buffer of integers.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <vector>

namespace kvpager {

// One sequence's token ids from `first` on. A buffer of 32-bit ids is read in place, anything else is converted once.
// Made and destroyed with the GIL; to read needs none. Throws InvalidRequestError for what holds no token ids.
class Tokens {
public:
    explicit Tokens(nanobind::handle source, size_t first = 0);
    ~Tokens() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }
    Tokens(const Tokens&) = delete;

    std::span<const uint32_t> ids() const { return ids_; }

private:
    void take_sequence(PyObject* sequence, size_t first);
    void take_buffer(PyObject* source, size_t first);

    std::span<const uint32_t> ids_;
    Py_buffer view_{};  // obj is null unless a buffer is held
    std::vector<uint32_t> converted_;
};

// A new list of exact ints: checked token ids. Throws InvalidRequestError.
nanobind::list token_list(nanobind::handle source);

}  // namespace kvpager
