#include "errors.h"

#include <cstdarg>

namespace nb = nanobind;

namespace kvpager {

PyObject* invalid_request_error = nullptr;

void import_errors() {
    nb::module_ errors = nb::module_::import_("kvpager.errors");
    invalid_request_error = nb::object(errors.attr("InvalidRequestError")).release().ptr();
}

void raise(PyObject* type, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    throw nb::python_error();
}

}  // namespace kvpager
