// The package's Python exceptions, raised from C++.
#pragma once

#include <nanobind/nanobind.h>

#include "../errors.h"

namespace kvpager {

// Looks the classes up, and turns what the core refuses into them; called once, when the module is made.
void import_errors();

// The exception for what is refused. Borrowed for the life of the process: kvpager.errors is never unloaded.
PyObject* exception_of(ErrorKind kind);

// Sets a Python exception with a PyErr_Format message and throws it as nb::python_error.
[[noreturn]] void raise(PyObject* type, const char* format, ...);
template <typename... Arguments>
[[noreturn]] void raise(ErrorKind kind, const char* format, Arguments... arguments) {
    raise(exception_of(kind), format, arguments...);
}

}  // namespace kvpager
