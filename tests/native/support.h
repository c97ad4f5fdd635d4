// What the core's tests share: random numbers, made-up hashes, attention kinds and the groups that they make.
#pragma once

#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "groups/group.h"

namespace kvpager {

// One seed for all random tests of a run.
inline uint64_t test_seed() {
    static const uint64_t seed = [] {
        const char* given = std::getenv("KVPAGER_SEED");
        return given != nullptr ? std::strtoull(given, nullptr, 10) : uint64_t{std::random_device()()};
    }();
    return seed;
}

class Random {
public:
    explicit Random(uint64_t seed) : engine_(seed) {}
    int64_t between(int64_t least, int64_t most) {  // both included
        return std::uniform_int_distribution<int64_t>(least, most)(engine_);
    }
    bool percent(int64_t chance) { return between(1, 100) <= chance; }
    template <typename Items>
    const auto& one_of(const Items& items) {
        return items[static_cast<size_t>(between(0, std::ssize(items) - 1))];
    }

private:
    std::mt19937_64 engine_;
};

// -- hashes ---------------------------------------------------------------------------------------

// Looks random and differs for each number.
inline uint64_t mixed(uint64_t number) {
    number = (number ^ number >> 31) * 0xd6e8feb86659fd93u;
    number = (number ^ number >> 29) * 0xcaf649a9a5f3d4abu;
    return number ^ number >> 32;
}

inline Hash hash_of(uint64_t number) {
    Hash hash;
    for (uint64_t i = 0; i < 4; ++i) {
        uint64_t word = mixed(4 * number + i + 1);
        std::memcpy(hash.bytes + 8 * i, &word, sizeof word);
    }
    return hash;
}

// A hash a content; each stands for all contents up to its own, as real ones do.
inline std::vector<Hash> chained(const std::vector<int>& contents) {
    std::vector<Hash> hashes;
    uint64_t prefix = 0;
    for (int content : contents) {
        prefix = mixed(prefix + static_cast<uint64_t>(content) + 1) >> 4;
        hashes.push_back(hash_of(prefix));
    }
    return hashes;
}

inline GroupHashes group_hashes(const std::vector<Hash>& hashes, int64_t hashes_per_block = 1) {
    return GroupHashes(HashSource{.compact = hashes}, hashes_per_block);
}

inline std::string digest_text(Digest digest) { return std::string(reinterpret_cast<const char*>(digest), digest_bytes); }

// -- attention kinds --------------------------------------------------------------------------------

inline AttentionKind full(int64_t block_size) {
    return {Content::tokens, block_size, unbounded, block_size, 0, false, true};
}
inline AttentionKind window(int64_t block_size, int64_t size) {
    return {Content::tokens, block_size, size - 1, block_size, 0, false, false};
}
inline AttentionKind chunks(int64_t block_size, int64_t size) {
    return {Content::tokens, block_size, 0, size, 0, false, false};
}
inline AttentionKind reference_window(int64_t block_size, int64_t size) {
    return {Content::tokens, block_size, size, block_size, 0, true, true};
}
inline AttentionKind every_state(int64_t block_size, int64_t num_speculative = 0) {
    return {Content::every_state, block_size, 1, block_size, num_speculative, false, false};
}
inline AttentionKind step_states(int64_t block_size, int64_t num_speculative = 0) {
    return {Content::step_states, block_size, 1, block_size, num_speculative, false, false};
}
inline AttentionKind last_state(int64_t block_size, int64_t num_speculative = 0) {
    return {Content::last_state, block_size, unbounded, block_size, num_speculative, false, false};
}
inline AttentionKind encoder(int64_t block_size) {
    return {Content::encoder_tokens, block_size, unbounded, block_size, 0, false, false};
}

// A group by itself: every hit is a multiple of its block, and every block may be hit.
inline SingleTypeKVCacheManager::Options plain_options(const AttentionKind& kind) {
    return {.group_id = 0,
            .hashes_per_block = 1,
            .alignment = kind.block_size,
            .commit_lookahead = 0,
            .draft_lookahead = 0,
            .shareable_decoded = unbounded,
            .interval = std::nullopt,
            .zeroes_new = false};
}
inline SingleTypeKVCacheManager plain_group(const AttentionKind& kind) { return {kind, plain_options(kind)}; }

inline int64_t hash_block_size(const std::vector<AttentionKind>& kinds) {
    int64_t size = 0;
    for (const AttentionKind& kind : kinds) size = std::gcd(size, kind.block_size);
    return size;
}

// The groups of one cache as the package makes them: aligned to all block sizes, windows cached only where hits may end.
inline std::vector<SingleTypeKVCacheManager> cache_groups(const std::vector<AttentionKind>& kinds, bool is_eagle = false) {
    int64_t alignment = 1, shareable = unbounded;
    for (const AttentionKind& kind : kinds) {
        alignment = std::lcm(alignment, kind.block_size);
        if (kind.keeps_prompt) shareable = std::min(shareable, kind.lag + 1);
    }
    std::vector<SingleTypeKVCacheManager> groups;
    for (const AttentionKind& kind : kinds) {
        SingleTypeKVCacheManager::Options options = plain_options(kind);
        options.group_id = static_cast<GroupId>(groups.size());
        options.hashes_per_block = kind.block_size / hash_block_size(kinds);
        options.alignment = alignment;
        options.commit_lookahead = is_eagle ? kind.block_size : 0;
        options.draft_lookahead = is_eagle && !kind.holds_states() ? kind.block_size : 0;
        options.shareable_decoded = shareable;
        options.zeroes_new = kind == full(kind.block_size);
        bool is_window = kind.content == Content::tokens && kind.can_die() && !kind.keeps_prompt && kind.lag > 0;
        if (is_window && alignment > ceil_div(kind.lag, kind.block_size) * kind.block_size + options.draft_lookahead) {
            options.interval = alignment;
        }
        groups.emplace_back(kind, options);
    }
    return groups;
}

}  // namespace kvpager
