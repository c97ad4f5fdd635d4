#include "chain.h"

// SHA256_Init and its siblings are public in every OpenSSL from 1.1 to 3.x and half as expensive per
// message as EVP; 3.0 marks them deprecated in favour of EVP.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace kvpager {

namespace {

constexpr size_t sha_block = SHA256_CBLOCK;
static_assert(digest_bytes == SHA256_DIGEST_LENGTH);
void put_big_endian(uint8_t* out, uint64_t value, int bytes) {
    for (int i = bytes - 1; i >= 0; --i, value >>= 8) out[i] = static_cast<uint8_t>(value);
}

// The room that a message of `size` bytes needs: `sha256` pads it in place.
constexpr size_t padded(size_t size) { return (size + 1 + 8 + sha_block - 1) / sha_block * sha_block; }

// The padding of FIPS 180-4, section 5.1.1, is put here, so that libcrypto compresses whole blocks straight
// from the message and copies nothing: SHA256_Final then has nothing left to do.
Hash sha256(uint8_t* message, size_t size) {
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

uint8_t* put(uint8_t* out, Suffix suffix) {
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

    // Leaves the hash in `hash`, which may be the parent. Returns the index of the first bad token, or npos.
    size_t hash(const TokenSource& tokens, size_t first, Suffix suffix, const Hash& parent, Hash& hash) {
        auto* message = reinterpret_cast<uint8_t*>(words_.data());
        std::memcpy(message, parent.bytes, digest_bytes);
        if (size_t bad = tokens.load(first, block_size_, &words_[9]); bad != TokenSource::npos) return bad;
        if constexpr (std::endian::native == std::endian::big) {
            for (size_t i = 0; i < block_size_; ++i) words_[9 + i] = little(words_[9 + i]);
        }
        uint8_t* end = put(message + 4 * (9 + block_size_), suffix);
        hash = sha256(message, end - message);
        return TokenSource::npos;
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
        : tokens_(block_size), message_(padded(3 + digest_bytes + 5 + 5 * block_size + longest_suffix)) {
        message_[0] = 0x83;  // an array of three
        message_[1] = 0x58;  // a byte string whose length is in the next byte
        message_[2] = digest_bytes;
    }

    size_t hash(const TokenSource& tokens, size_t first, Suffix suffix, const Hash& parent, Hash& hash) {
        std::memcpy(&message_[3], parent.bytes, digest_bytes);
        if (size_t bad = tokens.load(first, tokens_.size(), tokens_.data()); bad != TokenSource::npos) return bad;
        uint8_t* end = head(&message_[3 + digest_bytes], 4, static_cast<uint32_t>(tokens_.size()));
        for (uint32_t token : tokens_) end = head(end, 0, token);
        end = put(end, suffix);
        hash = sha256(message_.data(), end - message_.data());
        return TokenSource::npos;
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

    std::vector<uint32_t> tokens_;
    std::vector<uint8_t> message_;
};

// Hashes `hashes.size()` blocks from token `first` on. Returns the index of the first bad token, or npos.
template <typename Message>
size_t hash_all(const TokenSource& tokens, size_t first, size_t block_size, std::span<const Suffix> suffixes, Hash parent,
                std::vector<Hash>& hashes) {
    Suffix plain = Message::no_keys;
    if (!hashes.empty()) {
        size_t longest = plain.size();
        for (Suffix suffix : suffixes) longest = std::max(longest, suffix.size());
        Message message(block_size, longest);
        for (size_t block = 0; block < hashes.size(); ++block, first += block_size) {
            size_t bad = message.hash(tokens, first, suffixes.empty() ? plain : suffixes[block], parent, hashes[block]);
            if (bad != TokenSource::npos) return bad;
            parent = hashes[block];
        }
    }
    return tokens.find_bad(first);
}

}  // namespace

HashChain::HashChain(size_t block_size, const Hash& parent, HashFormat format)
    : parent_(parent), block_size_(block_size), format_(format) {
    if (block_size == 0 || block_size > max_block_size) {
        fail(ErrorKind::invalid_request, "block_size must be 1 to %zu, got %zu", max_block_size, block_size);
    }
}

HashChain::Extension HashChain::extension(size_t num_tokens) const {
    size_t done = hashes_.size(), full = std::max(done, num_tokens / block_size_);
    return {done == 0 ? parent_ : hashes_.back(), std::min(done * block_size_, num_tokens), std::vector<Hash>(full - done)};
}

size_t HashChain::compute(const TokenSource& tokens, std::span<const Suffix> suffixes, Extension& extension) const {
    auto hash = format_ == HashFormat::cbor ? hash_all<CborMessage> : hash_all<CanonicalMessage>;
    return hash(tokens, extension.first_token, block_size_, suffixes, extension.parent, extension.hashes);
}

void HashChain::append(Extension&& extension) {
    if (hashes_.empty()) {
        hashes_ = std::move(extension.hashes);
    } else {
        hashes_.insert(hashes_.end(), extension.hashes.begin(), extension.hashes.end());
    }
}

}  // namespace kvpager
