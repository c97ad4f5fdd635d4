#include "raise.h"

#include <cstdarg>

namespace nb = nanobind;

namespace kvpager {

PyObject* config_error = nullptr;
PyObject* invalid_request_error = nullptr;
PyObject* duplicate_request_error = nullptr;
PyObject* unknown_request_error = nullptr;
PyObject* unknown_block_error = nullptr;
PyObject* block_state_error = nullptr;
static PyObject* out_of_blocks_error = nullptr;
static PyObject* invariant_error = nullptr;

void import_errors() {
    nb::module_ errors = nb::module_::import_("kvpager.errors");
    auto look_up = [&](const char* name) { return nb::object(errors.attr(name)).release().ptr(); };
    config_error = look_up("ConfigError");
    invalid_request_error = look_up("InvalidRequestError");
    duplicate_request_error = look_up("DuplicateRequestError");
    unknown_request_error = look_up("UnknownRequestError");
    unknown_block_error = look_up("UnknownBlockError");
    block_state_error = look_up("BlockStateError");
    out_of_blocks_error = look_up("OutOfBlocksError");
    invariant_error = look_up("InvariantError");
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const Error& error) {
            PyErr_SetString(exception_of(error.kind()), error.what());
        }
    });
}

PyObject* exception_of(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::config: return config_error;
        case ErrorKind::invalid_request: return invalid_request_error;
        case ErrorKind::unknown_block: return unknown_block_error;
        case ErrorKind::block_state: return block_state_error;
        case ErrorKind::out_of_blocks: return out_of_blocks_error;
        case ErrorKind::invariant: break;
    }
    return invariant_error;
}

void raise(PyObject* type, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    throw nb::python_error();
}

}  // namespace kvpager
