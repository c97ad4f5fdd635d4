#include "pool_bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpager {

namespace {

BlockId list_id(nb::handle id) {
    int overflow = 0;
    long long value = PyLong_Check(id.ptr()) ? PyLong_AsLongLongAndOverflow(id.ptr(), &overflow) : -1;
    if (overflow != 0 || value < 0 || value > INT32_MAX) {
        raise(unknown_block_error, "%R cannot be a block id; ids are 0 to %d", id.ptr(), INT32_MAX);
    }
    return static_cast<BlockId>(value);
}

// Where a Python slice [start:stop] begins and ends.
Range slice_of(const BlockList& list, nb::handle start, nb::handle stop) {
    nb::object slice = nb::steal(PySlice_New(start.ptr(), stop.ptr(), nullptr));
    Py_ssize_t first, last, step;
    if (!slice.is_valid() || PySlice_Unpack(slice.ptr(), &first, &last, &step) != 0) throw nb::python_error();
    Py_ssize_t count = PySlice_AdjustIndices(list.size(), &first, &last, step);
    return {first, first + count};
}

using Row = nb::ndarray<int32_t, nb::ndim<1>, nb::device::cpu>;

int64_t copy_into(const BlockList& list, Row row, int64_t offset) {
    if (offset < 0 || offset + list.size() > static_cast<int64_t>(row.shape(0))) {
        raise(invalid_request_error, "%zd blocks at column %zd do not fit a row of %zu", Py_ssize_t{list.size()},
              Py_ssize_t{offset}, row.shape(0));
    }
    int32_t* out = row.data() + offset * row.stride(0);
    for (BlockId block : list.ids) *out = block, out += row.stride(0);
    return offset + list.size();
}

void bind_block_list(nb::module_& module) {
    nb::class_<BlockList>(module, "BlockList", nb::is_final())
        .def(nb::init<>())
        .def("__init__",
             [](BlockList* list, nb::iterable ids) { new (list) BlockList{as_vector(ids, list_id)}; }, "ids"_a)
        .def_rw("num_committed", &BlockList::num_committed)
        .def_rw("num_released", &BlockList::num_released)
        .def_rw("is_running", &BlockList::is_running)
        .def_rw("step_ends", &BlockList::step_ends)
        .def("__len__", &BlockList::size)
        .def("__getitem__",
             [](const BlockList& list, int64_t position) {
                 if (position < 0) position += list.size();
                 if (position < 0 || position >= list.size()) throw nb::index_error("no such position");
                 return list.ids[position];
             },
             "position"_a)
        .def("ids",
             [](const BlockList& list, nb::handle start, nb::handle stop) {
                 Range part = slice_of(list, start, stop);
                 return as_list(list.ids.data() + part.start, part.stop - part.start);
             },
             "start"_a = 0, "stop"_a = nb::none())
        .def("slice",
             [](const BlockList& list, nb::handle start, nb::handle stop) {
                 Range part = slice_of(list, start, stop);
                 return BlockList{{list.ids.begin() + part.start, list.ids.begin() + part.stop}};
             },
             "start"_a, "stop"_a)
        .def("copy_into", &copy_into, "row"_a.noconvert(), "offset"_a = 0);
}

// Runs a verb, then tells the residency sampler what it did.
template <typename Verb>
auto told(Pool& pool, Verb verb) {
    if constexpr (std::is_void_v<decltype(verb())>) {
        verb();
        pool.tell_observer();
    } else {
        auto answer = verb();
        pool.tell_observer();
        return answer;
    }
}

std::vector<BlockId> real_ids(const Pool& pool, nb::handle ids) {
    return as_vector(ids, [&](nb::handle id) { return pool.checked_real(id); });
}

std::vector<Group> groups_of(const Pool& pool, nb::handle ids) {
    return as_vector(ids, [&](nb::handle id) { return pool.checked_group(as_int(id)); });
}

void check_sizes(const std::vector<int64_t>& block_sizes, size_t num_tables) {
    if (block_sizes.size() != num_tables) {
        raise(invalid_request_error, "%zu block sizes were given for %zu tables", block_sizes.size(), num_tables);
    }
    for (int64_t size : block_sizes) {
        if (size < 1) raise(invalid_request_error, "block sizes must be at least 1, got %zd", Py_ssize_t{size});
    }
}

void free_tables(Pool& pool, nb::handle tables, const std::vector<int64_t>& block_sizes, nb::handle dead, nb::handle keep) {
    Tables freed(tables);
    std::vector<Range> gone = as_ranges(dead), kept = as_ranges(keep);
    size_t count = freed.lists().size();
    check_sizes(block_sizes, count);
    if (gone.size() != count || kept.size() != count) {
        raise(invalid_request_error, "give one dead and one keep range for each of the %zu tables", count);
    }
    pool.free_tables(freed.lists(), block_sizes, gone, kept);
}

nb::dict index_of(const Pool& pool) {
    nb::dict index;
    std::vector<BlockId> oldest;
    pool.index().for_each_hash([&](BlockId block) { oldest.push_back(block); });
    for (BlockId block : oldest) {
        std::vector<BlockId> copies;
        pool.index().for_each_copy(block, [&](BlockId copy) { copies.push_back(copy); });
        index[nb::make_tuple(nb::bytes(pool.index().digest(block), digest_bytes), pool.group_of(block))] = as_list(copies);
    }
    return index;
}

nb::object reserved_of(const Pool& pool) {
    nb::object set = nb::steal(PyFrozenSet_New(as_list(pool.reserved()).ptr()));
    if (!set.is_valid()) throw nb::python_error();
    return set;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Pool>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
    if (nb::inst_ready(self)) nb::inst_ptr<Pool>(self)->clear_references();
    return 0;
}

PyType_Slot collectable[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)}, {Py_tp_clear, reinterpret_cast<void*>(&clear)}, {0, nullptr}};

void bind_questions(nb::class_<Pool>& pool) {
    pool.def_prop_ro("num_blocks", &Pool::num_blocks)
        .def_prop_ro("eviction_order", [](const Pool& self) { return self.dead_first() ? "dead_first" : "recency"; })
        .def_prop_ro("num_free", &Pool::num_free)
        .def_prop_ro("num_popped", &Pool::num_popped)
        .def_prop_ro("num_reserved", &Pool::num_reserved)
        .def_prop_ro("num_held", &Pool::num_held)
        .def_prop_ro("num_evictions", &Pool::num_evictions)
        .def_prop_ro("generation", &Pool::generation)
        .def_prop_ro("logs_events", &Pool::logs_events)
        .def_prop_ro("usage",
                     [](const Pool& self) {
                         int64_t capacity = self.num_blocks() - 1 - self.num_reserved();
                         return capacity > 0 ? static_cast<double>(capacity - self.num_free()) / static_cast<double>(capacity) : 0.0;
                     })
        .def("ref_count", [](const Pool& self, nb::handle id) { return self.ref_count(self.checked(id)); }, "block_id"_a)
        .def("outside_count", [](const Pool& self, nb::handle id) { return self.outside_count(self.checked(id)); },
             "block_id"_a)
        .def("block_hash",
             [](const Pool& self, nb::handle id) -> nb::object {
                 BlockId block = self.checked(id);
                 if (!self.is_cached(block)) return nb::none();
                 return nb::bytes(self.index().digest(block), digest_bytes);
             },
             "block_id"_a)
        .def("free_queue",
             [](const Pool& self) {
                 std::vector<BlockId> order;
                 self.queue().for_each([&](BlockId block) { order.push_back(block); });
                 return as_list(order);
             })
        .def("index", &index_of)
        .def("reserved_blocks", &reserved_of);
}

void bind_look_ups(nb::class_<Pool>& pool) {
    pool.def("prefix",
             [](const Pool& self, nb::handle groups, nb::handle hashes, int64_t stride, int64_t stop) {
                 std::vector<Group> ids = groups_of(self, groups);
                 return self.prefix(ids, Hashes(hashes, stride), stop);
             },
             "groups"_a, "hashes"_a, "stride"_a, "stop"_a)
        .def("run_start",
             [](const Pool& self, nb::handle groups, nb::handle hashes, int64_t stride, int64_t start, int64_t stop) {
                 std::vector<Group> ids = groups_of(self, groups);
                 return self.run_start(ids, Hashes(hashes, stride), start, stop);
             },
             "groups"_a, "hashes"_a, "stride"_a, "start"_a, "stop"_a)
        .def("lookup",
             [](const Pool& self, int64_t group, nb::handle hashes, int64_t stride, int64_t start, int64_t stop) {
                 return self.lookup(self.checked_group(group), Hashes(hashes, stride), start, stop);
             },
             "group"_a, "hashes"_a, "stride"_a, "start"_a, "stop"_a)
        .def("serves",
             [](const Pool& self, const BlockList& blocks, int64_t group, nb::handle hashes, int64_t stride) {
                 return self.serves_hit(blocks, self.checked_group(group), Hashes(hashes, stride));
             },
             "blocks"_a, "group"_a, "hashes"_a, "stride"_a)
        .def("count_evictable", &Pool::count_evictable, "blocks"_a, "start"_a, "stop"_a)
        .def("count_exclusive", &Pool::count_exclusive, "blocks"_a, "start"_a, "stop"_a)
        .def("num_shared_by", &Pool::num_shared_by, "blocks"_a, "num_holders"_a);
}

void bind_tables(nb::class_<Pool>& pool) {
    nb::object nothing = nb::handle(reinterpret_cast<PyObject*>(&PyRange_Type))(0);
    pool.def("adopt",
             [](Pool& self, BlockList& table, const BlockList& hits, int64_t start, int64_t stop) {
                 told(self, [&] { self.adopt(table, hits, start, stop); });
             },
             "table"_a, "hits"_a, "start"_a, "stop"_a)
        .def("extend",
             [](Pool& self, BlockList& table, int64_t num_blocks, bool note) {
                 told(self, [&] { self.extend(table, num_blocks, note); });
             },
             "table"_a, "num_blocks"_a, "note"_a = false)
        .def("extend_null", &Pool::extend_null, "table"_a, "num_positions"_a)
        .def("move", &Pool::move, "table"_a, "source"_a)
        .def("release",
             [](Pool& self, BlockList& table, int64_t start, int64_t stop, nb::handle keep) {
                 self.release(table, start, stop, as_range(keep));
             },
             "table"_a, "start"_a, "stop"_a, "keep"_a = nothing)
        .def("free_tables", &free_tables, "tables"_a, "block_sizes"_a, "dead"_a, "keep"_a)
        .def("pop_tables",
             [](Pool& self, nb::handle tables, const std::vector<int64_t>& block_sizes) {
                 Tables popped(tables);
                 check_sizes(block_sizes, popped.lists().size());
                 return as_list(self.pop_tables(popped.lists(), block_sizes));
             },
             "tables"_a, "block_sizes"_a)
        .def("commit",
             [](Pool& self, BlockList& table, int64_t group, nb::handle hashes, int64_t stride, int64_t start,
                int64_t stop) {
                 Group id = self.checked_group(group);
                 std::vector<Range> runs;
                 self.commit(table, id, Hashes(hashes, stride), start, stop, runs);
                 return as_python_ranges(runs);
             },
             "table"_a, "group"_a, "hashes"_a, "stride"_a, "start"_a, "stop"_a);
}

void bind_blocks_by_id(nb::class_<Pool>& pool) {
    pool.def("allocate",
             [](Pool& self, int64_t num_blocks) {
                 return as_list(told(self, [&] { return self.allocate(num_blocks); }));
             },
             "num_blocks"_a)
        .def("touch",
             [](Pool& self, nb::handle ids) {
                 std::vector<BlockId> blocks = real_ids(self, ids);
                 told(self, [&] { self.touch(blocks); });
             },
             "block_ids"_a)
        .def("free_blocks", [](Pool& self, nb::handle ids) { self.free_blocks(real_ids(self, ids)); }, "block_ids"_a)
        .def("evict_blocks",
             [](Pool& self, nb::handle ids) {
                 std::vector<BlockId> blocks = as_vector(ids, [&](nb::handle id) { return self.checked(id); });
                 told(self, [&] { self.evict_blocks(blocks); });
             },
             "block_ids"_a)
        .def("reset_prefix_cache", [](Pool& self) { return told(self, [&] { return self.reset_prefix_cache(); }); })
        .def("clear_index", [](Pool& self) { told(self, [&] { self.clear_index(); }); })
        .def("reserve",
             [](Pool& self, int64_t num_blocks) {
                 return as_list(told(self, [&] { return self.reserve(num_blocks); }));
             },
             "num_blocks"_a)
        .def("is_computing", [](const Pool& self, nb::handle id) { return self.is_computing(self.checked(id)); }, "block_id"_a)
        .def("new_step_starts", &Pool::new_step_starts)
        .def("take_new_block_ids", [](Pool& self) { return as_list(self.take_new_block_ids()); })
        .def("log", &Pool::log, "event"_a)
        .def("take_events", &Pool::take_events);
}

}  // namespace

void bind_pool(nb::module_& module) {
    bind_block_list(module);
    nb::class_<Pool> pool(module, "BlockPool", nb::is_final(), nb::type_slots(collectable));
    pool.def(nb::init<int64_t, int64_t, nb::handle, bool, nb::object>(), "num_blocks"_a, "num_groups"_a, nb::kw_only(),
             "eviction_order"_a = "dead_first", "enable_events"_a = false, "residency"_a = nb::none());
    bind_questions(pool);
    bind_look_ups(pool);
    bind_tables(pool);
    bind_blocks_by_id(pool);
}

}  // namespace kvpager
