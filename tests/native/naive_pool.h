// The pool as anybody would write it who did not care about speed: the model that the real one is compared with. It
// shares no code with it. What can be counted is counted, what can be searched is searched.
#pragma once

#include <algorithm>
#include <deque>
#include <iterator>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace naive {

using Ids = std::vector<int>;
using Hashes = std::vector<std::string>;
using Key = std::pair<int, std::string>;      // group and hash
using Positions = std::pair<long, long>;      // half-open

struct Refused {
    std::string why;
};

inline bool holds(Positions range, long position) { return range.first <= position && position < range.second; }

struct Block {
    int held = 0;      // positions in tables
    int external = 0;  // references that were handed out
    bool is_reserved = false;
    bool was_hit = false;
    bool is_computing = false;
    std::optional<Key> key{};

    int refs() const { return held + external + is_reserved; }
    bool is_popped() const { return external > 0 && held == 0 && !is_reserved; }
};

// What left the index: some hashes of one group, or (group -1) all of them.
struct Left {
    int group;
    Hashes hashes;
    bool operator==(const Left&) const = default;
};

class Pool {
public:
    Pool(int num_blocks, bool is_dead_first) : blocks(static_cast<size_t>(num_blocks)), is_dead_first_(is_dead_first) {
        for (int block = 1; block < num_blocks; ++block) first_out.push_back(block);
    }

    std::vector<Block> blocks;
    std::deque<int> first_out;                 // never cached …, then cached and dead
    std::deque<int> recent;                    // the other cached ones, least recently freed first
    std::map<Key, std::list<int>> index;       // oldest copy first
    std::vector<Left> left{};                  // since the last look
    std::vector<std::pair<char, int>> history{};  // a(llocated), u(sed), e(victed), r(eset)
    Ids fresh{};                               // to be zeroed
    Ids reserved{};
    long num_evictions = 0;
    long index_version = 0;

    long num_free() const { return static_cast<long>(first_out.size() + recent.size()); }
    long num_popped() const {
        return std::count_if(blocks.begin(), blocks.end(), [](const Block& block) { return block.is_popped(); });
    }
    long num_held() const {
        return std::count_if(blocks.begin(), blocks.end(), [](const Block& block) { return block.held > 0; });
    }
    Ids queue() const {
        Ids all(first_out.begin(), first_out.end());
        all.insert(all.end(), recent.begin(), recent.end());
        return all;
    }

    // -- look-ups

    // The hash of a position of a group whose block spans `stride` hashes.
    static const std::string& hash_at(const Hashes& hashes, long stride, long position) {
        long at = (position + 1) * stride - 1;
        if (at >= std::ssize(hashes)) throw Refused{"invalid_request"};
        return hashes[static_cast<size_t>(at)];
    }
    int oldest(int group, const std::string& hash) const {
        auto found = index.find({group, hash});
        return found == index.end() ? 0 : found->second.front();
    }

    std::vector<Ids> prefix(const Ids& groups, const Hashes& hashes, long stride, long stop) const {
        if (stop > 0) hash_at(hashes, stride, stop - 1);
        std::vector<Ids> found(groups.size());
        for (long position = 0; position < stop && !groups.empty(); ++position) {
            Ids column;
            for (int group : groups) column.push_back(oldest(group, hash_at(hashes, stride, position)));
            if (std::count(column.begin(), column.end(), 0) > 0) break;
            for (size_t i = 0; i < groups.size(); ++i) found[i].push_back(column[i]);
        }
        return found;
    }

    long run_start(const Ids& groups, const Hashes& hashes, long stride, long start, long stop) const {
        if (start < stop) hash_at(hashes, stride, stop - 1);
        for (long position = stop - 1; position >= start; --position) {
            for (int group : groups) {
                if (oldest(group, hash_at(hashes, stride, position)) == 0) return position + 1;
            }
        }
        return start;
    }

    Ids lookup(int group, const Hashes& hashes, long stride, long start, long stop) const {
        if (start < stop) hash_at(hashes, stride, stop - 1);
        Ids found(static_cast<size_t>(start), 0);
        for (long position = start; position < stop; ++position) {
            int block = oldest(group, hash_at(hashes, stride, position));
            if (block == 0) throw Refused{"block_state"};
            found.push_back(block);
        }
        return found;
    }

    bool serves(const Ids& ids, int group, const Hashes& hashes, long stride) const {
        for (long position = 0; position < std::ssize(ids); ++position) {
            int block = ids[static_cast<size_t>(position)];
            if (block != 0 && at(block).key != Key{group, hash_at(hashes, stride, position)}) return false;
        }
        return true;
    }

    long count_evictable(const Ids& ids, long start, long stop) const {
        return count(ids, start, stop, [&](int block) { return block != 0 && at(block).refs() == 0; });
    }
    long count_exclusive(const Ids& ids, long start, long stop) const {
        return count(ids, start, stop, [&](int block) { return at(block).refs() == 1; });
    }
    long num_shared_by(const Ids& ids, long num_holders) const {
        auto other = std::find_if(ids.begin(), ids.end(), [&](int block) { return at(block).held != num_holders; });
        return other - ids.begin();
    }

    // -- tables

    void adopt(Ids& table, const Ids& hits, long start, long stop) {
        for (long position = start; position < stop; ++position) {
            int block = hits[static_cast<size_t>(position)];
            table.push_back(block);
            if (block == 0) continue;
            leave_queue(block);
            ++at(block).held;
            at(block).was_hit = true;
            history.push_back({'u', block});
        }
    }

    void extend(Ids& table, long num_blocks, bool is_zeroed) {
        for (int block : take(num_blocks)) {
            ++at(block).held;
            table.push_back(block);
            if (is_zeroed && std::count(fresh.begin(), fresh.end(), block) == 0) fresh.push_back(block);
        }
    }

    void move(Ids& table, long source) {
        table.push_back(std::exchange(table[static_cast<size_t>(source)], 0));
    }

    void release(Ids& table, long start, long stop, Positions keep) {
        std::vector<std::pair<int, bool>> given;
        for (long position = stop - 1; position >= start; --position) {
            given.push_back({std::exchange(table[static_cast<size_t>(position)], 0), !holds(keep, position)});
        }
        give_back(given, &Block::held);
    }

    // Tail first; across tables by where a position ends, or (by recency) one table after the other.
    void free_tables(std::vector<Ids*> tables, const std::vector<long>& block_sizes, const std::vector<Positions>& dead,
                     const std::vector<Positions>& keep) {
        std::map<std::pair<long, size_t>, std::pair<int, bool>> merged;
        for (size_t i = 0; i < tables.size(); ++i) {
            std::vector<std::pair<int, bool>> given;
            for (long position = std::ssize(*tables[i]) - 1; position >= 0; --position) {
                bool is_dead = holds(dead[i], position) && !holds(keep[i], position);
                given.push_back({(*tables[i])[static_cast<size_t>(position)], is_dead});
                merged[{-(position + 1) * block_sizes[i], i}] = given.back();
            }
            if (!is_dead_first_) give_back(given, &Block::held);
            tables[i]->clear();
        }
        if (!is_dead_first_) return;
        std::vector<std::pair<int, bool>> given;
        for (const auto& [place, one] : merged) given.push_back(one);
        give_back(given, &Block::held);
    }

    // Head first.
    Ids pop_tables(std::vector<Ids*> tables, const std::vector<long>& block_sizes) {
        std::map<std::pair<long, long>, int> merged;
        for (size_t i = 0; i < tables.size(); ++i) {
            for (long position = 0; position < std::ssize(*tables[i]); ++position) {
                int block = (*tables[i])[static_cast<size_t>(position)];
                long group = static_cast<long>(i);
                auto place = is_dead_first_ ? std::pair{(position + 1) * block_sizes[i], -group} : std::pair{group, position};
                if (block != 0) merged[place] = block;
            }
            tables[i]->clear();
        }
        Ids popped;
        for (const auto& [place, block] : merged) {
            --at(block).held;
            ++at(block).external;
            popped.push_back(block);
        }
        return popped;
    }

    // Gives the positions whose hash was new, in runs.
    std::vector<Positions> commit(const Ids& table, int group, const Hashes& hashes, long stride, long start, long stop) {
        std::vector<Positions> runs;
        for (long position = start; position < std::min(stop, std::ssize(hashes) / stride); ++position) {
            int block = table[static_cast<size_t>(position)];
            if (block == 0 || at(block).key) continue;
            Key key{group, hash_at(hashes, stride, position)};
            at(block).key = key;
            index[key].push_back(block);
            if (index[key].size() > 1) continue;
            if (!runs.empty() && runs.back().second == position) {
                ++runs.back().second;
            } else {
                runs.push_back({position, position + 1});
            }
        }
        return runs;
    }

    void compute(const Ids& table, long start, long stop) {
        for (long position = start; position < std::min(stop, std::ssize(table)); ++position) {
            int block = table[static_cast<size_t>(position)];
            if (block != 0) at(block).is_computing = true;
        }
    }
    void new_step_starts() {
        for (Block& block : blocks) block.is_computing = false;
    }

    // -- blocks by id

    Ids allocate(long num_blocks) {
        Ids taken = take(num_blocks);
        for (int block : taken) ++at(block).external;
        return taken;
    }

    void touch(const Ids& ids) {
        for (int block : ids) {
            leave_queue(block);
            ++at(block).external;
            history.push_back({'u', block});
        }
    }

    void free_blocks(const Ids& ids) {
        for (int block : ids) {
            if (std::count(ids.begin(), ids.end(), block) > at(block).external) throw Refused{"block_state"};
        }
        std::vector<std::pair<int, bool>> given;
        for (int block : ids) given.push_back({block, false});
        give_back(given, &Block::external);
    }

    void evict_blocks(const Ids& ids) {
        for (int block : ids) {
            if (!at(block).key) continue;
            forget(block);
            if (at(block).refs() == 0 && is_dead_first_) {
                leave_queue(block);
                first_out.push_front(block);
            }
        }
    }

    bool reset_prefix_cache() {
        if (num_held() + num_popped() > 0) return false;
        clear_index();
        return true;
    }

    void clear_index() {
        ++index_version;
        index.clear();
        for (Block& block : blocks) {
            block.key.reset();
            block.was_hit = false;
        }
        first_out.insert(first_out.end(), recent.begin(), recent.end());
        recent.clear();
        history.push_back({'r', 0});
        left.push_back({-1, {}});
    }

    Ids reserve(long num_blocks) {
        Ids taken = take(num_blocks);
        for (int block : taken) at(block).is_reserved = true;
        reserved.insert(reserved.end(), taken.begin(), taken.end());
        return taken;
    }

private:
    Block& at(int block) { return blocks[static_cast<size_t>(block)]; }
    const Block& at(int block) const { return blocks[static_cast<size_t>(block)]; }

    template <typename Test>
    static long count(const Ids& ids, long start, long stop, Test test) {
        long found = 0;
        for (long position = std::max(start, 0L); position < std::min(stop, std::ssize(ids)); ++position) {
            found += test(ids[static_cast<size_t>(position)]);
        }
        return found;
    }

    Ids take(long num_blocks) {
        if (num_blocks < 0 || num_blocks > num_free()) throw Refused{"out_of_blocks"};
        Ids taken;
        for (long i = 0; i < num_blocks; ++i) {
            std::deque<int>& list = first_out.empty() ? recent : first_out;
            int block = list.front();
            list.pop_front();
            if (at(block).key) {
                forget(block);
                ++num_evictions;
            }
            history.push_back({'a', block});
            taken.push_back(block);
        }
        return taken;
    }

    void leave_queue(int block) {
        std::erase(first_out, block);
        std::erase(recent, block);
    }

    // Drops one reference each of (block, dead); nulls are nobody's.
    void give_back(const std::vector<std::pair<int, bool>>& given, int Block::*references) {
        Ids never_cached;
        for (auto [block, is_dead] : given) {
            if (block == 0) continue;
            --(at(block).*references);
            if (at(block).refs() > 0) continue;
            if (!at(block).key) {
                never_cached.push_back(block);
            } else if (is_dead && is_dead_first_ && !at(block).was_hit) {
                first_out.push_back(block);
            } else {
                recent.push_back(block);
            }
        }
        first_out.insert(first_out.begin(), never_cached.begin(), never_cached.end());
    }

    void forget(int block) {
        Key key = *std::exchange(at(block).key, std::nullopt);
        index[key].remove(block);
        if (index[key].empty()) {
            index.erase(key);
            if (left.empty() || left.back().group != key.first) left.push_back({key.first, {}});
            left.back().hashes.push_back(key.second);
        }
        at(block).was_hit = false;
        ++index_version;
        history.push_back({'e', block});
    }

    bool is_dead_first_;
};

}  // namespace naive
