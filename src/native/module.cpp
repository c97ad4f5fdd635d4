// kvpager._native: what is touched per token or per block. Each part binds itself in its own file.
#include <nanobind/nanobind.h>

#include "errors.h"
#include "hashing.h"
#include "holdings_bindings.h"
#include "pool_bindings.h"

NB_MODULE(_native, module) {
    module.doc() = "The compiled part of kvpager: hash chains, blocks, and the steps of running requests. Not public; use the modules above it.";
    kvpager::import_errors();
    kvpager::bind_hashing(module);
    kvpager::bind_pool(module);
    kvpager::bind_holdings(module);
}
