#include "tokens.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "arguments.h"

namespace nb = nanobind;

namespace kvpager {

namespace {

constexpr long long max_token = 0xffffffffLL;

[[noreturn]] void refuse_value(size_t index, PyObject* value) {
    raise(invalid_request_error, "token_ids[%zu] is %R; token ids go from 0 to %lld", index, value, max_token);
}

[[noreturn]] void refuse_type(size_t index, PyObject* item) {
    PyErr_Clear();
    raise(invalid_request_error, "token_ids[%zu] is %R, a %.100s; token ids are integers", index, item,
          Py_TYPE(item)->tp_name);
}

[[noreturn]] void refuse_source(PyObject* source) {
    PyErr_Clear();
    raise(invalid_request_error,
          "token_ids must be a list of ints, an array or a buffer of integers, got %.100s; convert it first (a tensor: "
          ".cpu().numpy())",
          Py_TYPE(source)->tp_name);
}

uint32_t checked(size_t index, PyObject* integer) {
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow != 0 || value < 0 || value > max_token) refuse_value(index, integer);
    return static_cast<uint32_t>(value);
}

// An exact int for an item; a new reference. Numpy's integers and the like convert, booleans don't.
nb::object as_int(size_t index, PyObject* item) {
    if (PyLong_CheckExact(item)) return nb::borrow(item);
    if (PyBool_Check(item) || !PyIndex_Check(item)) refuse_type(index, item);
    nb::object integer = nb::steal(PyNumber_Index(item));
    if (!integer.is_valid()) refuse_type(index, item);
    return integer;
}

uint32_t as_token(size_t index, PyObject* item) {
    if (PyLong_CheckExact(item)) return checked(index, item);
    return checked(index, as_int(index, item).ptr());
}

// A list or tuple for whatever has a length and items, itself if it is one. Null: it isn't a sequence.
nb::object as_fast_sequence(PyObject* source) {
    if (PyList_Check(source) || PyTuple_Check(source)) return nb::borrow(source);
    if (PyObject_CheckBuffer(source) || PyUnicode_Check(source) || !PySequence_Check(source)) return {};
    nb::object list = nb::steal(PySequence_List(source));
    if (!list.is_valid()) refuse_source(source);
    return list;
}

template <typename Item>
Item swap_bytes(Item item) {
    auto* bytes = reinterpret_cast<unsigned char*>(&item);
    std::reverse(bytes, bytes + sizeof item);
    return item;
}

}  // namespace

Tokens::Tokens(nb::handle source, size_t first) {
    if (nb::object sequence = as_fast_sequence(source.ptr()); sequence.is_valid()) {
        take_sequence(sequence.ptr(), first);
        return;
    }
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_RECORDS_RO) != 0) refuse_source(source.ptr());
    try {
        take_buffer();
    } catch (...) {
        PyBuffer_Release(&view_);
        throw;
    }
}

Tokens::~Tokens() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
}

void Tokens::take_sequence(PyObject* sequence, size_t first) {
    first_ = size_ = first;
    // The size is read anew after whatever is no plain int: an item's __index__ may change the list.
    while (size_ < static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence))) {
        PyObject** items = PySequence_Fast_ITEMS(sequence);
        converted_.resize(static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence)) - first);
        while (size_ - first < converted_.size() && small_int(items[size_], converted_[size_ - first])) ++size_;
        if (size_ - first == converted_.size()) break;
        uint32_t token = as_token(size_, nb::borrow(items[size_]).ptr());
        converted_[size_++ - first] = token;
    }
    data_ = reinterpret_cast<const char*>(converted_.data());
    stride_ = sizeof(uint32_t);
    load_ = load_items<uint32_t, false>;
}

void Tokens::take_buffer() {
    load_ = loader_for(view_);
    if (view_.ndim != 1 || load_ == nullptr) {
        raise(invalid_request_error,
              "a buffer of token ids must be one-dimensional and hold integers, got %d dimensions of format '%.20s'",
              view_.ndim, view_.format == nullptr ? "B" : view_.format);
    }
    size_ = view_.shape[0];
    data_ = static_cast<const char*>(view_.buf);
    stride_ = view_.strides[0];
}

Tokens::Load Tokens::loader_for(const Py_buffer& view) {
    std::string_view format = view.format == nullptr ? "B" : view.format;
    bool big = false;
    if (!format.empty() && std::string_view("@=<>!").find(format[0]) != std::string_view::npos) {
        bool native = format[0] == '@' || format[0] == '=';
        big = native ? std::endian::native == std::endian::big : format[0] != '<';
        format.remove_prefix(1);
    } else {
        big = std::endian::native == std::endian::big;
    }
    bool is_signed = format.size() == 1 && std::string_view("bhilqn").find(format[0]) != std::string_view::npos;
    bool is_unsigned = format.size() == 1 && std::string_view("BHILQN").find(format[0]) != std::string_view::npos;
    if (!is_signed && !is_unsigned) return nullptr;
    bool swapped = big != (std::endian::native == std::endian::big);
    switch (view.itemsize) {
        case 1: return is_signed ? pick<int8_t>(swapped) : pick<uint8_t>(swapped);
        case 2: return is_signed ? pick<int16_t>(swapped) : pick<uint16_t>(swapped);
        case 4: return is_signed ? pick<int32_t>(swapped) : pick<uint32_t>(swapped);
        case 8: return is_signed ? pick<int64_t>(swapped) : pick<uint64_t>(swapped);
        default: return nullptr;
    }
}

template <typename Item>
Tokens::Load Tokens::pick(bool swapped) {
    return swapped ? load_items<Item, true> : load_items<Item, false>;
}

template <typename Item, bool swapped>
size_t Tokens::load_items(const Tokens& tokens, size_t first, size_t count, uint32_t* out) {
    const char* from = tokens.at(first);
    if constexpr (std::is_same_v<Item, uint32_t> && !swapped) {
        if (tokens.stride_ == sizeof(Item)) {
            std::memcpy(out, from, count * sizeof(Item));
            return npos;
        }
    }
    // One pass without a branch for each item; who is to blame is looked up only if somebody is.
    uint64_t outside = 0;
    for (size_t i = 0; i < count; ++i) {
        Item item;
        std::memcpy(&item, from + static_cast<ptrdiff_t>(i) * tokens.stride_, sizeof item);
        if constexpr (swapped) item = swap_bytes(item);
        out[i] = static_cast<uint32_t>(item);
        outside |= static_cast<uint64_t>(static_cast<int64_t>(item)) >> 32;
    }
    if (outside == 0) return npos;
    for (size_t i = 0;; ++i) {
        Item item;
        std::memcpy(&item, from + static_cast<ptrdiff_t>(i) * tokens.stride_, sizeof item);
        if constexpr (swapped) item = swap_bytes(item);
        if (static_cast<uint64_t>(static_cast<int64_t>(item)) >> 32 != 0) return first + i;
    }
}

size_t Tokens::find_bad(size_t first) const {
    uint32_t scratch[256];
    while (first < size_) {
        size_t count = std::min<size_t>(size_ - first, std::size(scratch));
        if (size_t bad = load(first, count, scratch); bad != npos) return bad;
        first += count;
    }
    return npos;
}

void Tokens::refuse(size_t index) const {
    // Python reads the item, whatever its format is: this path needs no speed.
    nb::object view = nb::steal(PyMemoryView_FromObject(view_.obj));
    if (!view.is_valid()) throw nb::python_error();
    nb::object array = nb::module_::import_("numpy").attr("asarray")(view);
    nb::object value = nb::steal(PyNumber_Index(nb::object(array[index]).ptr()));
    if (!value.is_valid()) throw nb::python_error();
    refuse_value(index, value.ptr());
}

namespace {

nb::list list_of_size(size_t size) {
    nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(size)));
    if (!list.is_valid()) throw nb::python_error();
    return list;
}

nb::list list_from_sequence(PyObject* sequence) {
    // A copy first: an item's __index__ may change the caller's list, but not this one.
    nb::list result = nb::steal<nb::list>(PySequence_List(sequence));
    if (!result.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0, size = PyList_GET_SIZE(result.ptr()); i < size; ++i) {
        PyObject* item = PyList_GET_ITEM(result.ptr(), i);
        uint32_t token;
        if (small_int(item, token)) continue;
        nb::object integer = as_int(i, item);
        checked(i, integer.ptr());
        if (PyList_SetItem(result.ptr(), i, integer.release().ptr()) != 0) throw nb::python_error();
    }
    return result;
}

}  // namespace

nb::list token_list(nb::handle source) {
    if (nb::object sequence = as_fast_sequence(source.ptr()); sequence.is_valid()) {
        return list_from_sequence(sequence.ptr());
    }
    Tokens tokens(source);
    if (size_t bad = tokens.find_bad(0); bad != Tokens::npos) tokens.refuse(bad);
    nb::list result = list_of_size(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
        uint32_t token = 0;
        tokens.load(i, 1, &token);
        PyObject* integer = PyLong_FromUnsignedLong(token);
        if (integer == nullptr) throw nb::python_error();
        PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), integer);
    }
    return result;
}

}  // namespace kvpager
