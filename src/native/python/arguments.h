// Python arguments as C++ values. Whatever can run Python code happens here, before anything is touched.
#pragma once

#include <nanobind/nanobind.h>

#if PY_VERSION_HEX < 0x030b0000
#include <longintrepr.h>
#endif

#include <vector>

#include "../groups/kind.h"
#include "raise.h"

namespace kvpager {

// Block ids by position, as Python holds them: a table that somebody keeps himself, or the blocks of a hit.
struct BlockList {
    BlockIds ids{};
};

// The value of an exact int of at least 0 that has one digit, as nearly all have, without a call.
inline bool small_int(const PyObject* object, uint32_t& value) {
    if (!PyLong_CheckExact(object)) return false;
    auto* integer = reinterpret_cast<const PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030c0000
    if (!PyUnstable_Long_IsCompact(integer)) return false;
    Py_ssize_t compact = PyUnstable_Long_CompactValue(integer);
    value = static_cast<uint32_t>(compact);
    return compact >= 0;
#else
    value = Py_SIZE(integer) == 0 ? 0 : integer->ob_digit[0];
    return Py_SIZE(integer) >= 0 && Py_SIZE(integer) <= 1;
#endif
}

// An integer of [at_least, 2^40] (whatever Python takes for an index, but for booleans), or the error that names it.
inline int64_t int_argument(nanobind::handle value, const char* name, int64_t at_least,
                            ErrorKind error = ErrorKind::invalid_request) {
    if (uint32_t small; small_int(value.ptr(), small) && small >= at_least) return small;
    if (PyIndex_Check(value.ptr()) && !PyBool_Check(value.ptr())) {
        nanobind::object integer = nanobind::steal(PyNumber_Index(value.ptr()));
        if (!integer.is_valid()) throw nanobind::python_error();
        int overflow = 0;
        long long number = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
        if (overflow == 0 && number >= at_least && number <= max_count) return number;
    }
    raise(error, "%s must be an integer of at least %lld and at most 2^40, got %R", name, Long{at_least}, value.ptr());
}

// A tuple that nobody else can change; for a tuple it is the tuple itself.
inline nanobind::tuple as_tuple(nanobind::handle sequence) {
    nanobind::object tuple = nanobind::steal(PySequence_Tuple(sequence.ptr()));
    if (!tuple.is_valid()) throw nanobind::python_error();
    return nanobind::borrow<nanobind::tuple>(tuple);
}

template <typename Class>
Class& as(nanobind::handle value) {
    if (!nanobind::isinstance<Class>(value)) {
        PyErr_Format(PyExc_TypeError, "a %U was expected, got %R", nanobind::type<Class>().attr("__name__").ptr(),
                     value.ptr());
        throw nanobind::python_error();
    }
    return *nanobind::inst_ptr<Class>(value);
}

inline nanobind::object as_python_range(const Range& range) {
    return nanobind::handle(reinterpret_cast<PyObject*>(&PyRange_Type))(range.start, range.stop);
}

template <typename Convert>
auto as_vector(nanobind::handle iterable, Convert convert) {
    std::vector<std::decay_t<decltype(convert(nanobind::handle()))>> values;
    for (nanobind::handle item : nanobind::iter(iterable)) values.push_back(convert(item));
    return values;
}

template <typename Items, typename Convert>
nanobind::list list_of(const Items& items, Convert convert) {
    nanobind::object list = nanobind::steal(PyList_New(std::ssize(items)));
    if (!list.is_valid()) throw nanobind::python_error();
    Py_ssize_t position = 0;
    for (const auto& item : items)
        PyList_SET_ITEM(list.ptr(), position++, nanobind::object(convert(item)).release().ptr());
    return nanobind::borrow<nanobind::list>(list);
}

template <typename Integers>
nanobind::list as_list(const Integers& integers) {
    return list_of(integers, [](int64_t integer) { return nanobind::int_(integer); });
}

inline nanobind::list as_lists(const std::vector<BlockIds>& blocks) {
    return list_of(blocks, [](const BlockIds& ids) { return nanobind::cast(BlockList{ids}); });
}

}  // namespace kvpager
