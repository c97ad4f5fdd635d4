#include "raise.h"

namespace nb = nanobind;

namespace kvpager {

// By ErrorKind.
static constexpr const char* names[] = {"ConfigError",         "InvalidRequestError", "DuplicateRequestError",
                                        "UnknownRequestError", "UnknownBlockError",   "BlockStateError",
                                        "OutOfBlocksError"};
static PyObject* exceptions[std::size(names)];

PyObject* exception_of(ErrorKind kind) { return exceptions[static_cast<size_t>(kind)]; }

void import_errors() {
    nb::module_ errors = nb::module_::import_("kvpager.errors");
    for (size_t i = 0; i < std::size(names); ++i) exceptions[i] = nb::object(errors.attr(names[i])).release().ptr();
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const Error& error) {
            PyErr_SetString(exception_of(error.kind()), error.what());
        }
    });
}

void raise(PyObject* type, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(type, format, arguments);
    va_end(arguments);
    throw nb::python_error();
}

}  // namespace kvpager
