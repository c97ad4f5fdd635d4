// What the core refuses. It knows no Python: the bindings turn each kind into the package's exception of that name.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <string>

namespace kvpager {

enum class ErrorKind {
    config,
    invalid_request,
    duplicate_request,
    unknown_request,
    unknown_block,
    block_state,
    out_of_blocks
};

class Error : public std::exception {
public:
    Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}
    ErrorKind kind() const { return kind_; }
    const char* what() const noexcept override { return message_.c_str(); }

private:
    ErrorKind kind_;
    std::string message_;
};

using Long = long long;  // what printf's %lld takes

// Throws an Error; the compiler checks the arguments against the format, which is printf's.
[[noreturn, gnu::format(printf, 2, 3)]] inline void fail(ErrorKind kind, const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    throw Error(kind, message);
}

}  // namespace kvpager
