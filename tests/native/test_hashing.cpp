// Chains of block hashes: the known answers of docs/hashing.md, and growth.
#include <doctest/doctest.h>

#include "hashing/chain.h"
#include "support.h"

namespace kvpager {

namespace {

std::vector<uint8_t> bytes_of(const std::string& hex) {
    std::vector<uint8_t> bytes;
    std::string digits;
    for (char digit : hex) {
        if (digit != ' ') digits += digit;
    }
    for (size_t i = 0; i < digits.size(); i += 2) {
        bytes.push_back(static_cast<uint8_t>(std::stoi(digits.substr(i, 2), nullptr, 16)));
    }
    return bytes;
}

Hash hash_in(const std::string& hex) {
    std::vector<uint8_t> bytes = bytes_of(hex);
    REQUIRE(bytes.size() == digest_bytes);
    Hash hash;
    std::memcpy(hash.bytes, bytes.data(), digest_bytes);
    return hash;
}

using Tokens = std::vector<uint32_t>;

// Hashes what is full by now; `tokens` is the whole sequence.
void extend(HashChain& chain, const Tokens& tokens, std::vector<Suffix> suffixes = {}) {
    std::span<const uint32_t> rest(tokens);
    chain.append(chain.compute(chain.last(), rest.subspan(std::min(chain.first_token(), tokens.size())), suffixes));
}

std::vector<Hash> all_of(const HashChain& chain) { return {chain.all().begin(), chain.all().end()}; }

}  // namespace

TEST_CASE("the worked example of sha256") {
    HashChain chain(4, hash_in("32dc083a592b6a8c82c2aaa4c831fff24e16a8d3df718a59e607eccbb822d645"), HashFormat::canonical);
    std::vector<uint8_t> first = bytes_of("03000000 01 08000000 03000000 73716c 37 04 0f000000 0300000000000000 6361742e706e67"
                                          "05 08000000 74656e616e742d61");
    std::vector<uint8_t> second = bytes_of("02000000 01 08000000 03000000 73716c 37"
                                           "04 0f000000 ffffffffffffffff 6361742e706e67");
    extend(chain, Tokens({1, 2, 3, 4, 5, 6, 7, 8, 9}), {first, second});
    REQUIRE(chain.all().size() == 2);
    CHECK(chain.all()[0] == hash_in("9ac0a772110a1d71711df8768018886b9b0673454f7b9920b21983a3777b0d78"));
    CHECK(chain.all()[1] == hash_in("c07566deb2afa348db3f0223c12ec5034f1778b0bebd91bab127d07f1668ce7d"));
}

TEST_CASE("the worked example of sha256_cbor") {
    HashChain chain(4, hash_in("9fa6eb003f14425eb9c8e6baacfbcaab26257357b829c7bfa74ffcc4f31c1780"), HashFormat::cbor);
    std::vector<uint8_t> salt = bytes_of("81 68 74656e616e742d61"), no_keys = bytes_of("f6");
    extend(chain, Tokens({1, 2, 3, 4, 1000, 70000, 7, 8}), {salt, no_keys});
    REQUIRE(chain.all().size() == 2);
    CHECK(chain.all()[0] == hash_in("f0e6a24abfba1d35afb6d0e01b82cd781e854f4d577a3cf72a7e60d2824b11e2"));
    CHECK(chain.all()[1] == hash_in("f023ae22757716bb4a52ecfd8a12b32a8854dc53fb4f9bf757822304f34dd30f"));
}

TEST_CASE("no suffixes are suffixes that say: no extra keys") {
    for (auto [format, no_keys] : {std::pair{HashFormat::canonical, bytes_of("00000000")},
                                   std::pair{HashFormat::cbor, bytes_of("f6")}}) {
        HashChain silent(2, hash_of(1), format), spoken(2, hash_of(1), format);
        extend(silent, Tokens({5, 6, 7, 8}));
        extend(spoken, Tokens({5, 6, 7, 8}), {no_keys, no_keys});
        CHECK(all_of(silent) == all_of(spoken));
    }
}

TEST_CASE("a chain that grows in pieces is the one hashed in one go") {
    Random random(test_seed());
    for (int life = 0; life < 200; ++life) {
        // Sizes around those where a message's padding takes another block of SHA-256.
        size_t block_size = static_cast<size_t>(random.between(1, 40)), size = block_size * 6;
        HashFormat format = random.percent(50) ? HashFormat::cbor : HashFormat::canonical;
        Tokens tokens;
        for (size_t i = 0; i < size; ++i) tokens.push_back(static_cast<uint32_t>(random.between(0, random.percent(50) ? 30 : 0xffffffff)));
        HashChain whole(block_size, hash_of(7), format), pieces(block_size, hash_of(7), format);
        extend(whole, tokens);
        for (size_t given = 0; given < size;) {
            given = std::min(size, given + static_cast<size_t>(random.between(0, 3 * static_cast<int64_t>(block_size))));
            extend(pieces, std::vector(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(given)));
        }
        REQUIRE(whole.all().size() == 6);
        REQUIRE(all_of(whole) == all_of(pieces));
        // The last hash as the parent of a chain of its own.
        HashChain rest(block_size, whole.all()[2], format);
        extend(rest, std::vector(tokens.begin() + static_cast<std::ptrdiff_t>(3 * block_size), tokens.end()));
        REQUIRE(rest.all().back() == whole.all().back());
    }
}

TEST_CASE("every token, the parent, the format and the suffix count") {
    auto last = [](Tokens tokens, uint64_t parent, HashFormat format, std::vector<uint8_t> suffix) {
        HashChain chain(2, hash_of(parent), format);
        extend(chain, tokens, {Suffix(suffix), Suffix(suffix)});
        return chain.all().back();
    };
    Hash hash = last({1, 2, 3, 4}, 1, HashFormat::canonical, {0});
    CHECK(hash == last({1, 2, 3, 4}, 1, HashFormat::canonical, {0}));
    CHECK_FALSE(hash == last({9, 2, 3, 4}, 1, HashFormat::canonical, {0}));
    CHECK_FALSE(hash == last({1, 2, 3, 9}, 1, HashFormat::canonical, {0}));
    CHECK_FALSE(hash == last({1, 2, 3, 4}, 2, HashFormat::canonical, {0}));
    CHECK_FALSE(hash == last({1, 2, 3, 4}, 1, HashFormat::cbor, {0}));
    CHECK_FALSE(hash == last({1, 2, 3, 4}, 1, HashFormat::canonical, {0, 0}));
}

TEST_CASE("fewer tokens than are hashed change nothing") {
    HashChain chain(2, hash_of(1), HashFormat::canonical);
    extend(chain, Tokens({1, 2, 3, 4}));
    extend(chain, Tokens({1}));
    CHECK(chain.all().size() == 2);
}

TEST_CASE("a block size that four bytes do not hold is refused") {
    CHECK_THROWS_AS(HashChain(0, hash_of(1), HashFormat::canonical), Error);
    CHECK_THROWS_AS(HashChain(size_t{1} << 32, hash_of(1), HashFormat::cbor), Error);
}

TEST_CASE("a group whose block spans several hashes finds its own at the block's end") {
    std::vector<Hash> hashes = chained({1, 2, 3, 4, 5});
    GroupHashes two = group_hashes(hashes, 2);
    CHECK(two.num_positions() == 2);
    CHECK(digest_text(two[1]) == digest_text(hashes[3].bytes));
}

TEST_CASE("a host's own hashes are read one by one, and what is none is refused") {
    std::vector<Hash> hashes = chained({1, 2});
    const void* objects[] = {&hashes[0], nullptr};
    HashSource source{.objects = objects, .read = [](const void* object) { return static_cast<Digest>(object); }};
    GroupHashes read(source, 1);
    CHECK(digest_text(read[0]) == digest_text(hashes[0].bytes));
    read.check(0, 1);
    CHECK_THROWS_AS(read.check(0, 2), Error);
}

}  // namespace kvpager
