// Chains of block hashes (docs/hashing.md).
#pragma once

#include <limits>
#include <vector>

#include "hash.h"

namespace kvpager {

// A sequence's token ids, wherever they lie.
class TokenSource {
public:
    static constexpr size_t npos = std::numeric_limits<size_t>::max();

    virtual size_t size() const = 0;
    // Writes tokens [first, first + count) to `out`. Returns the index of the first one that is no token id, or npos.
    virtual size_t load(size_t first, size_t count, uint32_t* out) const = 0;
    // The first index from `first` on that holds no token id, or npos.
    virtual size_t find_bad(size_t first) const = 0;

protected:
    ~TokenSource() = default;
};

// What goes behind a block's tokens in its message.
using Suffix = std::span<const uint8_t>;

enum class HashFormat : uint8_t { canonical, cbor };

// The hashes of a growing sequence's full blocks, in one piece of memory. It does not know the tokens: they are given again.
class HashChain {
public:
    static constexpr size_t max_block_size = 0xffffffff;  // the message has four bytes for it

    // `parent` stands before the first block.
    HashChain(size_t block_size, const Hash& parent, HashFormat format);

    std::span<const Hash> all() const { return hashes_; }
    size_t block_size() const { return block_size_; }

    // The blocks of `num_tokens` tokens that have no hash yet.
    struct Extension {
        Hash parent;
        size_t first_token;
        std::vector<Hash> hashes;
    };
    Extension extension(size_t num_tokens) const;
    // Fills in its hashes; `suffixes`: one for each of its blocks, or none. Reads nothing that `append` changes, so both may
    // run side by side. Returns the index of the first bad token of the whole sequence, or npos.
    size_t compute(const TokenSource& tokens, std::span<const Suffix> suffixes, Extension& extension) const;
    void append(Extension&& extension);

private:
    std::vector<Hash> hashes_;
    Hash parent_;
    size_t block_size_;
    HashFormat format_;
};

}  // namespace kvpager
