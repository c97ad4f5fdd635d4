#include "hashing.h"

// SHA256_Init and its siblings are public in every OpenSSL from 1.1 to 3.x and half as expensive per
// message as EVP; 3.0 marks them deprecated in favour of EVP.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "errors.h"
#include "tokens.h"

namespace nb = nanobind;

namespace kvpager {

namespace {

constexpr size_t hash_bytes = SHA256_DIGEST_LENGTH;
// Below this many tokens letting go of the GIL costs more than it gives.
constexpr size_t gil_threshold = 512;

void sha256(const uint8_t* message, size_t size, uint8_t* digest) {
    SHA256_CTX context;
    SHA256_Init(&context);
    SHA256_Update(&context, message, size);
    SHA256_Final(digest, &context);
}

using Suffix = std::span<const uint8_t>;

// What goes behind each block's tokens: one entry for each block, or the same `plain` for all.
class Suffixes {
public:
    Suffixes(nb::handle source, size_t num_blocks, Suffix plain) : plain_(plain), longest_(plain.size()) {
        if (source.is_none()) return;
        held_ = nb::steal(PySequence_Tuple(source.ptr()));
        if (!held_.is_valid()) throw nb::python_error();
        if (size_t count = nb::len(held_); count != num_blocks) {
            raise(invalid_request_error,
                  "extra_keys has %zu entries for %zu full blocks; give one for each (None: no keys)", count, num_blocks);
        }
        for (nb::handle item : held_) {
            if (!PyBytes_Check(item.ptr())) raise(PyExc_TypeError, "a suffix must be bytes, got %R", item.ptr());
            auto* data = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(item.ptr()));
            spans_.emplace_back(data, static_cast<size_t>(PyBytes_GET_SIZE(item.ptr())));
            longest_ = std::max(longest_, spans_.back().size());
        }
    }

    Suffix operator[](size_t block) const { return spans_.empty() ? plain_ : spans_[block]; }
    size_t longest() const { return longest_; }

private:
    nb::object held_;  // a tuple, so that nobody can drop a suffix while the GIL is let go
    std::vector<Suffix> spans_;
    Suffix plain_;
    size_t longest_;
};

uint8_t* put(uint8_t* out, Suffix suffix) {
    std::memcpy(out, suffix.data(), suffix.size());
    return out + suffix.size();
}

// The message of `sha256`: parent, token count, tokens (all little-endian); the suffix counts and lists the extra keys.
class CanonicalMessage {
public:
    static constexpr uint8_t no_keys[4] = {0, 0, 0, 0};

    CanonicalMessage(size_t block_size, size_t longest_suffix)
        : block_size_(block_size), words_(9 + block_size + (longest_suffix + 3) / 4) {
        words_[8] = little(static_cast<uint32_t>(block_size));
    }

    size_t hash(const Tokens& tokens, size_t first, Suffix suffix, const uint8_t* parent, uint8_t* digest) {
        auto* message = reinterpret_cast<uint8_t*>(words_.data());
        std::memcpy(message, parent, hash_bytes);
        if (size_t bad = tokens.load(first, block_size_, &words_[9]); bad != Tokens::npos) return bad;
        if constexpr (std::endian::native == std::endian::big) {
            for (size_t i = 0; i < block_size_; ++i) words_[9 + i] = little(words_[9 + i]);
        }
        uint8_t* end = put(message + 4 * (9 + block_size_), suffix);
        sha256(message, end - message, digest);
        return Tokens::npos;
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
        : tokens_(block_size), message_(3 + hash_bytes + 5 + 5 * block_size + longest_suffix) {
        message_[0] = 0x83;  // an array of three
        message_[1] = 0x58;  // a byte string whose length is in the next byte
        message_[2] = hash_bytes;
    }

    size_t hash(const Tokens& tokens, size_t first, Suffix suffix, const uint8_t* parent, uint8_t* digest) {
        std::memcpy(&message_[3], parent, hash_bytes);
        if (size_t bad = tokens.load(first, tokens_.size(), tokens_.data()); bad != Tokens::npos) return bad;
        uint8_t* end = head(&message_[3 + hash_bytes], 4, static_cast<uint32_t>(tokens_.size()));
        for (uint32_t token : tokens_) end = head(end, 0, token);
        end = put(end, suffix);
        sha256(message_.data(), end - message_.data(), digest);
        return Tokens::npos;
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

// Fills `hashes` (32 bytes a block). Returns the index of the first bad token, or npos. Needs no GIL.
template <typename Message>
size_t hash_all(const Tokens& tokens, size_t block_size, Suffixes const& suffixes, const uint8_t* parent,
                std::vector<uint8_t>& hashes) {
    size_t num_blocks = hashes.size() / hash_bytes;
    if (num_blocks > 0) {
        Message message(block_size, suffixes.longest());
        for (size_t block = 0; block < num_blocks; ++block) {
            uint8_t* digest = &hashes[block * hash_bytes];
            size_t bad = message.hash(tokens, block * block_size, suffixes[block], parent, digest);
            if (bad != Tokens::npos) return bad;
            parent = digest;
        }
    }
    return tokens.find_bad(num_blocks * block_size);
}

nb::list as_bytes_list(const std::vector<uint8_t>& hashes) {
    size_t num_blocks = hashes.size() / hash_bytes;
    nb::list list = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(num_blocks)));
    if (!list.is_valid()) throw nb::python_error();
    for (size_t block = 0; block < num_blocks; ++block) {
        auto* digest = reinterpret_cast<const char*>(&hashes[block * hash_bytes]);
        PyObject* bytes = PyBytes_FromStringAndSize(digest, hash_bytes);
        if (bytes == nullptr) throw nb::python_error();
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(block), bytes);
    }
    return list;
}

nb::list hash_chain(nb::handle token_ids, uint32_t block_size, nb::bytes parent, nb::handle suffixes, bool cbor) {
    if (block_size == 0) raise(PyExc_ValueError, "block_size must be at least 1");
    if (parent.size() != hash_bytes) raise(PyExc_ValueError, "parent must be 32 bytes, got %zu", parent.size());
    Tokens tokens(token_ids);
    size_t num_blocks = tokens.size() / block_size;
    Suffixes behind(suffixes, num_blocks, cbor ? Suffix(CborMessage::no_keys) : Suffix(CanonicalMessage::no_keys));
    std::vector<uint8_t> hashes(num_blocks * hash_bytes);
    auto* first_parent = static_cast<const uint8_t*>(parent.data());
    auto run = [&] {
        return cbor ? hash_all<CborMessage>(tokens, block_size, behind, first_parent, hashes)
                    : hash_all<CanonicalMessage>(tokens, block_size, behind, first_parent, hashes);
    };
    size_t bad;
    if (tokens.size() < gil_threshold) {
        bad = run();
    } else {
        nb::gil_scoped_release released;
        bad = run();
    }
    if (bad != Tokens::npos) tokens.refuse(bad);
    return as_bytes_list(hashes);
}

}  // namespace

void bind_hashing(nb::module_& module) {
    module.def("hash_chain", &hash_chain, nb::arg("token_ids").none(), nb::arg("block_size"), nb::arg("parent"),
               nb::arg("suffixes").none(), nb::arg("cbor"),
               "The hash of every full block; suffixes (one a block, or None) go behind its tokens in the message.");
    module.def("token_list", &token_list, nb::arg("token_ids").none(), "A new list of checked token ids.");
}

}  // namespace kvpager
