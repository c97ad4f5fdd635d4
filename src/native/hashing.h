// Chains of block hashes (docs/hashing.md).
#pragma once

#include <nanobind/nanobind.h>

namespace kvpager {

void bind_hashing(nanobind::module_& module);

}  // namespace kvpager
