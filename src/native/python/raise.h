// The package's Python exceptions, raised from C++.
#pragma once

#include <nanobind/nanobind.h>

#include "../errors.h"

namespace kvpager {

// Borrowed for the life of the process: kvpager.errors is never unloaded.
extern PyObject* config_error;
extern PyObject* invalid_request_error;
extern PyObject* duplicate_request_error;
extern PyObject* unknown_request_error;
extern PyObject* unknown_block_error;
extern PyObject* block_state_error;

// Looks the classes up, and turns what the core refuses into them; called once, when the module is made.
void import_errors();

// The exception for what the core refuses.
PyObject* exception_of(ErrorKind kind);

// Sets a Python exception with a PyErr_Format message and throws it as nb::python_error.
[[noreturn]] void raise(PyObject* type, const char* format, ...);

}  // namespace kvpager
