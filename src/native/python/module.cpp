// kvpager._native: what is touched per token or per block. Each part binds itself in its own file.
#include "coordinator_bindings.h"
#include "hashing_bindings.h"
#include "pool_bindings.h"
#include "raise.h"

NB_MODULE(_native, module) {
    module.doc() =
        "The compiled part of kvpager: hash chains, blocks, and what happens to a request's blocks. Not public; use "
        "the "
        "modules above it.";
#ifdef NDEBUG
    // Whoever still holds an object when the interpreter ends (a global, a daemon thread) has done nothing wrong.
    nanobind::set_leak_warnings(false);
#endif
    kvpager::import_errors();
    kvpager::bind_hashing(module);
    kvpager::bind_pool(module);
    kvpager::bind_coordinator(module);
}
