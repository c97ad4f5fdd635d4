#include "hashing.h"

// SHA256_Init and its siblings are public in every OpenSSL from 1.1 to 3.x and half as expensive per
// message as EVP; 3.0 marks them deprecated in favour of EVP.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "errors.h"
#include "tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpager {

namespace {

constexpr size_t sha_block = SHA256_CBLOCK;
static_assert(digest_bytes == SHA256_DIGEST_LENGTH);
// Below this many tokens letting go of the GIL costs more than it gives.
constexpr size_t gil_threshold = 512;

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
        : block_size_(block_size), words_(padded(4 * (9 + block_size) + longest_suffix) / 4) {
        words_[8] = little(static_cast<uint32_t>(block_size));
    }

    // Leaves the hash in `hash`, which may be the parent. Returns the index of the first bad token, or npos.
    size_t hash(const Tokens& tokens, size_t first, Suffix suffix, const Hash& parent, Hash& hash) {
        auto* message = reinterpret_cast<uint8_t*>(words_.data());
        std::memcpy(message, parent.bytes, digest_bytes);
        if (size_t bad = tokens.load(first, block_size_, &words_[9]); bad != Tokens::npos) return bad;
        if constexpr (std::endian::native == std::endian::big) {
            for (size_t i = 0; i < block_size_; ++i) words_[9 + i] = little(words_[9 + i]);
        }
        uint8_t* end = put(message + 4 * (9 + block_size_), suffix);
        hash = sha256(message, end - message);
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
        : tokens_(block_size), message_(padded(3 + digest_bytes + 5 + 5 * block_size + longest_suffix)) {
        message_[0] = 0x83;  // an array of three
        message_[1] = 0x58;  // a byte string whose length is in the next byte
        message_[2] = digest_bytes;
    }

    size_t hash(const Tokens& tokens, size_t first, Suffix suffix, const Hash& parent, Hash& hash) {
        std::memcpy(&message_[3], parent.bytes, digest_bytes);
        if (size_t bad = tokens.load(first, tokens_.size(), tokens_.data()); bad != Tokens::npos) return bad;
        uint8_t* end = head(&message_[3 + digest_bytes], 4, static_cast<uint32_t>(tokens_.size()));
        for (uint32_t token : tokens_) end = head(end, 0, token);
        end = put(end, suffix);
        hash = sha256(message_.data(), end - message_.data());
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

// Hashes `hashes.size()` blocks from token `first` on. Returns the index of the first bad token, or npos. Needs no GIL.
template <typename Message>
size_t hash_all(const Tokens& tokens, size_t first, size_t block_size, const Suffixes& suffixes, Hash parent,
                std::vector<Hash>& hashes) {
    if (!hashes.empty()) {
        Message message(block_size, suffixes.longest());
        for (size_t block = 0; block < hashes.size(); ++block, first += block_size) {
            size_t bad = message.hash(tokens, first, suffixes[block], parent, hashes[block]);
            if (bad != Tokens::npos) return bad;
            parent = hashes[block];
        }
    }
    return tokens.find_bad(first);
}

}  // namespace

BlockHashes::BlockHashes(uint32_t block_size, nb::bytes parent, bool cbor) : block_size_(block_size), cbor_(cbor) {
    if (block_size == 0) raise(PyExc_ValueError, "block_size must be at least 1");
    if (parent.size() != digest_bytes) raise(PyExc_ValueError, "parent must be 32 bytes, got %zu", parent.size());
    std::memcpy(parent_.bytes, parent.data(), digest_bytes);
}

void BlockHashes::extend(nb::handle token_ids, nb::handle suffixes) {
    size_t done = hashes_.size();
    Tokens tokens(token_ids, done * block_size_);
    std::vector<Hash> fresh(tokens.size() / block_size_ - std::min(done, tokens.size() / block_size_));
    Suffixes behind(suffixes, fresh.size(), cbor_ ? Suffix(CborMessage::no_keys) : Suffix(CanonicalMessage::no_keys));
    const Hash parent = done == 0 ? parent_ : hashes_[std::min(done, hashes_.size()) - 1];
    auto run = [&] {
        size_t first = std::min(done * block_size_, tokens.size());
        return cbor_ ? hash_all<CborMessage>(tokens, first, block_size_, behind, parent, fresh)
                     : hash_all<CanonicalMessage>(tokens, first, block_size_, behind, parent, fresh);
    };
    size_t bad;
    if (fresh.size() * block_size_ < gil_threshold) {
        bad = run();
    } else {
        nb::gil_scoped_release released;
        bad = run();
    }
    if (bad != Tokens::npos) tokens.refuse(bad);
    if (hashes_.size() != done) {
        raise(invalid_request_error, "block hashes were extended by somebody else at the same time; extend them in one thread");
    }
    if (done == 0) {
        hashes_ = std::move(fresh);
    } else {
        hashes_.insert(hashes_.end(), fresh.begin(), fresh.end());
    }
}

namespace {

// Every `step`-th hash from `start` on, `count` of them.
nb::list as_list(std::span<const Hash> hashes, Py_ssize_t start, Py_ssize_t step, Py_ssize_t count) {
    nb::object list = nb::steal(PyList_New(count));
    if (!list.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyList_SET_ITEM(list.ptr(), i, as_bytes(hashes[static_cast<size_t>(start + i * step)]).release().ptr());
    }
    return nb::borrow<nb::list>(list);
}

nb::list as_list(const BlockHashes& hashes) {
    return as_list(hashes.all(), 0, 1, static_cast<Py_ssize_t>(hashes.all().size()));
}

nb::object item(const BlockHashes& self, nb::handle index) {
    Py_ssize_t size = static_cast<Py_ssize_t>(self.all().size()), start, stop, step;
    if (PySlice_Check(index.ptr())) {
        if (PySlice_Unpack(index.ptr(), &start, &stop, &step) != 0) throw nb::python_error();
        Py_ssize_t count = PySlice_AdjustIndices(size, &start, &stop, step);
        return as_list(self.all(), start, step, count);
    }
    Py_ssize_t position = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
    if (position == -1 && PyErr_Occurred()) throw nb::python_error();
    if (position < 0) position += size;
    if (position < 0 || position >= size) raise(PyExc_IndexError, "there are %zd block hashes", size);
    return as_bytes(self.all()[static_cast<size_t>(position)]);
}

// Equal to any list or tuple of the same hashes.
nb::object equals(const BlockHashes& self, nb::handle other) {
    if (const BlockHashes* same = BlockHashes::of(other)) {
        std::span<const Hash> theirs = same->all();
        return nb::bool_(std::equal(self.all().begin(), self.all().end(), theirs.begin(), theirs.end()));
    }
    if (!PyList_Check(other.ptr()) && !PyTuple_Check(other.ptr())) return nb::borrow(Py_NotImplemented);
    nb::object list = nb::steal(PySequence_List(other.ptr()));
    if (!list.is_valid()) throw nb::python_error();
    return nb::bool_(as_list(self).equal(list));
}

}  // namespace

void bind_hashing(nb::module_& module) {
    nb::class_<BlockHashes> hashes(module, "BlockHashes", nb::is_final());
    hashes
        .def(nb::init<uint32_t, nb::bytes, bool>(), "block_size"_a, "parent"_a, "cbor"_a)
        .def("extend", &BlockHashes::extend, "token_ids"_a.none(), "suffixes"_a = nb::none())
        .def("__len__", [](const BlockHashes& self) { return self.all().size(); })
        .def("__getitem__", &item, "index"_a)
        .def("__iter__", [](const BlockHashes& self) { return nb::iter(as_list(self)); })
        .def("index",
             [](const BlockHashes& self, nb::handle value, nb::args range) { return as_list(self).attr("index")(value, *range); },
             "value"_a.none(), "range"_a)
        .def("count", [](const BlockHashes& self, nb::handle value) { return as_list(self).attr("count")(value); }, "value"_a.none())
        .def("__eq__", &equals, "other"_a.none())
        .def("__repr__", [](const BlockHashes& self) { return nb::repr(as_list(self)); });
    BlockHashes::type = reinterpret_cast<PyTypeObject*>(hashes.ptr());
    hashes.attr("__hash__") = nb::none();  // it grows
    module.def("token_list", &token_list, nb::arg("token_ids").none(), "A new list of checked token ids.");
}

}  // namespace kvpager
