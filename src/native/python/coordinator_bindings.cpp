#include "coordinator_bindings.h"

#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpager {

namespace {

Content content_of(nb::handle name) {
    constexpr const char* names[] = {"tokens", "encoder_tokens", "last_state", "every_state", "step_states"};
    for (size_t i = 0; PyUnicode_Check(name.ptr()) && i < std::size(names); ++i) {
        if (PyUnicode_CompareWithASCIIString(name.ptr(), names[i]) == 0) return static_cast<Content>(i);
    }
    raise(config_error,
          "content must be 'tokens', 'encoder_tokens', 'last_state', 'every_state' or 'step_states', got %R", name.ptr());
}

// A number of a kind or a group; None: there is no bound.
int64_t number(nb::handle value, const char* name) { return int_argument(value, name, 0, config_error); }
int64_t bound(nb::handle value, const char* name) { return value.is_none() ? unbounded : number(value, name); }

void bind_kind(nb::module_& module) {
    nb::class_<AttentionKind>(module, "AttentionKind", nb::is_final())
        .def("__init__",
             [](AttentionKind* kind, nb::handle content, nb::handle block_size, nb::handle lag, nb::handle span,
                nb::handle speculative, bool keeps_prompt, bool needs_whole_prefix) {
                 AttentionKind made{content_of(content), number(block_size, "block_size"), bound(lag, "lag"),
                                    number(span, "span"), number(speculative, "num_speculative_states"), keeps_prompt,
                                    needs_whole_prefix};
                 made.check();
                 new (kind) AttentionKind(made);
             },
             nb::kw_only(), "content"_a, "block_size"_a, "lag"_a.none(), "span"_a, "num_speculative_states"_a,
             "keeps_prompt"_a, "needs_whole_prefix"_a)
        .def("dead",
             [](const AttentionKind& self, nb::handle computed, nb::handle prompt) {
                 return as_python_range(self.dead(int_argument(computed, "num_computed_tokens", -max_count),
                                                  int_argument(prompt, "num_prompt_tokens", 0)));
             },
             "num_computed_tokens"_a, "num_prompt_tokens"_a)
        .def("needed_for_hit",
             [](const AttentionKind& self, nb::handle tokens) {
                 return as_python_range(self.needed_for_hit(int_argument(tokens, "num_tokens", 0)));
             },
             "num_tokens"_a)
        .def("num_positions",
             [](const AttentionKind& self, nb::handle slots, nb::handle encoder) {
                 return self.num_positions(int_argument(slots, "num_slots", 0),
                                           int_argument(encoder, "num_encoder_tokens", 0));
             },
             "num_slots"_a, "num_encoder_tokens"_a)
        .def("num_slots",
             [](const AttentionKind& self, nb::handle positions) {
                 return self.num_slots(int_argument(positions, "num_positions", 0));
             },
             "num_positions"_a)
        .def("step_starts_to_check",
             [](const AttentionKind& self, nb::handle first, nb::handle last, nb::handle prompt) {
                 std::vector<int64_t> starts;
                 self.step_starts_to_check(int_argument(first, "first", 0), int_argument(last, "last", 0),
                                           int_argument(prompt, "num_prompt_tokens", 0),
                                           [&](int64_t start) { starts.push_back(start); });
                 return as_list(starts);
             },
             "first"_a, "last"_a, "num_prompt_tokens"_a)
        .def("most_held",
             [](const AttentionKind& self, nb::handle slots, nb::handle step, nb::handle prompt, nb::handle encoder) {
                 return self.most_held(int_argument(slots, "num_slots", 0), int_argument(step, "max_step", 1),
                                       int_argument(prompt, "num_prompt_tokens", 0),
                                       int_argument(encoder, "num_encoder_tokens", 0));
             },
             "num_slots"_a, "max_step"_a, "num_prompt_tokens"_a, "num_encoder_tokens"_a);
}

void bind_group(nb::module_& module) {
    using Group = SingleTypeKVCacheManager;
    nb::class_<Group>(module, "SingleTypeKVCacheManager", nb::is_final())
        .def("__init__",
             [](Group* group, const AttentionKind& kind, uint16_t id, nb::handle hashes_per_block, nb::handle alignment,
                nb::handle commit_lookahead, nb::handle draft_lookahead, nb::handle shareable, nb::handle interval,
                bool zeroes_new) {
                 std::optional<int64_t> between;
                 if (!interval.is_none()) between = number(interval, "interval");
                 new (group) Group(kind, {.group_id = id,
                                          .hashes_per_block = number(hashes_per_block, "hashes_per_block"),
                                          .alignment = number(alignment, "alignment"),
                                          .commit_lookahead = number(commit_lookahead, "commit_lookahead"),
                                          .draft_lookahead = number(draft_lookahead, "draft_lookahead"),
                                          .shareable_decoded = bound(shareable, "shareable_decoded"),
                                          .interval = between,
                                          .zeroes_new = zeroes_new});
             },
             "kind"_a, nb::kw_only(), "group_id"_a, "hashes_per_block"_a, "alignment"_a, "commit_lookahead"_a,
             "draft_lookahead"_a, "shareable_decoded"_a.none(), "interval"_a.none(), "zeroes_new"_a)
        .def_prop_ro("group_id", [](const Group& self) { return self.id(); })
        .def_prop_ro("block_size", [](const Group& self) { return self.kind.block_size; })
        .def_prop_ro("hashes_per_block", [](const Group& self) { return self.options.hashes_per_block; })
        .def_prop_ro("draft_lookahead", [](const Group& self) { return self.options.draft_lookahead; })
        .def("needed_for_hit",
             [](const Group& self, nb::handle tokens) {
                 return as_python_range(self.needed_for_hit(int_argument(tokens, "num_tokens", 0)));
             },
             "num_tokens"_a);
}

void bind_decode_slots(nb::module_& module) {
    nb::class_<DecodeSlots>(module, "DecodeSlots", nb::is_final())
        .def(nb::init<>())
        .def_rw("refused", &DecodeSlots::refused, nb::arg().none())
        .def("add",
             [](DecodeSlots& self, int64_t index, nb::handle lists) {
                 std::vector<std::span<const BlockId>> appended;
                 BlockLists added(lists);
                 for (const BlockIds* ids : added.ids()) appended.emplace_back(*ids);
                 self.add(index, appended);
             },
             "index"_a, "lists"_a)
        .def("changed", &DecodeSlots::changed)
        .def("block_ids", &DecodeSlots::block_ids, "index"_a);
}

nb::list tables_of(const CoordinatorObject& self, nb::handle request_id) {
    std::vector<BlockIds> tables;
    if (const LiveRequest* live = self.find(request_id)) {
        for (const Table& table : live->tables) tables.push_back(table.ids);
    }
    return list_of(tables, [](const BlockIds& ids) { return nb::cast(BlockList{ids}); });
}

nb::list committed_of(const CoordinatorObject& self, nb::handle request_id) {
    const LiveRequest* live = self.find(request_id);
    if (live == nullptr) return nb::list();
    return list_of(live->tables, [](const Table& table) { return nb::int_(table.num_committed); });
}

// The plan of a request that may be live, as connectors ask for it.
nb::list plan(const CoordinatorObject& self, nb::handle request_id, nb::handle lists, nb::handle num_computed,
              nb::handle num_main, nb::handle num_slots, nb::handle num_encoder, bool on_the_way) {
    BlockLists hits(lists);
    int64_t computed = int_argument(num_computed, "num_computed_tokens", 0);
    int64_t slots = int_argument(num_slots, "num_slots", 1);
    TokenRanges tokens{.num_local = computed,
                       .num_computed = computed,
                       .num_start = std::min(computed, slots - 1),
                       .num_main = int_argument(num_main, "num_main_tokens", 0),
                       .num_slots = slots,
                       .num_prompt_tokens = slots,
                       .num_encoder_tokens = int_argument(num_encoder, "num_encoder_tokens", 0)};
    Hit hit{.blocks = {hits.ids().begin(), hits.ids().end()}};
    if (!hit.blocks.empty() && hit.blocks.size() != self.core().groups().size()) {
        raise(invalid_request_error, "a hit of %zu groups was given for %zu groups", hit.blocks.size(),
              self.core().groups().size());
    }
    const LiveRequest* live = self.find(request_id);
    return as_list(on_the_way ? self.core().plan_sequence(live, hit, tokens, 0) : self.core().plan(live, hit, tokens));
}

bool length_fits(const CoordinatorObject& self, nb::handle num_tokens, nb::handle num_prompt, nb::handle num_lookahead,
                 nb::handle num_encoder) {
    return self.core().length_fits(int_argument(num_tokens, "num_tokens", 0),
                                   int_argument(num_prompt, "num_prompt_tokens", 0),
                                   int_argument(num_lookahead, "num_lookahead_tokens", 0),
                                   int_argument(num_encoder, "num_encoder_tokens", 0));
}

int64_t longest_that_fits(const CoordinatorObject& self, nb::handle num_lookahead, nb::handle num_encoder) {
    return self.core().longest_that_fits(int_argument(num_lookahead, "num_lookahead_tokens", 0),
                                         int_argument(num_encoder, "num_encoder_tokens", 0));
}

}  // namespace

void bind_coordinator(nb::module_& module) {
    using Object = CoordinatorObject;
    bind_kind(module);
    bind_group(module);
    bind_decode_slots(module);
    nb::class_<Object>(module, "KVCacheCoordinator", nb::is_final(), nb::type_slots(Collectable<Object>::slots))
        .def(nb::init<nb::object, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle, bool, bool, bool>(),
             "pool"_a, "groups"_a, nb::kw_only(), "hash_block_size"_a, "max_model_len"_a, "max_num_batched_tokens"_a,
             "watermark_blocks"_a, "can_hit"_a, "trusts_max_tokens"_a, "records_admissions"_a)
        .def("match", &Object::match, "request"_a)
        .def("match_each", &Object::match_each, "hashes"_a, "max_tokens"_a)
        .def("is_live", [](const Object& self, nb::handle request) { return self.core().find(request.ptr()) != nullptr; },
             "request"_a)
        .def("fits_alone", &Object::fits_alone, "request"_a, "num_lookahead_tokens"_a, "num_encoder_tokens"_a)
        .def("length_fits", &length_fits, "num_tokens"_a, "num_prompt_tokens"_a, "num_lookahead_tokens"_a,
             "num_encoder_tokens"_a)
        .def("longest_that_fits", &longest_that_fits, "num_lookahead_tokens"_a, "num_encoder_tokens"_a)
        .def("can_continue", &Object::can_continue, "request"_a)
        .def("check_fit",
             [](Object& self, nb::handle request, nb::handle hit, nb::handle version, nb::handle branch,
                nb::handle new_tokens, nb::handle hit_tokens, nb::handle lookahead, nb::handle external, nb::handle encoder,
                nb::handle full, nb::handle reserved, nb::handle scheduled) {
                 return self.check_fit(request, hit, version, branch,
                                       {new_tokens, hit_tokens, lookahead, external, encoder, Py_False, full, reserved,
                                        scheduled});
             },
             "request"_a, "hit"_a.none(), "generation"_a, "junction"_a, "num_new_tokens"_a.none(),
             "num_hit_tokens"_a.none(), "num_lookahead_tokens"_a.none(), "num_external_tokens"_a.none(),
             "num_encoder_tokens"_a.none(), "full_sequence_must_fit"_a.none(), "reserved_blocks"_a.none(),
             "has_scheduled_reqs"_a.none())
        .def("allocate",
             [](Object& self, nb::handle request, nb::handle hit, nb::handle version, nb::handle branch,
                nb::handle new_tokens, nb::handle hit_tokens, nb::handle lookahead, nb::handle external,
                nb::handle delays, nb::handle encoder, nb::handle full, nb::handle reserved, nb::handle scheduled) {
                 return self.allocate(request, hit, version, branch,
                                      {new_tokens, hit_tokens, lookahead, external, encoder, delays, full, reserved,
                                       scheduled});
             },
             "request"_a, "hit"_a.none(), "generation"_a, "junction"_a, "num_new_tokens"_a.none(),
             "num_hit_tokens"_a.none(), "num_lookahead_tokens"_a.none(), "num_external_tokens"_a.none(),
             "delay_cache_blocks"_a.none(), "num_encoder_tokens"_a.none(), "full_sequence_must_fit"_a.none(),
             "reserved_blocks"_a.none(), "has_scheduled_reqs"_a.none())
        .def("allocate_all", &Object::allocate_all, "requests"_a, "num_new_tokens"_a.none(),
             "num_lookahead_tokens"_a.none(), "reserved_blocks"_a.none(), "has_scheduled_reqs"_a.none(), "start"_a, "slots"_a)
        .def("tokens_to_commit",
             [](Object& self, nb::handle request, nb::handle new_tokens, nb::handle hit_tokens, nb::handle lookahead,
                nb::handle external, nb::handle delays) {
                 nb::int_ zero(0);
                 return self.tokens_to_commit(
                     request, {new_tokens, hit_tokens, lookahead, external, zero, delays, Py_False, zero, Py_False});
             },
             "request"_a, "num_new_tokens"_a.none(), "num_hit_tokens"_a.none(), "num_lookahead_tokens"_a.none(),
             "num_external_tokens"_a.none(), "delay_cache_blocks"_a.none())
        .def("tokens_to_cache", &Object::tokens_to_cache, "request"_a, "num_computed_tokens"_a.none())
        .def("cache_blocks", &Object::cache_blocks, "request"_a, "num_computed_tokens"_a.none())
        .def("step_ends", &Object::step_ends, "request"_a, "num_tokens"_a.none())
        .def("release", &Object::release, "request_id"_a, "num_processed_tokens"_a.none(), "num_prompt_tokens"_a.none())
        .def("free", &Object::free, "request"_a)
        .def("pop", &Object::pop, "request"_a)
        .def("invalidate", &Object::invalidate, "block_ids"_a)
        .def("clear_index", &Object::clear_index)
        .def("plan", &plan, "request_id"_a, "hits"_a, nb::kw_only(), "num_computed_tokens"_a, "num_main_tokens"_a,
             "num_slots"_a, "num_encoder_tokens"_a, "on_the_way"_a)
        .def("tables", &tables_of, "request_id"_a)
        .def("num_committed_blocks", &committed_of, "request_id"_a)
        .def("request_ids", &Object::request_ids)
        .def("live_requests", &Object::live_requests);
}

}  // namespace kvpager
