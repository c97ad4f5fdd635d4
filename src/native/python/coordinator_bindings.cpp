#include "coordinator_bindings.h"

#include <nanobind/stl/optional.h>

#include "decode_batch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpager {

namespace {

Content content_of(nb::handle name) {
    constexpr const char* names[] = {"tokens", "encoder_tokens", "last_state", "every_state", "step_states"};
    for (size_t i = 0; PyUnicode_Check(name.ptr()) && i < std::size(names); ++i) {
        if (PyUnicode_CompareWithASCIIString(name.ptr(), names[i]) == 0) return static_cast<Content>(i);
    }
    raise(ErrorKind::config,
          "content must be 'tokens', 'encoder_tokens', 'last_state', 'every_state' or 'step_states', got %R",
          name.ptr());
}

// Numbers of a configuration, and of a call.
int64_t number(nb::handle value, const char* name) { return int_argument(value, name, 0, ErrorKind::config); }
int64_t bound(nb::handle value, const char* name) { return value.is_none() ? unbounded : number(value, name); }
int64_t count(nb::handle value, const char* name) { return int_argument(value, name, 0); }

bool is_true(nb::handle value) {
    int truth = PyObject_IsTrue(value.ptr());
    if (truth < 0) throw nb::python_error();
    return truth != 0;
}

template <typename Value>
using Handle = nb::handle;

// A method of a kind whose arguments are counts of these names, the first one of at least `first_at_least`.
template <int64_t first_at_least = 0, typename Answer, typename... Counts, typename... Names>
auto question(Answer (AttentionKind::*method)(Counts...) const, Names... names) {
    return [=](const AttentionKind& self, Handle<Counts>... values) -> nb::object {
        int64_t at_least = first_at_least;
        auto next = [&](nb::handle value, const char* name) {
            return int_argument(value, name, std::exchange(at_least, 0));
        };
        std::tuple<Counts...> counts{next(values, names)...};  // in this order
        Answer answer = std::apply([&](auto... given) { return (self.*method)(given...); }, counts);
        if constexpr (std::is_same_v<Answer, Range>)
            return as_python_range(answer);
        else
            return nb::int_(answer);
    };
}

void bind_kind(nb::module_& module) {
    using Kind = AttentionKind;
    nb::class_<Kind>(module, "AttentionKind", nb::is_final())
        .def(
            "__init__",
            [](Kind* kind, nb::handle content, nb::handle block_size, nb::handle lag, nb::handle span,
               nb::handle speculative, bool keeps_prompt, bool needs_whole_prefix) {
                Kind made{content_of(content),
                          number(block_size, "block_size"),
                          bound(lag, "lag"),
                          number(span, "span"),
                          number(speculative, "num_speculative_states"),
                          keeps_prompt,
                          needs_whole_prefix};
                made.check();
                new (kind) Kind(made);
            },
            nb::kw_only(), "content"_a, "block_size"_a, "lag"_a.none(), "span"_a, "num_speculative_states"_a,
            "keeps_prompt"_a, "needs_whole_prefix"_a)
        .def("dead", question<-max_count>(&Kind::dead, "num_computed_tokens", "num_prompt_tokens"),
             "num_computed_tokens"_a, "num_prompt_tokens"_a)
        .def("needed_for_hit", question(&Kind::needed_for_hit, "num_tokens"), "num_tokens"_a)
        .def("num_positions", question(&Kind::num_positions, "num_slots", "num_encoder_tokens"), "num_slots"_a,
             "num_encoder_tokens"_a)
        .def("num_slots", question(&Kind::num_slots, "num_positions"), "num_positions"_a)
        .def("most_held",
             question(&Kind::most_held, "num_slots", "max_step", "num_prompt_tokens", "num_encoder_tokens"),
             "num_slots"_a, "max_step"_a, "num_prompt_tokens"_a, "num_encoder_tokens"_a)
        .def(
            "step_starts_to_check",
            [](const Kind& self, nb::handle first, nb::handle last, nb::handle prompt) {
                std::vector<int64_t> starts;
                self.step_starts_to_check(count(first, "first"), count(last, "last"),
                                          count(prompt, "num_prompt_tokens"),
                                          [&](int64_t start) { starts.push_back(start); });
                return as_list(starts);
            },
            "first"_a, "last"_a, "num_prompt_tokens"_a);
}

void bind_group(nb::module_& module) {
    using Group = SingleTypeKVCacheManager;
    nb::class_<Group>(module, "SingleTypeKVCacheManager", nb::is_final())
        .def(
            "__init__",
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
        .def_prop_ro("group_id", &Group::id)
        .def_prop_ro("block_size", [](const Group& self) { return self.kind.block_size; })
        .def_prop_ro("draft_lookahead", [](const Group& self) { return self.options.draft_lookahead; });
}

// Block lists, one a group, as the core takes a hit; `held` keeps them. (): there is no hit.
Hit hit_of(const CoordinatorObject& self, nb::handle lists, nb::handle index_version, nb::handle branch_point,
           nb::object& held) {
    held = as_tuple(lists);
    if (nb::len(held) == 0) return {};
    Hit hit{.blocks = as_vector(held, [](nb::handle list) -> const BlockIds* { return &as<BlockList>(list).ids; }),
            .index_version = int_argument(index_version, "generation", -1),
            .branch_point = count(branch_point, "junction")};
    size_t num_groups = self.core().groups().size();
    if (hit.blocks.size() != num_groups) {
        raise(ErrorKind::invalid_request, "a hit of %zu groups was given for %zu groups", hit.blocks.size(),
              num_groups);
    }
    bool has_any = false;
    for (const BlockIds* ids : hit.blocks) {
        for (BlockId id : *ids) self.check_id(id);
        has_any |= !ids->empty();
    }
    if (!has_any) hit.blocks.clear();
    return hit;
}

// A call of allocate_slots or probe: reads its arguments, then `serve`s it.
template <typename Serve>
auto with_demand(Serve serve) {
    return [serve](CoordinatorObject& self, nb::handle request, nb::handle lists, nb::handle version, nb::handle branch,
                   nb::handle num_new, nb::handle num_hit, nb::handle lookahead, nb::handle external, nb::handle delays,
                   nb::handle encoder, nb::handle full, nb::handle reserved, nb::handle scheduled) {
        Demand demand{.num_new_tokens = count(num_new, "num_new_tokens"),
                      .num_hit_tokens = count(num_hit, "num_new_computed_tokens"),
                      .num_lookahead_tokens = count(lookahead, "num_lookahead_tokens"),
                      .num_external_tokens = count(external, "num_external_computed_tokens"),
                      .num_encoder_tokens = count(encoder, "num_encoder_tokens"),
                      .delays_commit = is_true(delays),
                      .full_sequence_must_fit = is_true(full),
                      .reserved_blocks = count(reserved, "reserved_blocks"),
                      .has_scheduled_requests = is_true(scheduled)};
        check_something_to_do(demand);
        nb::object held;
        return serve(self, request, demand, hit_of(self, lists, version, branch, held));
    };
}

template <typename Serve>
void def_with_demand(nb::class_<CoordinatorObject>& cls, const char* name, Serve serve) {
    cls.def(name, with_demand(serve), "request"_a, "hit"_a, "generation"_a, "junction"_a, "num_new_tokens"_a.none(),
            "num_hit_tokens"_a.none(), "num_lookahead_tokens"_a.none(), "num_external_tokens"_a.none(),
            "delay_cache_blocks"_a.none(), "num_encoder_tokens"_a.none(), "full_sequence_must_fit"_a.none(),
            "reserved_blocks"_a.none(), "has_scheduled_reqs"_a.none());
}

bool is_no_op(CoordinatorObject& self, nb::handle request, nb::handle num_new, nb::handle lookahead,
              nb::handle reserved, nb::handle scheduled) {
    Demand demand{.num_new_tokens = count(num_new, "num_new_tokens"),
                  .num_lookahead_tokens = count(lookahead, "num_lookahead_tokens"),
                  .reserved_blocks = count(reserved, "reserved_blocks"),
                  .has_scheduled_requests = is_true(scheduled)};
    check_something_to_do(demand);
    return self.is_no_op(request.ptr(), demand);
}

int64_t allocate_all(CoordinatorObject& self, nb::handle requests, nb::handle counts, nb::handle lookahead,
                     nb::handle reserved, nb::handle scheduled, int64_t start, DecodeSlots& slots) {
    nb::tuple batch = as_tuple(requests);
    nb::object given = counts.is_none() ? nb::none() : nb::object(as_tuple(counts));
    if (!given.is_none() && nb::len(given) != nb::len(batch)) {
        raise(ErrorKind::invalid_request, "%zu numbers of new tokens were given for %zu requests; give one each",
              nb::len(given), nb::len(batch));
    }
    Demand demand{.num_lookahead_tokens = count(lookahead, "num_lookahead_tokens"),
                  .reserved_blocks = count(reserved, "reserved_blocks"),
                  .has_scheduled_requests = is_true(scheduled)};
    return DecodeBatch(self, batch.ptr(), given.ptr(), demand, slots).run(std::max<int64_t>(start, 0));
}

// The plan of a request that may be live, as connectors ask for it.
nb::list plan(const CoordinatorObject& self, nb::handle request_id, nb::handle lists, nb::handle num_computed,
              nb::handle num_main, nb::handle num_slots, nb::handle num_encoder, bool on_the_way) {
    int64_t computed = count(num_computed, "num_computed_tokens"), slots = int_argument(num_slots, "num_slots", 1);
    TokenRanges tokens{.num_local = computed,
                       .num_computed = computed,
                       .num_start = std::min(computed, slots - 1),
                       .num_main = count(num_main, "num_main_tokens"),
                       .num_slots = slots,
                       .num_prompt_tokens = slots,
                       .num_encoder_tokens = count(num_encoder, "num_encoder_tokens")};
    nb::object held;
    Hit hit = hit_of(self, lists, nb::int_(-1), nb::int_(0), held);
    const LiveRequest* live = self.find(request_id);
    return as_list(on_the_way ? self.core().plan_sequence(live, hit, tokens, 0) : self.core().plan(live, hit, tokens));
}

// Something of each table of a request; [] if it is not live.
template <typename Read>
auto of_tables(Read read) {
    return [read](const CoordinatorObject& self, nb::handle request_id) {
        const LiveRequest* live = self.find(request_id);
        return live == nullptr ? nb::list() : list_of(live->tables, read);
    };
}

void bind_decode_slots(nb::module_& module) {
    nb::class_<DecodeSlots>(module, "DecodeSlots", nb::is_final())
        .def(nb::init<>())
        .def_rw("refused", &DecodeSlots::refused, nb::arg().none())
        .def(
            "add",
            [](DecodeSlots& self, int64_t index, nb::handle lists) {
                nb::tuple held = as_tuple(lists);
                self.add(index, as_vector(held, [](nb::handle list) {
                             return std::span<const BlockId>(as<BlockList>(list).ids);
                         }));
            },
            "index"_a, "lists"_a)
        .def("changed", &DecodeSlots::changed)
        .def("block_ids", &DecodeSlots::block_ids, "index"_a);
}

void bind_questions(nb::class_<CoordinatorObject>& cls) {
    using Object = CoordinatorObject;
    cls.def("match", &Object::match, "request"_a)
        .def("match_each", &Object::match_each, "hashes"_a, "max_tokens"_a)
        .def(
            "is_live",
            [](const Object& self, nb::handle request) { return self.core().find(request.ptr()) != nullptr; },
            "request"_a)
        .def("fits_alone", &Object::fits_alone, "request"_a, "num_lookahead_tokens"_a, "num_encoder_tokens"_a)
        .def(
            "length_fits",
            [](const Object& self, nb::handle tokens, nb::handle prompt, nb::handle lookahead, nb::handle encoder) {
                return self.core().length_fits(count(tokens, "num_tokens"), count(prompt, "num_prompt_tokens"),
                                               count(lookahead, "num_lookahead_tokens"),
                                               count(encoder, "num_encoder_tokens"));
            },
            "num_tokens"_a, "num_prompt_tokens"_a, "num_lookahead_tokens"_a, "num_encoder_tokens"_a)
        .def(
            "longest_that_fits",
            [](const Object& self, nb::handle lookahead, nb::handle encoder) {
                return self.core().longest_that_fits(count(lookahead, "num_lookahead_tokens"),
                                                     count(encoder, "num_encoder_tokens"));
            },
            "num_lookahead_tokens"_a, "num_encoder_tokens"_a)
        .def("can_continue", &Object::can_continue, "request"_a)
        .def("tokens_to_commit", &Object::tokens_to_commit, "request"_a, "num_hit_tokens"_a.none(),
             "num_external_tokens"_a.none(), "num_new_tokens"_a.none())
        .def("tokens_to_cache", &Object::tokens_to_cache, "request"_a, "num_computed_tokens"_a.none())
        .def("plan", &plan, "request_id"_a, "hits"_a, nb::kw_only(), "num_computed_tokens"_a, "num_main_tokens"_a,
             "num_slots"_a, "num_encoder_tokens"_a, "on_the_way"_a)
        .def("tables", of_tables([](const Table& table) { return nb::cast(BlockList{table.ids}); }), "request_id"_a)
        .def("num_committed_blocks", of_tables([](const Table& table) { return nb::int_(table.num_committed); }),
             "request_id"_a)
        .def(
            "num_shared_blocks",
            [](const Object& self, nb::handle request_id) {
                auto num_shared = [&](const Table& table) { return nb::int_(self.core().num_shared_blocks(table)); };
                return of_tables(num_shared)(self, request_id);
            },
            "request_id"_a)
        .def("request_ids", [](const Object& self) { return nb::list(self.by_id().keys()); })
        .def("live_requests", [](const Object& self) { return nb::list(self.by_id().values()); });
}

}  // namespace

void bind_coordinator(nb::module_& module) {
    using Object = CoordinatorObject;
    bind_kind(module);
    bind_group(module);
    bind_decode_slots(module);
    nb::class_<Object> cls(module, "KVCacheCoordinator", nb::is_final(), nb::type_slots(Collectable<Object>::slots));
    cls.def(
        "__init__",
        [](Object* object, nb::object pool, nb::handle groups, nb::handle hash_block_size, nb::handle max_model_len,
           nb::handle max_step, nb::handle watermark, bool can_hit, bool trusts_max_tokens, bool records_admissions) {
            KVCacheCoordinator::Options options{
                .hash_block_size = int_argument(hash_block_size, "hash_block_size", 1, ErrorKind::config),
                .max_model_len = int_argument(max_model_len, "max_model_len", 1, ErrorKind::config),
                .max_num_batched_tokens = int_argument(max_step, "max_num_batched_tokens", 1, ErrorKind::config),
                .watermark_blocks = number(watermark, "watermark_blocks"),
                .can_hit = can_hit};
            new (object) Object(std::move(pool), groups, options, trusts_max_tokens, records_admissions);
        },
        "pool"_a, "groups"_a, nb::kw_only(), "hash_block_size"_a, "max_model_len"_a, "max_num_batched_tokens"_a,
        "watermark_blocks"_a, "can_hit"_a, "trusts_max_tokens"_a, "records_admissions"_a);
    bind_questions(cls);
    def_with_demand(cls, "check_fit", [](Object& self, nb::handle request, const Demand& demand, const Hit& hit) {
        return self.check_fit(request, demand, hit);
    });
    def_with_demand(cls, "allocate", [](Object& self, nb::handle request, const Demand& demand, const Hit& hit) {
        return self.allocate(request, demand, hit);
    });
    cls.def("is_no_op", &is_no_op, "request"_a, "num_new_tokens"_a.none(), "num_lookahead_tokens"_a.none(),
            "reserved_blocks"_a.none(), "has_scheduled_reqs"_a.none());
    cls.def("allocate_all", &allocate_all, "requests"_a, "num_new_tokens"_a.none(), "num_lookahead_tokens"_a.none(),
            "reserved_blocks"_a.none(), "has_scheduled_reqs"_a.none(), "start"_a, "slots"_a)
        .def("cache_blocks", &Object::cache_blocks, "request"_a, "num_computed_tokens"_a.none())
        .def("step_ends", &Object::step_ends, "request"_a, "num_tokens"_a.none())
        .def("release", &Object::release, "request_id"_a, "num_processed_tokens"_a.none(), "num_prompt_tokens"_a.none())
        .def("free", &Object::free, "request"_a)
        .def("pop", &Object::pop, "request"_a)
        .def("invalidate", &Object::invalidate, "block_ids"_a)
        .def("clear_index", &Object::clear_index);
}

}  // namespace kvpager
