// The package's Python exceptions, raised from C++.
#pragma once

#include <nanobind/nanobind.h>

namespace kvpager {

// Borrowed for the life of the process: kvpager.errors is never unloaded.
extern PyObject* config_error;
extern PyObject* invalid_request_error;
extern PyObject* unknown_block_error;
extern PyObject* block_state_error;
extern PyObject* out_of_blocks_error;

// Looks the classes up; called once, when the module is made.
void import_errors();

// Sets a Python exception with a PyErr_Format message and throws it as nb::python_error.
[[noreturn]] void raise(PyObject* type, const char* format, ...);

}  // namespace kvpager
