#include "tokens.h"

#include "arguments.h"

namespace nb = nanobind;

namespace kvpager {

namespace {

constexpr uint32_t max_token = 0xffffffff;

[[noreturn]] void refuse_value(size_t index, PyObject* value) {
    raise(ErrorKind::invalid_request, "token_ids[%zu] is %R; token ids go from 0 to %zu", index, value,
          size_t{max_token});
}

[[noreturn]] void refuse_type(size_t index, PyObject* item) {
    PyErr_Clear();
    raise(ErrorKind::invalid_request, "token_ids[%zu] is %R, a %.100s; token ids are integers", index, item,
          Py_TYPE(item)->tp_name);
}

[[noreturn]] void refuse_source(PyObject* source) {
    PyErr_Clear();
    raise(ErrorKind::invalid_request,
          "token_ids must be a list of ints, an array or a buffer of integers, got %.100s; convert it first (a tensor: "
          ".cpu().numpy())",
          Py_TYPE(source)->tp_name);
}

// An exact int for an item; a new reference. Numpy's integers and the like convert, booleans don't.
nb::object as_token(size_t index, PyObject* item) {
    if (PyBool_Check(item) || !PyIndex_Check(item)) refuse_type(index, item);
    nb::object integer = nb::steal(PyNumber_Index(item));
    if (!integer.is_valid()) refuse_type(index, item);
    int overflow = 0;
    Long value = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
    if (overflow != 0 || value < 0 || value > max_token) refuse_value(index, integer.ptr());
    return integer;
}

// A list or tuple for whatever has a length and items, itself if it is one. Null: it isn't a sequence.
nb::object as_fast_sequence(PyObject* source) {
    if (PyList_Check(source) || PyTuple_Check(source)) return nb::borrow(source);
    if (PyObject_CheckBuffer(source) || PyUnicode_Check(source) || !PySequence_Check(source)) return {};
    nb::object list = nb::steal(PySequence_List(source));
    if (!list.is_valid()) refuse_source(source);
    return list;
}

// NumPy reads whatever format a buffer has: 32-bit ids, one behind the other.
nb::object as_ids(PyObject* source) {
    nb::module_ numpy = nb::module_::import_("numpy");
    nb::object view = nb::steal(PyMemoryView_FromObject(source));
    if (!view.is_valid()) refuse_source(source);
    nb::object array = numpy.attr("asarray")(view), kind = array.attr("dtype").attr("kind");
    if (nb::cast<int>(array.attr("ndim")) != 1 || !(kind.equal(nb::str("i")) || kind.equal(nb::str("u")))) {
        raise(ErrorKind::invalid_request,
              "a buffer of token ids must be one-dimensional and hold integers, got %S dimensions of format '%.20S'",
              nb::object(array.attr("ndim")).ptr(), nb::object(view.attr("format")).ptr());
    }
    nb::object too_small = numpy.attr("less")(array, 0), too_big = numpy.attr("greater")(array, max_token);
    nb::object bad = numpy.attr("flatnonzero")(numpy.attr("logical_or")(too_small, too_big));
    if (nb::len(bad) > 0) {
        nb::object index = nb::int_(nb::object(bad[0])), value = nb::int_(nb::object(array[index]));
        refuse_value(nb::cast<size_t>(index), value.ptr());
    }
    return numpy.attr("ascontiguousarray")(array, numpy.attr("uint32"));
}

}  // namespace

Tokens::Tokens(nb::handle source, size_t first) {
    if (nb::object sequence = as_fast_sequence(source.ptr()); sequence.is_valid()) {
        take_sequence(sequence.ptr(), first);
    } else {
        take_buffer(source.ptr(), first);
    }
}

void Tokens::take_sequence(PyObject* sequence, size_t first) {
    size_t size = first;
    // The size is read anew after whatever is no plain int: an item's __index__ may change the list.
    while (size < static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence))) {
        PyObject** items = PySequence_Fast_ITEMS(sequence);
        converted_.resize(static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence)) - first);
        while (size - first < converted_.size() && small_int(items[size], converted_[size - first])) ++size;
        if (size - first == converted_.size()) break;
        nb::object token = as_token(size, nb::borrow(items[size]).ptr());
        converted_[size++ - first] = static_cast<uint32_t>(PyLong_AsUnsignedLong(token.ptr()));
    }
    ids_ = std::span(converted_).first(size - first);
}

void Tokens::take_buffer(PyObject* source, size_t first) {
    auto is_in_place = [](const Py_buffer& view) {
        const char* format = view.format == nullptr ? "B" : view.format;
        return view.ndim == 1 && view.itemsize == 4 && (*format == 'I' || *format == 'L') && format[1] == 0 &&
               PyBuffer_IsContiguous(&view, 'C');
    };
    if (PyObject_GetBuffer(source, &view_, PyBUF_RECORDS_RO) != 0) refuse_source(source);
    if (!is_in_place(view_)) {
        PyBuffer_Release(&view_);
        if (PyObject_GetBuffer(as_ids(source).ptr(), &view_, PyBUF_RECORDS_RO) != 0) throw nb::python_error();
    }
    std::span ids(static_cast<const uint32_t*>(view_.buf), static_cast<size_t>(view_.shape[0]));
    ids_ = ids.subspan(std::min(first, ids.size()));
}

nb::list token_list(nb::handle source) {
    nb::object sequence = as_fast_sequence(source.ptr());
    if (!sequence.is_valid()) return as_list(Tokens(source).ids());
    // A copy first: an item's __index__ may change the caller's list, but not this one.
    nb::list result = nb::steal<nb::list>(PySequence_List(sequence.ptr()));
    if (!result.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0, size = PyList_GET_SIZE(result.ptr()); i < size; ++i) {
        PyObject* item = PyList_GET_ITEM(result.ptr(), i);
        uint32_t token;
        if (small_int(item, token)) continue;
        if (PyList_SetItem(result.ptr(), i, as_token(i, item).release().ptr()) != 0) throw nb::python_error();
    }
    return result;
}

}  // namespace kvpager
