#include "holdings_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "holdings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpager {

namespace {

// For classes that hold Python objects: how the cycle collector looks into them.
template <typename Class>
struct Collectable {
    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        return nb::inst_ready(self) ? nb::inst_ptr<Class>(self)->traverse(visit, arg) : 0;
    }
    static int clear(PyObject* self) {
        if (nb::inst_ready(self)) nb::inst_ptr<Class>(self)->clear_references();
        return 0;
    }
    inline static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                         {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                         {0, nullptr}};
};

void bind_rule(nb::module_& module) {
    nb::class_<GroupRule>(module, "GroupRule", nb::is_final())
        .def("__init__",
             [](GroupRule* rule, uint16_t group, int64_t block_size, int64_t stride, int64_t lag, int64_t span,
                int64_t release_delay, int64_t alignment, int64_t commit_margin, int64_t hit_margin, int64_t shareable,
                int64_t interval, bool grows, bool keeps_prompt, bool is_state, bool is_align, bool notes_new) {
                 GroupRule made{group,         block_size,    stride,     lag,       span,     release_delay,
                                alignment,     commit_margin, hit_margin, shareable, interval, grows,
                                keeps_prompt,  is_state,      is_align,   notes_new};
                 made.check();
                 new (rule) GroupRule(made);
             },
             nb::kw_only(), "group"_a, "block_size"_a, "stride"_a, "lag"_a, "span"_a, "release_delay"_a, "alignment"_a,
             "commit_margin"_a, "hit_margin"_a, "shareable"_a, "interval"_a, "grows"_a, "keeps_prompt"_a, "is_state"_a,
             "is_align"_a, "notes_new"_a)
        .def("dead", [](const GroupRule& self, int64_t computed, int64_t prompt) { return as_python_range(self.dead(computed, prompt)); },
             "num_computed_tokens"_a, "num_prompt_tokens"_a)
        .def("needed_for_hit", [](const GroupRule& self, int64_t tokens) { return as_python_range(self.needed_for_hit(tokens)); },
             "num_tokens"_a)
        .def("growth",
             [](const GroupRule& self, int64_t length, int64_t tokens, nb::handle dead, bool running) {
                 Growth growth = self.growth(length, tokens, as_range(dead), running);
                 return nb::make_tuple(growth.before, growth.nulls, growth.moved, growth.after);
             },
             "length"_a, "num_tokens"_a, "dead"_a, "running"_a)
        .def("worth_caching",
             [](const GroupRule& self, int64_t start, int64_t stop, int64_t prompt, int64_t junction) {
                 std::vector<Range> parts;
                 self.worth_caching(start, stop, prompt, junction, [&](Range part) { parts.push_back(part); });
                 return as_python_ranges(parts);
             },
             "start"_a, "stop"_a, "num_prompt_tokens"_a, "junction"_a)
        .def("lowest_computed", &GroupRule::lowest_computed, "table"_a, "num_prompt_tokens"_a)
        .def("quiet_until", &GroupRule::quiet_until, "table"_a, "num_prompt_tokens"_a, "commits"_a)
        .def("step_ends", &GroupRule::step_ends, "table"_a, "num_tokens"_a)
        .def("commit",
             [](const GroupRule& self, Pool& pool, BlockList& table, nb::handle hashes, int64_t tokens, int64_t prompt,
                int64_t junction) {
                 pool.checked_group(self.group);
                 std::vector<Range> runs;
                 self.commit(pool, table, Hashes(hashes, self.stride), tokens, prompt, junction, runs);
                 return as_python_ranges(runs);
             },
             "pool"_a, "table"_a, "hashes"_a, "num_tokens"_a, "num_prompt_tokens"_a, "junction"_a);
}

void bind_registry(nb::module_& module) {
    nb::class_<Holding>(module, "Holding", nb::is_final(), nb::type_slots(Collectable<Holding>::slots))
        .def(nb::init<nb::object, nb::handle>(), "request"_a, "tables"_a)
        .def_prop_ro("request", &Holding::request_object)
        .def_rw("junction", &Holding::junction)
        .def_rw("is_stale", &Holding::is_stale)
        .def_rw("commit_limit", &Holding::commit_limit, nb::arg().none())
        .def_rw("load_end", &Holding::load_end)
        .def_rw("lowest", &Holding::lowest)
        .def_rw("quiet_until", &Holding::quiet_until);
    nb::class_<Holdings>(module, "Holdings", nb::is_final(), nb::type_slots(Collectable<Holdings>::slots))
        .def(nb::init<>())
        .def("add", &Holdings::add, "request_id"_a, "holding"_a)
        .def("get", &Holdings::get, "request_id"_a)
        .def("remove", &Holdings::remove, "request_id"_a)
        .def("request_ids", [](const Holdings& self) { return nb::list(self.by_id().keys()); })
        .def("values", [](const Holdings& self) { return nb::list(self.by_id().values()); });
}

void bind_stepper(nb::module_& module) {
    nb::class_<DecodeSlots>(module, "DecodeSlots", nb::is_final())
        .def(nb::init<>())
        .def_rw("refused", &DecodeSlots::refused, nb::arg().none())
        .def("add", nb::overload_cast<int64_t, nb::handle>(&DecodeSlots::add), "index"_a, "lists"_a)
        .def("changed", &DecodeSlots::changed)
        .def("block_ids", &DecodeSlots::block_ids, "index"_a);
    nb::class_<Stepper>(module, "Stepper", nb::is_final(), nb::type_slots(Collectable<Stepper>::slots))
        .def(nb::init<nb::object, nb::object, std::vector<GroupRule>, nb::handle, int64_t, bool, int64_t, nb::object, nb::object,
                      nb::object, nb::object>(),
             "pool"_a, "holdings"_a, "rules"_a, "tables"_a, nb::kw_only(), "max_model_len"_a, "commits"_a,
             "watermark_blocks"_a, "fits_alone"_a, "log_stored"_a, "wrap"_a, "empty"_a)
        .def("admit",
             [](Stepper& self, nb::handle request, nb::handle num_new, nb::handle num_hits, nb::handle hits,
                bool whole, nb::handle lookahead, int64_t reserved, bool scheduled) {
                 return self.admit(request, num_new, num_hits, hits, whole, lookahead, reserved, scheduled);
             },
             "request"_a, "num_new_tokens"_a.none(), "num_hit_tokens"_a.none(), "hits"_a.none(),
             "full_sequence_must_fit"_a, "num_lookahead_tokens"_a.none(), "reserved_blocks"_a, "has_scheduled_reqs"_a)
        .def("step",
             [](Stepper& self, nb::handle request, nb::handle num_new, nb::handle lookahead, int64_t reserved, bool scheduled) {
                 return self.allocate(request, num_new, lookahead, reserved, scheduled);
             },
             "request"_a, "num_new_tokens"_a.none(), "num_lookahead_tokens"_a.none(), "reserved_blocks"_a, "has_scheduled_reqs"_a)
        .def("step_all",
             [](Stepper& self, nb::handle requests, nb::handle counts, nb::handle lookahead, int64_t reserved, bool scheduled,
                int64_t start, DecodeSlots& slots) {
                 return self.step_all(requests, counts, lookahead, reserved, scheduled, start, slots);
             },
             "requests"_a, "num_new_tokens"_a.none(), "num_lookahead_tokens"_a.none(), "reserved_blocks"_a, "has_scheduled_reqs"_a,
             "start"_a, "slots"_a)
        .def("free", &Stepper::free, "request"_a)
        .def("find_bounds", &Stepper::find_bounds, "holding"_a, "num_prompt_tokens"_a);
}

}  // namespace

void bind_holdings(nb::module_& module) {
    bind_rule(module);
    bind_registry(module);
    bind_stepper(module);
}

}  // namespace kvpager
