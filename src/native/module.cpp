// kvpager._native: what is touched per token or per block. Each part binds itself in its own file.
#include <nanobind/nanobind.h>

#include "errors.h"
#include "hashing.h"

NB_MODULE(_native, module) {
    module.doc() = "The compiled part of kvpager: hash chains. Not public; use the modules above it.";
    kvpager::import_errors();
    kvpager::bind_hashing(module);
}
