// Chains of block hashes (docs/hashing.md).
#pragma once

// SHA256_Init and its siblings are public in every OpenSSL from 1.1 to 3.x and half as expensive per
// message as EVP; 3.0 marks them deprecated in favour of EVP.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "hash.h"

namespace kvpager {

// What goes behind a block's tokens in its message.
using Suffix = std::span<const uint8_t>;

constexpr size_t sha_block = SHA256_CBLOCK;
static_assert(digest_bytes == SHA256_DIGEST_LENGTH);
inline void put_big_endian(uint8_t* out, uint64_t value, int bytes) {
    for (int i = bytes - 1; i >= 0; --i, value >>= 8) out[i] = static_cast<uint8_t>(value);
}

// The room that a message of `size` bytes needs: `sha256` pads it in place.
constexpr size_t padded(size_t size) { return (size + 1 + 8 + sha_block - 1) / sha_block * sha_block; }

// The padding of FIPS 180-4, section 5.1.1, is put here, so that libcrypto compresses whole blocks straight
// from the message and copies nothing: SHA256_Final then has nothing left to do.
inline Hash sha256(uint8_t* message, size_t size) {
    size_t end = padded(size);
    message[size] = 0x80;
    std::memset(message + size + 1, 0, end - 8 - size - 1);
    put_big_endian(message + end - 8, uint64_t{size} * 8, 8);
    SHA256_CTX context;
    SHA256_Init(&context);
    SHA256_Update(&context, message, end);
    Hash hash;
    for (size_t i = 0; i < digest_bytes / 4; ++i) put_big_endian(&hash.bytes[4 * i], context.h[i], 4);
    return hash;
}

inline uint8_t* put(uint8_t* out, Suffix suffix) {
    std::memcpy(out, suffix.data(), suffix.size());
    return out + suffix.size();
}

// The message of `sha256`: parent, token count, tokens (all little-endian); the suffix counts and lists the extra keys.
class CanonicalMessage {
public:
    static constexpr uint8_t no_keys[4] = {0, 0, 0, 0};

    CanonicalMessage(size_t block_size, size_t longest_suffix)
        : block_size_(block_size), words_(padded(4 * (9 + block_size) + longest_suffix) / 4) {
        words_[8] = little(static_cast<uint32_t>(block_size));
    }

    Hash hash(std::span<const uint32_t> tokens, Suffix suffix, const Hash& parent) {
        auto* message = reinterpret_cast<uint8_t*>(words_.data());
        std::memcpy(message, parent.bytes, digest_bytes);
        std::transform(tokens.begin(), tokens.end(), &words_[9], little);
        uint8_t* end = put(message + 4 * (9 + block_size_), suffix);
        return sha256(message, end - message);
    }

private:
    static uint32_t little(uint32_t value) {
        if constexpr (std::endian::native == std::endian::little) return value;
        return value << 24 | (value & 0xff00) << 8 | (value >> 8 & 0xff00) | value >> 24;
    }

    size_t block_size_;
    std::vector<uint32_t> words_;
};

// The message of `sha256_cbor`: [parent, [tokens], extra] in canonical CBOR; the suffix is `extra`.
class CborMessage {
public:
    static constexpr uint8_t no_keys[1] = {0xf6};  // null

    CborMessage(size_t block_size, size_t longest_suffix)
        : message_(padded(3 + digest_bytes + 5 + 5 * block_size + longest_suffix)) {
        message_[0] = 0x83;  // an array of three
        message_[1] = 0x58;  // a byte string whose length is in the next byte
        message_[2] = digest_bytes;
    }

    Hash hash(std::span<const uint32_t> tokens, Suffix suffix, const Hash& parent) {
        std::memcpy(&message_[3], parent.bytes, digest_bytes);
        uint8_t* end = head(&message_[3 + digest_bytes], 4, static_cast<uint32_t>(tokens.size()));
        for (uint32_t token : tokens) end = head(end, 0, token);
        end = put(end, suffix);
        return sha256(message_.data(), end - message_.data());
    }

private:
    // A type byte and its argument in as few bytes as hold it.
    static uint8_t* head(uint8_t* out, uint8_t major, uint32_t argument) {
        uint8_t type = static_cast<uint8_t>(major << 5);
        if (argument < 24) {
            *out++ = type | static_cast<uint8_t>(argument);
            return out;
        }
        int size = argument < 1u << 8 ? 1 : argument < 1u << 16 ? 2 : 4;
        *out++ = type | static_cast<uint8_t>(size == 1 ? 24 : size == 2 ? 25 : 26);
        for (int shift = 8 * (size - 1); shift >= 0; shift -= 8) *out++ = static_cast<uint8_t>(argument >> shift);
        return out;
    }

    std::vector<uint8_t> message_;
};

enum class HashFormat : uint8_t { canonical, cbor };

// The hashes of a growing sequence's full blocks, in one piece of memory. It does not know the tokens: they are given
// again.
class HashChain {
public:
    static constexpr size_t max_block_size = 0xffffffff;  // the message has four bytes for it

    // `parent` stands before the first block.
    HashChain(size_t block_size, const Hash& parent, HashFormat format)
        : parent_(parent), block_size_(block_size), format_(format) {
        if (block_size > 0 && block_size <= max_block_size) return;
        fail(ErrorKind::invalid_request, "block_size must be 1 to %zu, got %zu", max_block_size, block_size);
    }

    std::span<const Hash> all() const { return hashes_; }
    size_t block_size() const { return block_size_; }
    // The last hash; what stands before the first one if there is none.
    Hash last() const { return hashes_.empty() ? parent_ : hashes_.back(); }
    // The first token of the first block that has no hash.
    size_t first_token() const { return hashes_.size() * block_size_; }

    // The hashes of the full blocks of `tokens`, which follow `parent`; `suffixes`: one for each block, or none. It
    // reads nothing that `append` changes, so both may run side by side.
    std::vector<Hash> compute(const Hash& parent, std::span<const uint32_t> tokens,
                              std::span<const Suffix> suffixes) const {
        return format_ == HashFormat::cbor ? compute<CborMessage>(parent, tokens, suffixes)
                                           : compute<CanonicalMessage>(parent, tokens, suffixes);
    }

    void append(std::vector<Hash>&& fresh) {
        if (hashes_.empty()) {
            hashes_ = std::move(fresh);
        } else {
            hashes_.insert(hashes_.end(), fresh.begin(), fresh.end());
        }
    }

private:
    template <typename Message>
    std::vector<Hash> compute(const Hash& parent, std::span<const uint32_t> tokens,
                              std::span<const Suffix> suffixes) const {
        std::vector<Hash> hashes(tokens.size() / block_size_);
        if (hashes.empty()) return hashes;
        Suffix plain = Message::no_keys;
        size_t longest = plain.size();
        for (Suffix suffix : suffixes) longest = std::max(longest, suffix.size());
        Message message(block_size_, longest);
        for (size_t i = 0; i < hashes.size(); ++i) {
            std::span<const uint32_t> block = tokens.subspan(i * block_size_, block_size_);
            hashes[i] = message.hash(block, suffixes.empty() ? plain : suffixes[i], i == 0 ? parent : hashes[i - 1]);
        }
        return hashes;
    }

    std::vector<Hash> hashes_;
    Hash parent_;
    size_t block_size_;
    HashFormat format_;
};

}  // namespace kvpager
