#include "pool_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "arguments.h"
#include "hashing_bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpager {

namespace {

EvictionOrder order_of(nb::handle eviction_order) {
    if (PyUnicode_Check(eviction_order.ptr())) {
        if (PyUnicode_CompareWithASCIIString(eviction_order.ptr(), "dead_first") == 0) return EvictionOrder::dead_first;
        if (PyUnicode_CompareWithASCIIString(eviction_order.ptr(), "recency") == 0) return EvictionOrder::recency;
    }
    raise(ErrorKind::config, "eviction_order must be one of ('dead_first', 'recency'), got %R", eviction_order.ptr());
}

// Of [0, stop), or a negative number.
int64_t id_below(nb::handle id, int64_t stop) {
    int overflow = 0;
    long long value = PyLong_Check(id.ptr()) ? PyLong_AsLongLongAndOverflow(id.ptr(), &overflow) : -1;
    return overflow != 0 || value >= stop ? -1 : value;
}

BlockId list_id(nb::handle id) {
    int64_t value = id_below(id, int64_t{INT32_MAX} + 1);
    if (value < 0) raise(ErrorKind::unknown_block, "%R cannot be a block id; ids are 0 to %d", id.ptr(), INT32_MAX);
    return static_cast<BlockId>(value);
}

BlockId checked_real(const BlockPool& pool, nb::handle id) {
    BlockId block = checked_id(pool, id);
    if (block == null_block) {
        raise(ErrorKind::block_state, "block 0 is the null block: it is never held, touched or freed; leave it out");
    }
    return block;
}

// -- block lists ----------------------------------------------------------------------------------

// Where a Python slice [start:stop] begins and ends.
std::span<const BlockId> slice_of(const BlockList& list, nb::handle start, nb::handle stop) {
    nb::object slice = nb::steal(PySlice_New(start.ptr(), stop.ptr(), nullptr));
    Py_ssize_t first, last, step;
    if (!slice.is_valid() || PySlice_Unpack(slice.ptr(), &first, &last, &step) != 0) throw nb::python_error();
    Py_ssize_t count = PySlice_AdjustIndices(std::ssize(list.ids), &first, &last, step);
    return std::span(list.ids).subspan(first, count);
}

using Row = nb::ndarray<int32_t, nb::ndim<1>, nb::device::cpu>;

int64_t copy_into(const BlockList& list, Row row, int64_t offset) {
    int64_t size = std::ssize(list.ids), columns = static_cast<int64_t>(row.shape(0));
    if (offset < 0 || offset > columns || size > columns - offset) {
        raise(ErrorKind::invalid_request, "%zd blocks at column %zd do not fit a row of %zd", Py_ssize_t{size},
              Py_ssize_t{offset}, Py_ssize_t{columns});
    }
    int32_t* out = row.data() + offset * row.stride(0);
    for (BlockId block : list.ids) *out = block, out += row.stride(0);
    return offset + size;
}

void bind_block_list(nb::module_& module) {
    nb::class_<BlockList>(module, "BlockList", nb::is_final())
        .def(nb::init<>())
        .def(
            "__init__", [](BlockList* list, nb::iterable ids) { new (list) BlockList{as_vector(ids, list_id)}; },
            "ids"_a)
        .def("__len__", [](const BlockList& list) { return list.ids.size(); })
        .def(
            "__getitem__",
            [](const BlockList& list, int64_t position) {
                if (position < 0) position += std::ssize(list.ids);
                if (position < 0 || position >= std::ssize(list.ids)) throw nb::index_error("no such position");
                return list.ids[position];
            },
            "position"_a)
        .def(
            "ids",
            [](const BlockList& list, nb::handle start, nb::handle stop) {
                return as_list(slice_of(list, start, stop));
            },
            "start"_a = 0, "stop"_a = nb::none())
        .def(
            "slice",
            [](const BlockList& list, nb::handle start, nb::handle stop) {
                std::span<const BlockId> part = slice_of(list, start, stop);
                return BlockList{{part.begin(), part.end()}};
            },
            "start"_a, "stop"_a)
        .def("copy_into", &copy_into, "row"_a.noconvert(), "offset"_a = 0);
}

// -- the pool -------------------------------------------------------------------------------------

// Runs a verb, then tells the residency sampler what it did.
template <typename Verb>
auto told(PoolObject& self, Verb verb) {
    if constexpr (std::is_void_v<decltype(verb(self.pool))>) {
        verb(self.pool);
        self.tell_sampler();
    } else {
        auto answer = verb(self.pool);
        self.tell_sampler();
        return answer;
    }
}

// A property or a method that only looks.
template <typename Question>
auto asks(Question question) {
    return [question](const PoolObject& self) { return question(self.pool); };
}

std::vector<BlockId> real_ids(const BlockPool& pool, nb::handle ids) {
    return as_vector(ids, [&](nb::handle id) { return checked_real(pool, id); });
}

nb::dict index_of(const BlockPool& pool) {
    nb::dict index;
    std::vector<BlockId> oldest;
    pool.index().for_each_hash([&](BlockId block) { oldest.push_back(block); });
    for (BlockId block : oldest) {
        std::vector<BlockId> copies;
        pool.index().for_each_copy(block, [&](BlockId copy) { copies.push_back(copy); });
        index[nb::make_tuple(nb::bytes(pool.index().digest(block), digest_bytes), pool.group_of(block))] =
            as_list(copies);
    }
    return index;
}

nb::object reserved_of(const BlockPool& pool) {
    nb::object set = nb::steal(PyFrozenSet_New(as_list(pool.reserved()).ptr()));
    if (!set.is_valid()) throw nb::python_error();
    return set;
}

double usage_of(const BlockPool& pool) {
    int64_t capacity = pool.num_blocks() - 1 - pool.num_reserved();
    return capacity > 0 ? static_cast<double>(capacity - pool.num_free()) / static_cast<double>(capacity) : 0.0;
}

nb::object hash_of(const BlockPool& pool, BlockId block) {
    return pool.is_cached(block) ? nb::object(nb::bytes(pool.index().digest(block), digest_bytes)) : nb::none();
}

nb::list events_of(BlockPool& pool) {
    IndexChanges changes = pool.take_changes();
    const Hash* next = changes.removed.data();
    nb::list list;
    if (changes.changes.empty()) return list;
    nb::module_ classes = nb::module_::import_("kvpager.events");
    nb::object removed = classes.attr("BlockRemoved"), cleared = classes.attr("AllBlocksCleared");
    nb::object medium = classes.attr("MEDIUM_GPU");
    for (const IndexChange& change : changes.changes) {
        if (change.what == IndexChange::cleared) {
            list.append(cleared());
        } else {
            std::span<const Hash> gone(next, static_cast<size_t>(change.num_hashes));
            list.append(removed(list_of(gone, as_bytes), medium, change.group));
            next += change.num_hashes;
        }
    }
    return list;
}

using PoolClass = nb::class_<PoolObject>;

void bind_questions(PoolClass& pool) {
    pool.def_prop_ro("num_blocks", asks([](const BlockPool& self) { return self.num_blocks(); }))
        .def_prop_ro("eviction_order", asks([](const BlockPool& self) {
                         return self.order() == EvictionOrder::dead_first ? "dead_first" : "recency";
                     }))
        .def_prop_ro("num_free", asks([](const BlockPool& self) { return self.num_free(); }))
        .def_prop_ro("num_popped", asks([](const BlockPool& self) { return self.num_popped(); }))
        .def_prop_ro("num_reserved", asks([](const BlockPool& self) { return self.num_reserved(); }))
        .def_prop_ro("num_held", asks([](const BlockPool& self) { return self.num_held(); }))
        .def_prop_ro("num_evictions", asks([](const BlockPool& self) { return self.num_evictions(); }))
        .def_prop_ro("generation", asks([](const BlockPool& self) { return self.index_version(); }))
        .def_prop_ro("usage", asks(usage_of))
        .def("free_queue", asks([](const BlockPool& self) {
                 std::vector<BlockId> order;
                 self.queue().for_each([&](BlockId block) { order.push_back(block); });
                 return as_list(order);
             }))
        .def("index", asks(index_of))
        .def("reserved_blocks", asks(reserved_of));
    auto of_block = [&](const char* name, auto question) {
        pool.def(
            name,
            [question](const PoolObject& self, nb::handle id) {
                return question(self.pool, checked_id(self.pool, id));
            },
            "block_id"_a);
    };
    of_block("ref_count", [](const BlockPool& self, BlockId block) { return self.ref_count(block); });
    of_block("outside_count", [](const BlockPool& self, BlockId block) { return self.external_count(block); });
    of_block("block_hash", hash_of);
    of_block("block_group", [](const BlockPool& self, BlockId block) {
        return self.is_cached(block) ? std::optional(self.group_of(block)) : std::nullopt;
    });
}

void bind_blocks_by_id(PoolClass& pool) {
    pool.def(
            "allocate",
            [](PoolObject& self, int64_t num_blocks) {
                return as_list(told(self, [&](BlockPool& verbs) { return verbs.allocate(num_blocks); }));
            },
            "num_blocks"_a)
        .def(
            "touch",
            [](PoolObject& self, nb::handle ids) {
                std::vector<BlockId> blocks = real_ids(self.pool, ids);
                told(self, [&](BlockPool& verbs) { verbs.touch(blocks); });
            },
            "block_ids"_a)
        .def(
            "free_blocks", [](PoolObject& self, nb::handle ids) { self.pool.free_blocks(real_ids(self.pool, ids)); },
            "block_ids"_a)
        .def(
            "evict_blocks",
            [](PoolObject& self, nb::handle ids) {
                std::vector<BlockId> blocks = as_vector(ids, [&](nb::handle id) { return checked_id(self.pool, id); });
                told(self, [&](BlockPool& verbs) { verbs.evict_blocks(blocks); });
            },
            "block_ids"_a)
        .def("reset_prefix_cache",
             [](PoolObject& self) { return told(self, [](BlockPool& verbs) { return verbs.reset_prefix_cache(); }); })
        .def(
            "reserve",
            [](PoolObject& self, int64_t num_blocks) {
                return as_list(told(self, [&](BlockPool& verbs) { return verbs.reserve(num_blocks); }));
            },
            "num_blocks"_a)
        .def("new_step_starts", [](PoolObject& self) { self.pool.new_step_starts(); })
        .def("take_new_block_ids", [](PoolObject& self) { return as_list(self.pool.take_new_block_ids()); })
        .def("take_events", [](PoolObject& self) { return events_of(self.pool); });
}

}  // namespace

BlockId checked_id(const BlockPool& pool, nb::handle id) {
    int64_t value = id_below(id, pool.num_blocks());
    if (value < 0) {
        raise(ErrorKind::unknown_block, "block id %R is not in the pool; ids are 0 to %zd", id.ptr(),
              Py_ssize_t{pool.num_blocks() - 1});
    }
    return static_cast<BlockId>(value);
}

PoolObject::PoolObject(int64_t num_blocks, int64_t num_groups, nb::handle order, bool enable_events, nb::object sampler)
    : pool(num_blocks, num_groups, order_of(order), enable_events, !sampler.is_none()), residency(std::move(sampler)) {}

void PoolObject::tell_history() {
    static constexpr const char* methods[] = {"allocated", "used", "evicted", "reset"};
    std::vector<BlockHistory> history = pool.take_history();
    nb::object sampler = residency;
    for (const BlockHistory& event : history) {
        const char* method = methods[event.what];
        try {
            event.what == BlockHistory::reset ? sampler.attr(method)() : sampler.attr(method)(event.block);
        } catch (nb::python_error& error) {
            // The deed is done; a sampler that fails cannot undo it.
            error.discard_as_unraisable(sampler);
        }
    }
}

int PoolObject::traverse(visitproc visit, void* arg) {
    Py_VISIT(residency.ptr());
    return 0;
}

void bind_pool(nb::module_& module) {
    bind_block_list(module);
    PoolClass pool(module, "BlockPool", nb::is_final(), nb::type_slots(Collectable<PoolObject>::slots));
    pool.def(nb::init<int64_t, int64_t, nb::handle, bool, nb::object>(), "num_blocks"_a, "num_groups"_a, nb::kw_only(),
             "eviction_order"_a = "dead_first", "enable_events"_a = false, "residency"_a = nb::none());
    bind_questions(pool);
    bind_blocks_by_id(pool);
}

}  // namespace kvpager
