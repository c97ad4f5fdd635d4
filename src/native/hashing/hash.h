// Hashes of blocks, and how others hand them in.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

#include "../errors.h"
#include "../memory.h"

namespace kvpager {

constexpr size_t digest_bytes = 32;

// A hash where it lies: 32 bytes.
using Digest = const uint8_t*;

// One block's hash, in place: many of them are one piece of memory.
struct Hash {
    uint8_t bytes[digest_bytes];

    Hash() {}  // not set to zero: whoever makes one fills it
    bool operator==(const Hash& other) const { return std::memcmp(bytes, other.bytes, digest_bytes) == 0; }
};

// A sequence's hashes, one a hash block: in one piece, or as a host's own objects, which `read` finds the digest in
// (null: it is none). It owns nothing.
struct HashSource {
    std::span<const Hash> compact{};
    std::span<const void* const> objects{};
    Digest (*read)(const void* object) = nullptr;

    int64_t size() const { return static_cast<int64_t>(read == nullptr ? compact.size() : objects.size()); }
};

// The hashes of one group, whose block spans `hashes_per_block` hash blocks: its block at position i ends with hash
// block (i + 1) * hashes_per_block - 1.
class GroupHashes {
public:
    GroupHashes(const HashSource& source, int64_t hashes_per_block)
        : source_(source), hashes_per_block_(hashes_per_block), num_positions_(source.size() / hashes_per_block) {}

    // How many positions have a hash.
    int64_t num_positions() const { return num_positions_; }

    Digest operator[](int64_t position) const {
        size_t at = index(position);
        if (source_.read == nullptr) return source_.compact[at].bytes;
        Digest digest = source_.read(source_.objects[at]);
        if (digest == nullptr) {
            fail(ErrorKind::invalid_request, "block hash %zu is none; a hash is %zu bytes", at, digest_bytes);
        }
        return digest;
    }

    // Throws unless each of positions [start, stop) is a hash.
    void check(int64_t start, int64_t stop) const {
        if (source_.read == nullptr) return;
        for (int64_t position = start; position < stop; ++position) (*this)[position];
    }

    // For one that is read soon.
    void prefetch_hash(int64_t position) const {
        if (position >= num_positions_) return;
        if (source_.read == nullptr) return prefetch(&source_.compact[index(position)]);
        auto* object = static_cast<const char*>(source_.objects[index(position)]);
        prefetch(object);
        prefetch(object + 64);
    }

private:
    size_t index(int64_t position) const { return static_cast<size_t>((position + 1) * hashes_per_block_ - 1); }

    HashSource source_;
    int64_t hashes_per_block_;
    int64_t num_positions_;
};

}  // namespace kvpager
