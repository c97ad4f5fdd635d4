// GroupRule, Holding, Holdings, Stepper and DecodeSlots for Python (_native.pyi says what they do).
#pragma once

#include <nanobind/nanobind.h>

namespace kvpager {

void bind_holdings(nanobind::module_& module);

}  // namespace kvpager
