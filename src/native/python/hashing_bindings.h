// BlockHashes: a sequence's hash chain as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include "../hashing/chain.h"

namespace kvpager {

inline nanobind::bytes as_bytes(const Hash& hash) { return nanobind::bytes(hash.bytes, digest_bytes); }

class BlockHashes {
public:
    BlockHashes(size_t block_size, nanobind::bytes parent, bool cbor);

    // Hashes what is full by now and has no hash; `token_ids` is the whole sequence. An error changes nothing.
    void extend(nanobind::handle token_ids, nanobind::handle suffixes);

    const HashChain& chain() const { return chain_; }
    void prefetch_last() const {
        if (!chain_.all().empty()) prefetch(&chain_.all().back());
    }

    // Null if it is something else. Asked several times a step: nanobind's own question is a look-up.
    static const BlockHashes* of(nanobind::handle object) {
        return Py_TYPE(object.ptr()) == type ? nanobind::inst_ptr<BlockHashes>(object) : nullptr;
    }
    static inline PyTypeObject* type = nullptr;  // its Python class

private:
    HashChain chain_;
};

void bind_hashing(nanobind::module_& module);

}  // namespace kvpager
