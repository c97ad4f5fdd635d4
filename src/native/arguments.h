// Python arguments as C++ values. Whatever can run Python code happens here, before a pool is touched.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "blocks.h"
#include "pool.h"

namespace kvpager {

// A tuple that nobody else can change; for a tuple it is the tuple itself.
inline nanobind::tuple as_tuple(nanobind::handle sequence) {
    nanobind::object tuple = nanobind::steal(PySequence_Tuple(sequence.ptr()));
    if (!tuple.is_valid()) throw nanobind::python_error();
    return nanobind::borrow<nanobind::tuple>(tuple);
}

template <typename Class>
Class& as(nanobind::handle value) {
    if (!nanobind::isinstance<Class>(value)) {
        PyErr_Format(PyExc_TypeError, "a %U was expected, got %R", nanobind::type<Class>().attr("__name__").ptr(), value.ptr());
        throw nanobind::python_error();
    }
    return *nanobind::inst_ptr<Class>(value);
}

inline int64_t as_int(nanobind::handle value) {
    int64_t number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred()) throw nanobind::python_error();
    return number;
}

// Block lists and what keeps them alive.
class Tables {
public:
    explicit Tables(nanobind::handle sequence) : held_(as_tuple(sequence)) {
        for (nanobind::handle table : held_) lists_.push_back(&as<BlockList>(table));
    }
    const std::vector<BlockList*>& lists() const { return lists_; }

private:
    nanobind::tuple held_;
    std::vector<BlockList*> lists_;
};

inline Range as_range(nanobind::handle value) {
    if (!PyRange_Check(value.ptr())) {
        PyErr_Format(PyExc_TypeError, "a range of positions was expected, got %R", value.ptr());
        throw nanobind::python_error();
    }
    return {as_int(value.attr("start")), as_int(value.attr("stop"))};
}

inline nanobind::object as_python_range(const Range& range) {
    return nanobind::handle(reinterpret_cast<PyObject*>(&PyRange_Type))(range.start, range.stop);
}

inline nanobind::list as_python_ranges(const std::vector<Range>& ranges) {
    nanobind::list list;
    for (const Range& range : ranges) list.append(as_python_range(range));
    return list;
}

inline std::vector<Range> as_ranges(nanobind::handle sequence) {
    std::vector<Range> ranges;
    for (nanobind::handle value : as_tuple(sequence)) ranges.push_back(as_range(value));
    return ranges;
}

template <typename Convert>
auto as_vector(nanobind::handle iterable, Convert convert) {
    std::vector<decltype(convert(nanobind::handle()))> values;
    for (nanobind::handle item : nanobind::iter(iterable)) values.push_back(convert(item));
    return values;
}

inline nanobind::list as_list(const BlockId* ids, size_t count) {
    nanobind::object list = nanobind::steal(PyList_New(static_cast<Py_ssize_t>(count)));
    if (!list.is_valid()) throw nanobind::python_error();
    for (size_t i = 0; i < count; ++i) {
        PyObject* id = PyLong_FromLong(ids[i]);
        if (id == nullptr) throw nanobind::python_error();
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), id);
    }
    return nanobind::borrow<nanobind::list>(list);
}

inline nanobind::list as_list(const std::vector<BlockId>& ids) { return as_list(ids.data(), ids.size()); }

}  // namespace kvpager
