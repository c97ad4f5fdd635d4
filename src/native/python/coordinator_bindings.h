#pragma once

#include <nanobind/nanobind.h>

namespace kvpager {

// AttentionKind, SingleTypeKVCacheManager, KVCacheCoordinator, DecodeSlots.
void bind_coordinator(nanobind::module_& module);

}  // namespace kvpager
