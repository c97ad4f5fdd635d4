// Chains of block hashes (docs/hashing.md).
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <vector>

#include "blocks.h"

namespace kvpager {

// One block's hash, in place: many of them are one piece of memory.
struct Hash {
    uint8_t bytes[digest_bytes];

    Hash() {}  // not set to zero: whoever makes one fills it
    bool operator==(const Hash& other) const { return std::memcmp(bytes, other.bytes, digest_bytes) == 0; }
};

inline nanobind::bytes as_bytes(const Hash& hash) { return nanobind::bytes(hash.bytes, digest_bytes); }

// The hashes of a growing sequence's full blocks.
class BlockHashes {
public:
    BlockHashes(uint32_t block_size, nanobind::bytes parent, bool cbor);

    // Hashes what is full by now and has no hash; `token_ids` is the whole sequence. An error changes nothing.
    void extend(nanobind::handle token_ids, nanobind::handle suffixes);

    std::span<const Hash> all() const { return hashes_; }
    void prefetch_last() const {
        if (!hashes_.empty()) prefetch(&hashes_.back());
    }

    // Null if it is something else. Asked several times a step: nanobind's own question is a look-up.
    static const BlockHashes* of(nanobind::handle object) {
        return Py_TYPE(object.ptr()) == type ? nanobind::inst_ptr<BlockHashes>(object) : nullptr;
    }
    static inline PyTypeObject* type = nullptr;  // its Python class

private:
    std::vector<Hash> hashes_;
    Hash parent_;  // of the first block
    size_t block_size_;
    bool cbor_;
};

void bind_hashing(nanobind::module_& module);

}  // namespace kvpager
