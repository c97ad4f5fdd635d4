// The requests that hold blocks, and the step that each of them takes again and again.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "attributes.h"
#include "rules.h"

namespace kvpager {

// What a manager remembers of one request while it holds blocks for it.
class Holding {
    const PyObject* key_;  // beside the bounds: one cache line says whether a request is quiet

public:
    int64_t lowest = 0;        // the fewest computed tokens from which it can go on
    int64_t quiet_until = -1;  // the highest token count up to which nothing changes

private:
    std::vector<BlockList*> lists_;

public:
    Holding(nanobind::object request, nanobind::handle tables);

    // Which request it is; just an address.
    const PyObject* request() const { return key_; }
    nanobind::object request_id{};  // under which it is held
    nanobind::object request_object() const { return request_; }
    const std::vector<BlockList*>& tables() const { return lists_; }

    int64_t junction = 0;
    bool is_stale = false;                // its K/V is of weights from before a lazy reset
    std::optional<int64_t> commit_limit;  // tokens beyond it are still being loaded …
    int64_t load_end = 0;                 // … up to here

    int traverse(visitproc visit, void* argument);
    void clear_references();

private:
    nanobind::object request_;
    nanobind::object held_tables_;  // a tuple
};

// Holdings by request id, in order of admission, and by the request itself.
class Holdings {
public:
    Holdings() : slots_(16) {}

    void add(nanobind::object request_id, nanobind::object holding);
    nanobind::object get(nanobind::handle request_id) const;
    void remove(nanobind::handle request_id);
    nanobind::dict by_id() const { return by_id_; }

    // Nothing runs Python code: neither a request's __eq__ nor its __hash__.
    Holding* of(const PyObject* request) const {
        for (size_t slot = home(request); slots_[slot] != nullptr; slot = after(slot)) {
            if (slots_[slot]->request() == request) return slots_[slot];
        }
        return nullptr;
    }

    void prefetch_slot(const PyObject* request) const { prefetch(&slots_[home(request)]); }
    void prefetch_holding(const PyObject* request) const { prefetch(slots_[home(request)]); }

    int traverse(visitproc visit, void* argument);
    void clear_references();

private:
    size_t home(const PyObject* request) const {
        return static_cast<size_t>(reinterpret_cast<uintptr_t>(request) * 0x9e3779b97f4a7c15u >> 20) & (slots_.size() - 1);
    }
    size_t after(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }
    void enter(Holding* holding);
    void leave(Holding* holding);

    nanobind::dict by_id_;
    std::vector<Holding*> slots_;  // open addressing by the request's address, at most half full
    size_t num_entered_ = 0;
};

// What one step asks for beyond the tokens it computes.
struct StepOptions {
    int64_t num_lookahead;
    int64_t num_reserved;     // blocks promised to others
    bool has_scheduled_reqs;  // so the watermark holds for newcomers
};

// The positions that a batch's requests got, and who got none.
class DecodeSlots {
public:
    std::optional<int64_t> refused;

    void add(int64_t index, const std::vector<BlockList*>& tables, const std::vector<int64_t>& from);
    void add(int64_t index, nanobind::handle lists);
    nanobind::list changed() const;
    nanobind::tuple block_ids(int64_t index) const;

private:
    struct Entry {
        int64_t index;
        size_t begin;  // into `ids_`: for each group a count, then the ids
        size_t num_groups;
    };
    std::vector<Entry> entries_;
    std::vector<BlockId> ids_;
};

// Takes the ordinary steps of a request's life: admission, and while it runs, release what is dead, take
// blocks, commit, find the bounds anew. Whatever is out of the ordinary (a load under way, bad counts, an
// admission that might not fit) is left to Python, which does the same with more questions.
class Stepper {
public:
    // `tables`: each group's dict of tables by request id.
    Stepper(nanobind::object pool, nanobind::object holdings, std::vector<GroupRule> rules, nanobind::handle tables,
            int64_t max_model_len, bool commits, int64_t watermark_blocks, nanobind::object fits_alone,
            nanobind::object log_stored, nanobind::object wrap, nanobind::object empty);

    // A newcomer. The positions appended for new tokens, wrapped; None: refused; NotImplemented: not ours.
    nanobind::object admit(nanobind::handle request, nanobind::handle num_new, nanobind::handle num_hits,
                           nanobind::handle hits, bool full_sequence_must_fit, nanobind::handle num_lookahead,
                           int64_t num_reserved, bool has_scheduled_reqs);

    // One step. The positions appended, wrapped; None: refused; NotImplemented: not ours.
    nanobind::object allocate(nanobind::handle request, nanobind::handle num_new, nanobind::handle num_lookahead,
                              int64_t num_reserved, bool has_scheduled_reqs);

    // Steps requests [start, …) until one is refused or not ours; gives its index, or their number.
    int64_t step_all(nanobind::handle requests, nanobind::handle counts, nanobind::handle num_lookahead,
                     int64_t num_reserved, bool has_scheduled_reqs, int64_t start, DecodeSlots& slots);

    // Gives back all that a request holds; one that holds nothing: no-op.
    void free(nanobind::handle request);

    void find_bounds(Holding& holding, int64_t num_prompt_tokens) const;

    int traverse(visitproc visit, void* argument);
    void clear_references();

private:
    enum class Outcome { quiet, stepped, refused, not_ours };
    struct Facts;
    struct Newcomer;
    class Batch;

    Outcome step(PyObject* request, int64_t num_new, const StepOptions& options);
    // The free blocks that a step must leave, whoever takes it.
    int64_t most_to_keep(const StepOptions& options) const {
        return options.num_reserved + (options.has_scheduled_reqs ? watermark_blocks_ : 0);
    }
    bool is_quiet(const Holding& holding, int64_t computed, int64_t num_new, const StepOptions& options) const;
    bool read_in_flight_and_prompt(PyObject* request, Facts& facts);
    bool read(PyObject* request, const StepOptions& options, Facts& facts);
    Outcome act(Holding& holding, int64_t num_new, const StepOptions& options, const Facts& facts);
    bool can_go_on(const Holding& holding, int64_t computed) const;
    bool read_hits(nanobind::handle blocks, Newcomer& newcomer);
    bool is_whole_hit(const Newcomer& newcomer, int64_t num_tokens) const;
    bool surely_fits(const Newcomer& newcomer, int64_t num_main, int64_t num_slots) const;
    void enter(const Newcomer& newcomer);
    int64_t plan(const Holding& holding, const Facts& facts, int64_t num_main, int64_t num_slots);
    void take(Holding& holding, const Facts& facts, int64_t num_main);
    void prefetch_step(const Holding& holding, const Facts& facts, int64_t num_tokens) const;
    void check_hashes(size_t group, int64_t num_committed, const Facts& facts, int64_t num_tokens) const;
    void commit(Holding& holding, const Facts& facts, int64_t num_tokens);
    nanobind::object appended(const Holding& holding) const;
    nanobind::object answer_for(const Holding& holding, nanobind::handle request);
    void tell(nanobind::handle request);

    nanobind::object pool_object_, holdings_object_, fits_alone_, log_stored_, wrap_, empty_;
    Pool* pool_;
    Holdings* holdings_;
    std::vector<GroupRule> rules_;
    std::vector<nanobind::dict> tables_;
    std::vector<int64_t> block_sizes_;
    int64_t hit_margin_ = 0, alignment_ = 1;  // of the whole cache
    int64_t max_model_len_;
    bool commits_;
    int64_t watermark_blocks_;
    Attribute request_id_{"request_id"};
    Attribute num_computed_tokens_{"num_computed_tokens"};
    Attribute num_in_flight_tokens_{"num_in_flight_tokens"};
    Attribute num_prompt_tokens_{"num_prompt_tokens"};
    Attribute num_tokens_{"num_tokens"};
    Attribute block_hashes_{"block_hashes"};
    Attribute status_{"status"};
    Attribute name_{"name"};  // of the status
    Attribute hits_pool_{"_pool"}, hits_generation_{"_generation"}, hits_lists_{"_lists"}, hits_junction_{"junction"};
    // Scratch of the step under way.
    std::vector<int64_t> lengths_;  // of the tables, before they grow
    std::vector<Growth> growths_;
    std::vector<Range> runs_, dead_, useful_;
    std::vector<std::pair<size_t, Range>> stored_;
};

}  // namespace kvpager
