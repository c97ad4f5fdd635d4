// BlockList and BlockPool for Python (_native.pyi says what they do).
#pragma once

#include <nanobind/nanobind.h>

namespace kvpager {

void bind_pool(nanobind::module_& module);

}  // namespace kvpager
