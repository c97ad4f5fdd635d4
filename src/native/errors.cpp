#include "errors.h"

#include <cstdarg>
#include <cstdio>

namespace kvpager {

void fail(ErrorKind kind, const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    throw Error(kind, message);
}

}  // namespace kvpager
