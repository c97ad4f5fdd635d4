// Token ids out of whatever Python has: a list or tuple of ints, or a buffer of integers.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "../hashing/chain.h"

namespace kvpager {

// One prompt's token ids. A buffer is read in place, a list is converted once.
// Made and destroyed with the GIL; everything else needs none.
class Tokens final : public TokenSource {
public:
    // Those before `first` are not looked at. Throws InvalidRequestError for what holds no token ids.
    explicit Tokens(nanobind::handle source, size_t first = 0);
    ~Tokens();
    Tokens(const Tokens&) = delete;
    Tokens& operator=(const Tokens&) = delete;

    size_t size() const override { return size_; }

    size_t load(size_t first, size_t count, uint32_t* out) const override { return load_(*this, first, count, out); }
    size_t find_bad(size_t first) const override;

    // Throws the InvalidRequestError that names the token at `index`. Needs the GIL.
    [[noreturn]] void refuse(size_t index) const;

private:
    const char* at(size_t index) const { return data_ + static_cast<ptrdiff_t>(index - first_) * stride_; }

    using Load = size_t (*)(const Tokens&, size_t, size_t, uint32_t*);
    template <typename Item, bool swapped>
    static size_t load_items(const Tokens& tokens, size_t first, size_t count, uint32_t* out);
    template <typename Item>
    static Load pick(bool swapped);

    void take_sequence(PyObject* sequence, size_t first);
    void take_buffer();
    static Load loader_for(const Py_buffer& view);

    size_t size_ = 0;
    size_t first_ = 0;  // the token that `data_` starts with
    const char* data_ = nullptr;
    ptrdiff_t stride_ = 0;
    Load load_ = nullptr;
    Py_buffer view_{};                // obj is null unless a buffer is held
    std::vector<uint32_t> converted_;
};

// A new list of exact ints: checked token ids. Throws InvalidRequestError.
nanobind::list token_list(nanobind::handle source);

}  // namespace kvpager
