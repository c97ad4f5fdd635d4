#include "errors.h"

#include <cstdarg>

namespace nb = nanobind;

namespace kvpager {

PyObject* config_error = nullptr;
PyObject* invalid_request_error = nullptr;
PyObject* unknown_block_error = nullptr;
PyObject* block_state_error = nullptr;
PyObject* out_of_blocks_error = nullptr;

void import_errors() {
    nb::module_ errors = nb::module_::import_("kvpager.errors");
    auto look_up = [&](const char* name) { return nb::object(errors.attr(name)).release().ptr(); };
    config_error = look_up("ConfigError");
    invalid_request_error = look_up("InvalidRequestError");
    unknown_block_error = look_up("UnknownBlockError");
    block_state_error = look_up("BlockStateError");
    out_of_blocks_error = look_up("OutOfBlocksError");
}

void raise(PyObject* type, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    throw nb::python_error();
}

}  // namespace kvpager
