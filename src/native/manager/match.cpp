// One hit length over all groups.
#include "coordinator.h"

namespace kvpager {

std::vector<KVCacheCoordinator::Lookup> KVCacheCoordinator::group_lookups() const {
    std::vector<Lookup> lookups;
    for (const SingleTypeKVCacheManager& group : groups_) {
        auto same = std::find_if(lookups.begin(), lookups.end(), [&](const Lookup& lookup) {
            return lookup.group->kind == group.kind &&
                   lookup.group->options.draft_lookahead == group.options.draft_lookahead;
        });
        if (same == lookups.end()) same = lookups.insert(lookups.end(), {&group, {}});
        same->ids.push_back(group.id());
    }
    std::stable_partition(lookups.begin(), lookups.end(),
                          [](const Lookup& lookup) { return lookup.group->kind.needs_whole_prefix; });
    return lookups;
}

Match KVCacheCoordinator::match(const HashSource& hashes, int64_t max_tokens) const {
    Match match{0, std::vector<BlockIds>(groups_.size()), 0};
    if (!options_.can_hit) return match;
    int64_t cap = std::min(max_tokens, hashes.size() * options_.hash_block_size);
    int64_t length = cap / alignment_ * alignment_, shared = 0;
    bool has_whole_prefix = false;
    for (const Lookup& lookup : lookups_) {
        if (!lookup.group->kind.needs_whole_prefix) break;
        has_whole_prefix = true;
        int64_t stop = cap / lookup.group->kind.block_size;
        std::vector<BlockIds> found = pool_.prefix(lookup.ids, hashes_of(*lookup.group, hashes), stop);
        for (size_t i = 0; i < found.size(); ++i) match.blocks[lookup.ids[i]] = std::move(found[i]);
    }
    // Each keeps or shortens the candidate, in turn, until nobody shortens it any more.
    for (size_t turn = 0, agreeing = 0; agreeing < lookups_.size(); ++turn) {
        const Lookup& lookup = lookups_[turn % lookups_.size()];
        const SingleTypeKVCacheManager& group = *lookup.group;
        int64_t accepted;
        if (group.kind.needs_whole_prefix) {
            int64_t cached = std::ssize(match.blocks[lookup.ids[0]]) * group.kind.block_size;
            accepted = std::min(length, group.longest_hit(cached));
        } else {
            if (shared == 0) shared = length;
            accepted = longest_run(lookup, hashes, std::min(length, group.longest_hit(cap)));
        }
        agreeing = accepted == length ? agreeing + 1 : 1;
        length = accepted;
    }
    for (const SingleTypeKVCacheManager& group : groups_) {
        match.blocks[group.id()] = take_hit(group, hashes, match.blocks[group.id()], length);
    }
    match.num_tokens = length;
    if (has_whole_prefix && shared > length) match.branch_point = shared;
    return match;
}

std::vector<Match> KVCacheCoordinator::match_each(const HashSource& hashes, int64_t max_tokens) const {
    std::vector<Match> matches;
    int64_t cap = options_.can_hit ? std::min(max_tokens, hashes.size() * options_.hash_block_size) : 0;
    for (const SingleTypeKVCacheManager& group : groups_) {
        Lookup lookup{&group, {group.id()}};
        BlockIds prefix;
        int64_t limit = cap;
        if (group.kind.needs_whole_prefix) {
            prefix = pool_.prefix(lookup.ids, hashes_of(group, hashes), cap / group.kind.block_size)[0];
            limit = std::ssize(prefix) * group.kind.block_size;
        }
        int64_t length = group.longest_hit(limit);
        if (!group.kind.needs_whole_prefix) length = longest_run(lookup, hashes, length);
        matches.push_back({length, {take_hit(group, hashes, prefix, length)}, 0});
    }
    return matches;
}

// The blocks of a hit that has been found; dead positions are null.
BlockIds KVCacheCoordinator::take_hit(const SingleTypeKVCacheManager& group, const HashSource& hashes, BlockIds& prefix,
                                      int64_t length) const {
    if (group.kind.needs_whole_prefix) {
        prefix.resize(length / group.kind.block_size);
        return std::move(prefix);
    }
    Range needed = group.kind.needed_for_hit(length);
    return pool_.lookup(group.id(), hashes_of(group, hashes), needed.start, needed.stop);
}

// The longest aligned hit up to `length` for kinds that need only a tail of the prefix. The rightmost missing block rules
// out every length that needs it, so no block is looked up twice.
int64_t KVCacheCoordinator::longest_run(const Lookup& lookup, const HashSource& hashes, int64_t length) const {
    const SingleTypeKVCacheManager& group = *lookup.group;
    while (length > 0) {
        Range needed = group.needed_for_hit(length);
        int64_t start = pool_.run_start(lookup.ids, hashes_of(group, hashes), needed.start, needed.stop);
        if (start <= needed.start) return length;
        length = group.longest_hit((start - 1) * group.kind.block_size);
    }
    return 0;
}

int64_t KVCacheCoordinator::num_shareable(int64_t num_tokens, int64_t num_prompt_tokens) const {
    for (const SingleTypeKVCacheManager& group : groups_) {
        num_tokens = group.num_shareable(num_tokens, num_prompt_tokens);
    }
    return num_tokens;
}

}  // namespace kvpager
