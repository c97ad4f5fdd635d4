// Attributes of Python objects, again and again of the same classes.
#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>

#include "../memory.h"
#include "arguments.h"

namespace kvpager {

// One attribute. Where its object's class has a slot for it (`__slots__`), the value is read from there without a call,
// as long as the class stays what it was when it was first seen: CPython gives a changed class another version tag.
class Attribute {
public:
    explicit Attribute(const char* name) : name_(nanobind::steal(PyUnicode_InternFromString(name))) {}

    // Runs no Python. Null: not known to be a slot, or not set.
    PyObject* in_slot(PyObject* object) const {
        bool lies_there = is_known(Py_TYPE(object)) && offset_ > 0;
        return lies_there ? *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_) : nullptr;
    }

    // Null if there is none.
    nanobind::object find(PyObject* object) {
        if (PyObject* value = in_slot(object)) return nanobind::borrow(value);
        PyObject* value = nullptr;
#if PY_VERSION_HEX >= 0x030d0000
        int found = PyObject_GetOptionalAttr(object, name_.ptr(), &value);
#else
        int found = _PyObject_LookupAttr(object, name_.ptr(), &value);
#endif
        if (found < 0) throw nanobind::python_error();
        if (found > 0) learn(object);
        return nanobind::steal(value);
    }

    nanobind::object get(PyObject* object) {
        nanobind::object value = find(object);
        if (!value.is_valid()) {
            PyErr_Format(PyExc_AttributeError, "'%.100s' object has no attribute %R", Py_TYPE(object)->tp_name,
                         name_.ptr());
            throw nanobind::python_error();
        }
        return value;
    }

    // Its value, an integer of at least `at_least`. Throws InvalidRequestError for anything else.
    int64_t read_int(PyObject* object, int64_t at_least) {
        uint32_t small;
        if (PyObject* value = in_slot(object); value != nullptr && small_int(value, small)) return small;
        return int_argument(get(object), PyUnicode_AsUTF8(name_.ptr()), at_least);
    }

    // For one that is read soon, then for its value.
    void prefetch_slot(PyObject* object) const { prefetch(reinterpret_cast<char*>(object) + offset_); }
    void prefetch_value(PyObject* object) const { prefetch(in_slot(object)); }

private:
    bool is_known(const PyTypeObject* type) const { return type == type_ && type->tp_version_tag == version_; }

    void learn(PyObject* object) {
        PyTypeObject* type = Py_TYPE(object);
        if (is_known(type) || type->tp_version_tag == 0) return;
        Py_ssize_t offset = type->tp_getattro == PyObject_GenericGetAttr ? offset_in(type) : 0;
        type_ = type;
        version_ = type->tp_version_tag;
        offset_ = offset;
    }

    // 0: the class has no slot of this name.
    Py_ssize_t offset_in(PyTypeObject* type) const {
        nanobind::object found = nanobind::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_.ptr()));
        if (!found.is_valid()) PyErr_Clear();
        if (!found.is_valid() || Py_TYPE(found.ptr()) != &PyMemberDescr_Type) return 0;
        auto* member = reinterpret_cast<PyMemberDescrObject*>(found.ptr());
        bool is_slot = member->d_member->type == T_OBJECT_EX && PyType_IsSubtype(type, PyDescr_TYPE(member));
        return is_slot ? member->d_member->offset : 0;
    }

    nanobind::object name_;
    PyTypeObject* type_ = nullptr;  // the last class seen; only compared with
    unsigned version_ = 0;
    Py_ssize_t offset_ = 0;
};

}  // namespace kvpager
