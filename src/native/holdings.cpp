#include "holdings.h"

#include <array>
#include <utility>

#include <nanobind/stl/vector.h>

#include "arguments.h"

namespace nb = nanobind;

namespace kvpager {

// -- holdings -----------------------------------------------------------------------------------

Holding::Holding(nb::object request, nb::handle tables)
    : key_(request.ptr()), request_(std::move(request)), held_tables_(as_tuple(tables)) {
    for (nb::handle table : nb::borrow<nb::tuple>(held_tables_)) lists_.push_back(&as<BlockList>(table));
}

int Holding::traverse(visitproc visit, void* arg) {
    Py_VISIT(request_id.ptr());
    Py_VISIT(request_.ptr());
    Py_VISIT(held_tables_.ptr());
    return 0;
}

// Whoever clears a cycle leaves nothing behind that could still be stepped.
void Holding::clear_references() {
    quiet_until = -1;
    lists_.clear();
    nb::object tables = std::exchange(held_tables_, nb::none());
    nb::object request = std::exchange(request_, nb::none());
}

void Holdings::add(nb::object request_id, nb::object holding) {
    Holding& added = as<Holding>(holding);
    if (by_id_.contains(request_id)) raise(invalid_request_error, "request %R holds blocks already", request_id.ptr());
    if (of(added.request()) != nullptr) raise(invalid_request_error, "request %R holds blocks under another id", request_id.ptr());
    by_id_[request_id] = holding;
    added.request_id = std::move(request_id);
    if (2 * (num_entered_ + 1) > slots_.size()) {
        std::vector<Holding*> old = std::exchange(slots_, std::vector<Holding*>(2 * slots_.size()));
        num_entered_ = 0;
        for (Holding* one : old) {
            if (one != nullptr) enter(one);
        }
    }
    enter(&added);
}

nb::object Holdings::get(nb::handle request_id) const {
    PyObject* holding = PyDict_GetItemWithError(by_id_.ptr(), request_id.ptr());
    if (holding == nullptr && PyErr_Occurred()) throw nb::python_error();
    return holding == nullptr ? nb::none() : nb::borrow(holding);
}

void Holdings::remove(nb::handle request_id) {
    nb::object holding = get(request_id);
    if (holding.is_none()) return;
    leave(nb::inst_ptr<Holding>(holding));
    if (PyDict_DelItem(by_id_.ptr(), request_id.ptr()) != 0) throw nb::python_error();
}

void Holdings::enter(Holding* holding) {
    size_t slot = home(holding->request());
    while (slots_[slot] != nullptr) slot = after(slot);
    slots_[slot] = holding;
    ++num_entered_;
}

void Holdings::leave(Holding* holding) {
    size_t hole = home(holding->request());
    while (slots_[hole] != holding) hole = after(hole);
    for (size_t slot = after(hole); slots_[slot] != nullptr; slot = after(slot)) {
        size_t distance = (slot - home(slots_[slot]->request())) & (slots_.size() - 1);
        if (distance >= ((slot - hole) & (slots_.size() - 1))) {
            slots_[hole] = slots_[slot];
            hole = slot;
        }
    }
    slots_[hole] = nullptr;
    --num_entered_;
}

int Holdings::traverse(visitproc visit, void* arg) {
    Py_VISIT(by_id_.ptr());
    return 0;
}

void Holdings::clear_references() {
    std::fill(slots_.begin(), slots_.end(), nullptr);
    num_entered_ = 0;
    nb::dict holdings = std::exchange(by_id_, nb::dict());
}

// -- the answer for a batch -----------------------------------------------------------------------

void DecodeSlots::add(int64_t index, const std::vector<BlockList*>& tables, const std::vector<int64_t>& from) {
    bool any = false;
    for (size_t i = 0; i < tables.size(); ++i) any |= tables[i]->size() > from[i];
    if (!any) return;
    entries_.push_back({index, ids_.size(), tables.size()});
    for (size_t i = 0; i < tables.size(); ++i) {
        const std::vector<BlockId>& ids = tables[i]->ids;
        ids_.push_back(static_cast<BlockId>(ids.size() - from[i]));
        ids_.insert(ids_.end(), ids.begin() + from[i], ids.end());
    }
}

void DecodeSlots::add(int64_t index, nb::handle lists) {
    Tables added(lists);
    add(index, added.lists(), std::vector<int64_t>(added.lists().size(), 0));
}

nb::list DecodeSlots::changed() const {
    nb::list indices;
    for (const Entry& entry : entries_) indices.append(entry.index);
    return indices;
}

nb::tuple DecodeSlots::block_ids(int64_t index) const {
    auto found = std::lower_bound(entries_.begin(), entries_.end(), index,
                                  [](const Entry& entry, int64_t wanted) { return entry.index < wanted; });
    nb::list groups;
    if (found != entries_.end() && found->index == index) {
        const BlockId* at = &ids_[found->begin];
        for (size_t i = 0; i < found->num_groups; ++i) {
            groups.append(as_list(at + 1, static_cast<size_t>(*at)));
            at += 1 + *at;
        }
    }
    return nb::tuple(groups);
}

// -- the step -----------------------------------------------------------------------------------

// What a step reads of a request, all of it before anything changes.
struct Stepper::Facts {
    int64_t num_computed = 0;
    int64_t num_in_flight = 0;
    int64_t num_prompt = 0;
    int64_t num_tokens = 0;
    int64_t num_to_keep = 0;  // free blocks that must be left
    nb::object block_hashes;  // in place

    int64_t num_processed() const { return std::max<int64_t>(0, num_computed - num_in_flight); }
};

// What an admission is made of; all of it before anything changes.
struct Stepper::Newcomer {
    Facts facts{};
    nb::object request_id, hits;              // the hits: a tuple of block lists
    std::vector<const BlockList*> hit_lists;  // one a group
    int64_t generation = 0;                   // the pool's when they were found
    int64_t junction = 0;
    nb::object tables, holding;  // new and empty
};

Stepper::Stepper(nb::object pool, nb::object holdings, std::vector<GroupRule> rules, nb::handle tables, int64_t max_model_len,
                 bool commits, int64_t watermark_blocks, nb::object fits_alone, nb::object log_stored, nb::object wrap,
                 nb::object empty)
    : pool_object_(std::move(pool)),
      holdings_object_(std::move(holdings)),
      fits_alone_(std::move(fits_alone)),
      log_stored_(std::move(log_stored)),
      wrap_(std::move(wrap)),
      empty_(std::move(empty)),
      pool_(&as<Pool>(pool_object_)),
      holdings_(&as<Holdings>(holdings_object_)),
      rules_(std::move(rules)),
      max_model_len_(max_model_len),
      commits_(commits),
      watermark_blocks_(watermark_blocks) {
    for (const GroupRule& rule : rules_) {
        pool_->checked_group(rule.group);
        block_sizes_.push_back(rule.block_size);
        hit_margin_ = std::max(hit_margin_, rule.hit_margin);
        alignment_ = rule.alignment;
    }
    for (nb::handle group : as_tuple(tables)) {
        if (!PyDict_Check(group.ptr())) raise(PyExc_TypeError, "tables must be dicts by request id, got %R", group.ptr());
        tables_.push_back(nb::borrow<nb::dict>(group));
    }
    if (tables_.size() != rules_.size()) {
        raise(invalid_request_error, "%zu groups of tables were given for %zu groups", tables_.size(), rules_.size());
    }
}

nb::object Stepper::allocate(nb::handle request, nb::handle num_new, nb::handle num_lookahead, int64_t num_reserved,
                             bool has_scheduled_reqs) {
    int64_t count;
    StepOptions options{0, num_reserved, has_scheduled_reqs};
    bool sensible = is_count(num_new, count) && count > 0 && is_count(num_lookahead, options.num_lookahead) &&
                    num_reserved >= 0;
    switch (sensible ? step(request.ptr(), count, options) : Outcome::not_ours) {
        case Outcome::quiet: return empty_;
        case Outcome::not_ours: return nb::borrow(Py_NotImplemented);
        case Outcome::refused: tell(request); return nb::none();
        case Outcome::stepped: break;
    }
    return answer_for(*holdings_->of(request.ptr()), request);
}

// What was appended, once all is told.
nb::object Stepper::answer_for(const Holding& holding, nb::handle request) {
    nb::object answer = appended(holding);
    tell(request);
    return answer.is_none() ? empty_ : wrap_(answer);
}

// A list of block lists; None if nothing was appended.
nb::object Stepper::appended(const Holding& holding) const {
    std::vector<BlockList> lists;
    bool any = false;
    for (size_t i = 0; i < rules_.size(); ++i) {
        const std::vector<BlockId>& ids = holding.tables()[i]->ids;
        lists.push_back({{ids.begin() + lengths_[i], ids.end()}});
        any |= !lists.back().ids.empty();
    }
    return any ? nb::cast(std::move(lists)) : nb::none();
}

Stepper::Outcome Stepper::step(PyObject* request, int64_t num_new, const StepOptions& options) {
    int64_t computed;
    if (!num_computed_tokens_.read_count(request, computed)) return Outcome::not_ours;
    const Holding* holding = holdings_->of(request);
    if (holding == nullptr) return Outcome::not_ours;
    if (is_quiet(*holding, computed, num_new, options)) return Outcome::quiet;
    for (const BlockList* table : holding->tables()) table->prefetch_all();
    Facts facts{.num_computed = computed, .block_hashes = {}};
    if (!read(request, options, facts)) return Outcome::not_ours;
    // Reading may have run anything; from here on nothing does until the request is whole again.
    Holding* found = holdings_->of(request);
    if (found == nullptr || found->commit_limit || !can_go_on(*found, computed)) return Outcome::not_ours;
    return act(*found, num_new, options, facts);
}

bool Stepper::is_quiet(const Holding& holding, int64_t computed, int64_t num_new, const StepOptions& options) const {
    return holding.lowest <= computed && computed + num_new + options.num_lookahead <= holding.quiet_until &&
           most_to_keep(options) <= pool_->num_free();
}

bool Stepper::read_in_flight_and_prompt(PyObject* request, Facts& facts) {
    nb::object in_flight = num_in_flight_tokens_.find(request);
    if (in_flight.is_valid() && !is_count(in_flight, facts.num_in_flight)) return false;
    return num_prompt_tokens_.read_count(request, facts.num_prompt);
}

// False: something about the request is not as it should be.
bool Stepper::read(PyObject* request, const StepOptions& options, Facts& facts) {
    if (!read_in_flight_and_prompt(request, facts)) return false;
    if (!num_tokens_.read_count(request, facts.num_tokens)) return false;
    facts.num_to_keep = options.num_reserved;
    if (watermark_blocks_ > 0 && options.has_scheduled_reqs) {
        nb::object status = name_.get(status_.get(request).ptr());
        if (!PyUnicode_Check(status.ptr())) return false;
        bool newcomer = PyUnicode_CompareWithASCIIString(status.ptr(), "WAITING") == 0 ||
                        PyUnicode_CompareWithASCIIString(status.ptr(), "PREEMPTED") == 0;
        if (newcomer) facts.num_to_keep += watermark_blocks_;
    }
    facts.block_hashes = Hashes::in_place(block_hashes_.get(request));
    return true;
}

bool Stepper::can_go_on(const Holding& holding, int64_t computed) const {
    int64_t most = max_model_len_ - 1;
    if (holding.tables().size() != rules_.size()) return false;
    for (size_t i = 0; i < rules_.size(); ++i) most = std::min(most, rules_[i].num_slots(*holding.tables()[i]));
    return holding.lowest <= computed && computed <= most;
}

Stepper::Outcome Stepper::act(Holding& holding, int64_t num_new, const StepOptions& options, const Facts& facts) {
    int64_t num_main = std::min(facts.num_computed + num_new, max_model_len_);
    int64_t num_slots = std::min(num_main + options.num_lookahead, max_model_len_);
    bool commits = commits_ && !holding.is_stale;
    prefetch_step(holding, facts, commits ? std::min(num_main, facts.num_tokens) : 0);
    lengths_.clear();
    for (size_t i = 0; commits && i < rules_.size(); ++i) {
        check_hashes(i, holding.tables()[i]->num_committed, facts, std::min(num_main, facts.num_tokens));
    }
    for (size_t i = 0; i < rules_.size(); ++i) {
        BlockList& table = *holding.tables()[i];
        rules_[i].release(*pool_, table, facts.num_processed(), facts.num_prompt, holding.junction);
        lengths_.push_back(table.size());
    }
    if (plan(holding, facts, num_main, num_slots) > pool_->num_free() - facts.num_to_keep) {
        find_bounds(holding, facts.num_prompt);
        return Outcome::refused;
    }
    take(holding, facts, num_main);
    return Outcome::stepped;
}

// The free blocks that the step takes; leaves how each table grows in `growths_`.
int64_t Stepper::plan(const Holding& holding, const Facts& facts, int64_t num_main, int64_t num_slots) {
    growths_.clear();
    int64_t start = std::min(facts.num_computed, facts.num_tokens - 1), need = 0;
    for (size_t i = 0; i < rules_.size(); ++i) {
        const GroupRule& rule = rules_[i];
        // Drafts have no state layers: lookahead slots are not for align groups.
        int64_t goal = rule.is_align ? num_main : num_slots;
        growths_.push_back(rule.growth(lengths_[i], goal, rule.dead(start, facts.num_prompt), holding.tables()[i]->is_running));
        need += growths_.back().num_new();
    }
    return need;
}

// Grows the tables as planned and commits what is computed by the end of the step.
void Stepper::take(Holding& holding, const Facts& facts, int64_t num_main) {
    bool commits = commits_ && !holding.is_stale;
    for (size_t i = 0; i < rules_.size(); ++i) {
        BlockList& table = *holding.tables()[i];
        rules_[i].grow(*pool_, table, growths_[i]);
        table.is_running = rules_[i].is_align;
        if (commits && num_main <= facts.num_tokens) rules_[i].step_ends(table, num_main);
    }
    if (commits) commit(holding, facts, std::min(num_main, facts.num_tokens));
    find_bounds(holding, facts.num_prompt);
}

// A hash that is none is refused before anything has changed.
void Stepper::check_hashes(size_t group, int64_t num_committed, const Facts& facts, int64_t num_tokens) const {
    int64_t commit_stop = rules_[group].commit_stop(num_tokens, facts.num_prompt);
    if (num_committed >= commit_stop) return;
    Hashes hashes(facts.block_hashes, rules_[group].stride);
    hashes.check(num_committed, std::min(commit_stop, hashes.num_positions()));
}

// What a step touches of each group lies in many places: those of all groups are fetched side by side.
void Stepper::prefetch_step(const Holding& holding, const Facts& facts, int64_t num_tokens) const {
    for (const BlockList* table : holding.tables()) table->prefetch_ends();
    for (size_t i = 0; i < rules_.size(); ++i) {
        const BlockList& table = *holding.tables()[i];
        if (rules_[i].lag >= 0 && table.num_released < table.size()) pool_->prefetch_block(table.ids[table.num_released]);
        if (!rules_[i].has_to_commit(table, num_tokens, facts.num_prompt)) continue;
        Hashes hashes(facts.block_hashes, rules_[i].stride);
        pool_->prefetch_commit(table, rules_[i].group, hashes, table.num_committed);
    }
    for (size_t i = 0; i < rules_.size(); ++i) {
        const BlockList& table = *holding.tables()[i];
        if (rules_[i].lag >= 0 && table.num_released < table.size()) pool_->prefetch_eviction(table.ids[table.num_released]);
    }
}

void Stepper::commit(Holding& holding, const Facts& facts, int64_t num_tokens) {
    for (size_t i = 0; i < rules_.size(); ++i) {
        BlockList& table = *holding.tables()[i];
        if (!rules_[i].has_to_commit(table, num_tokens, facts.num_prompt)) continue;
        Hashes hashes(facts.block_hashes, rules_[i].stride);
        runs_.clear();
        rules_[i].commit(*pool_, table, hashes, num_tokens, facts.num_prompt, holding.junction, runs_);
        if (!pool_->logs_events()) continue;
        for (const Range& run : runs_) stored_.push_back({i, run});
    }
}

void Stepper::find_bounds(Holding& holding, int64_t num_prompt_tokens) const {
    bool commits = commits_ && !holding.is_stale;
    if (holding.tables().size() != rules_.size()) {
        raise(invalid_request_error, "%zu tables were given for %zu groups", holding.tables().size(), rules_.size());
    }
    holding.lowest = 0;
    // While a load is under way, each call may be the one that computes what it did not bring.
    holding.quiet_until = holding.commit_limit ? -1 : unbounded;
    for (size_t i = 0; i < rules_.size(); ++i) {
        const BlockList& table = *holding.tables()[i];
        holding.lowest = std::max(holding.lowest, rules_[i].lowest_computed(table, num_prompt_tokens));
        holding.quiet_until = std::min(holding.quiet_until, rules_[i].quiet_until(table, num_prompt_tokens, commits));
    }
}

// -- admission ------------------------------------------------------------------------------------

nb::object Stepper::admit(nb::handle request, nb::handle num_new, nb::handle num_hits, nb::handle hits,
                          bool full_sequence_must_fit, nb::handle num_lookahead, int64_t num_reserved,
                          bool has_scheduled_reqs) {
    nb::object not_ours = nb::borrow(Py_NotImplemented);
    int64_t count, num_hit, computed;
    StepOptions options{0, num_reserved, has_scheduled_reqs};
    bool sensible = is_count(num_new, count) && count > 0 && is_count(num_hits, num_hit) && num_hit < max_model_len_ &&
                    is_count(num_lookahead, options.num_lookahead) && num_reserved >= 0;
    if (!sensible) return not_ours;
    Newcomer newcomer;
    Facts& facts = newcomer.facts;
    if (!num_computed_tokens_.read_count(request.ptr(), computed) || computed != 0) return not_ours;
    if (!read(request.ptr(), options, facts)) return not_ours;
    if (!read_hits(hits, newcomer)) return not_ours;
    facts.num_computed = num_hit;
    newcomer.request_id = request_id_.get(request.ptr());
    if (!PyUnicode_CheckExact(newcomer.request_id.ptr())) return not_ours;
    if (!nb::cast<bool>(fits_alone_(request, num_lookahead, 0))) return not_ours;
    int64_t num_main = std::min(num_hit + count, max_model_len_);
    int64_t num_slots = std::min(num_main + options.num_lookahead, max_model_len_);
    nb::list tables;
    for (size_t i = 0; i < rules_.size(); ++i) tables.append(nb::cast(BlockList{}));
    newcomer.tables = as_tuple(tables);
    newcomer.holding = nb::cast(Holding(nb::borrow(request), newcomer.tables));
    // From here on nothing runs Python until the request is in and whole.
    if (!is_whole_hit(newcomer, num_hit)) return not_ours;
    if (holdings_->of(request.ptr()) != nullptr || !holdings_->get(newcomer.request_id).is_none()) return not_ours;
    for (size_t i = 0; i < rules_.size(); ++i) {
        const BlockList& found = *newcomer.hit_lists[i];
        if (rules_[i].is_state && found.size() > 0 && pool_->is_computing(found.ids.back())) return nb::none();
        if (commits_) check_hashes(i, found.size(), facts, std::min(num_main, facts.num_tokens));
    }
    int64_t whole_main = full_sequence_must_fit ? std::min(std::max(num_main, facts.num_tokens), max_model_len_) : num_main;
    int64_t whole_slots = std::min(whole_main + options.num_lookahead, max_model_len_);
    if (!surely_fits(newcomer, whole_main, whole_slots)) return not_ours;
    enter(newcomer);
    Holding& holding = *nb::inst_ptr<Holding>(newcomer.holding);
    plan(holding, facts, num_main, num_slots);
    take(holding, facts, num_main);
    return answer_for(holding, request);
}

// The blocks of a hit, which must be this pool's.
bool Stepper::read_hits(nb::handle blocks, Newcomer& newcomer) {
    static const BlockList nothing;
    newcomer.hit_lists.assign(rules_.size(), &nothing);
    newcomer.generation = pool_->generation();
    if (blocks.is_none() || blocks.is(empty_)) return true;
    nb::object pool = hits_pool_.find(blocks.ptr()), generation = hits_generation_.find(blocks.ptr());
    nb::object lists = hits_lists_.find(blocks.ptr()), junction = hits_junction_.find(blocks.ptr());
    if (!pool.is(pool_object_) || !generation.is_valid() || !lists.is_valid() || !junction.is_valid()) return false;
    if (!is_count(generation, newcomer.generation) || !is_count(junction, newcomer.junction)) return false;
    if (!PyTuple_CheckExact(lists.ptr()) || nb::len(lists) != rules_.size()) return false;
    newcomer.hits = lists;
    for (size_t i = 0; i < rules_.size(); ++i) {
        PyObject* list = PyTuple_GET_ITEM(lists.ptr(), i);
        if (!nb::isinstance<BlockList>(list)) return false;
        newcomer.hit_lists[i] = nb::inst_ptr<BlockList>(list);
    }
    return true;
}

// Whether the hit is still cached and every group's blocks cover exactly its tokens.
bool Stepper::is_whole_hit(const Newcomer& newcomer, int64_t num_tokens) const {
    for (size_t i = 0; i < rules_.size(); ++i) {
        if (newcomer.hit_lists[i]->size() * rules_[i].block_size != num_tokens) return false;
    }
    return newcomer.generation == pool_->generation();
}

// Whether an admission fits even if nothing dies on the way; if not, Python plans it exactly.
bool Stepper::surely_fits(const Newcomer& newcomer, int64_t num_main, int64_t num_slots) const {
    int64_t need = 0;
    for (size_t i = 0; i < rules_.size(); ++i) {
        const BlockList& found = *newcomer.hit_lists[i];
        if (!rules_[i].grows) return false;
        int64_t goal = rules_[i].num_positions(rules_[i].is_align ? num_main : num_slots);
        need += pool_->count_evictable(found, 0, found.size()) + std::max<int64_t>(0, goal - found.size());
    }
    return need <= pool_->num_free() - newcomer.facts.num_to_keep;
}

// Registers a newcomer and takes its hits, of all groups before any block is allocated.
void Stepper::enter(const Newcomer& newcomer) {
    const Facts& facts = newcomer.facts;
    Holding& holding = *nb::inst_ptr<Holding>(newcomer.holding);
    int64_t start = std::min(facts.num_computed, facts.num_tokens - 1);
    holding.junction = newcomer.junction;
    holdings_->add(newcomer.request_id, newcomer.holding);
    lengths_.clear();
    for (size_t i = 0; i < rules_.size(); ++i) {
        const BlockList& found = *newcomer.hit_lists[i];
        tables_[i][newcomer.request_id] = nb::handle(PyTuple_GET_ITEM(newcomer.tables.ptr(), i));
        rules_[i].adopt(*pool_, *holding.tables()[i], found, rules_[i].dead(start, facts.num_prompt));
        lengths_.push_back(found.size());
    }
}

// -- the end --------------------------------------------------------------------------------------

void Stepper::free(nb::handle request) {
    Facts facts;
    if (holdings_->of(request.ptr()) == nullptr) return;
    if (!num_computed_tokens_.read_count(request.ptr(), facts.num_computed) ||
        !read_in_flight_and_prompt(request.ptr(), facts)) {
        raise(invalid_request_error, "a request that is freed must have token counts of at least 0: num_computed_tokens, "
              "num_prompt_tokens, num_in_flight_tokens of %R", request.ptr());
    }
    Holding* found = holdings_->of(request.ptr());
    if (found == nullptr) return;
    // Dead as seen from the longest hit that the request leaves behind, not from its last token: up to an alignment
    // before it, and the next turn of the session starts there.
    int64_t shareable = facts.num_processed();
    for (const GroupRule& rule : rules_) shareable = rule.num_shareable(shareable, facts.num_prompt);
    int64_t longest_hit = std::max<int64_t>(0, shareable - hit_margin_) / alignment_ * alignment_;
    dead_.clear(), useful_.clear();
    for (const GroupRule& rule : rules_) {
        dead_.push_back(rule.dead(longest_hit, facts.num_prompt));
        useful_.push_back(found->junction > 0 ? rule.needed_for_hit(found->junction) : Range{});
    }
    pool_->free_tables(found->tables(), block_sizes_, dead_, useful_);
    nb::object request_id = found->request_id;
    for (nb::dict& tables : tables_) {
        if (PyDict_DelItem(tables.ptr(), request_id.ptr()) != 0) throw nb::python_error();
    }
    holdings_->remove(request_id);
    pool_->tell_observer();
}

// -- telling --------------------------------------------------------------------------------------

// Python may run again: events are written and observers told.
void Stepper::tell(nb::handle request) {
    if (stored_.empty()) return pool_->tell_observer();
    auto stored = std::exchange(stored_, {});
    for (const auto& [group, run] : stored) log_stored_(request, group, as_python_range(run));
    pool_->tell_observer();
}

// -- batches --------------------------------------------------------------------------------------

// Steps the requests of a batch in order. In most steps most of them are quiet; what the others touch is in no
// near cache, one thing found through the other. So whoever is not quiet waits until some more of those have been
// found, and each time the next link of his chain is fetched.
class Stepper::Batch {
public:
    Batch(Stepper& stepper, PyObject* requests, PyObject* counts, const StepOptions& options, DecodeSlots& slots)
        : stepper_(stepper), requests_(requests), counts_(counts), options_(options), slots_(slots) {
        // Where blocks must be left free, the steps of those before decide whether a quiet request is refused.
        if (stepper.most_to_keep(options) > 0) most_waiting_ = 0;
    }

    // The index of the first request that was refused or is not ours, or their number.
    int64_t run(int64_t start) {
        int64_t size = PyTuple_GET_SIZE(requests_);
        for (int64_t index = start; index < size; ++index) {
            prefetch_requests(index);
            if (is_quiet(index)) continue;
            for (int64_t i = 0; i < num_waiting_; ++i) prefetch_link(waiting_[i], num_waiting_ - i);
            prefetch_link(index, 0);
            waiting_[num_waiting_++] = index;
            if (num_waiting_ > most_waiting_ && !step_first()) return waiting_[0];
        }
        while (num_waiting_ > 0) {
            for (int64_t i = 0; i < num_waiting_; ++i) prefetch_link(waiting_[i], num_waiting_ - i);
            if (!step_first()) return waiting_[0];
        }
        return size;
    }

private:
    PyObject* request(int64_t index) const { return PyTuple_GET_ITEM(requests_, index); }

    bool read_count(int64_t index, int64_t& count) const {
        count = 1;
        return counts_ == Py_None || (is_count(PyTuple_GET_ITEM(counts_, index), count) && count > 0);
    }

    bool is_quiet(int64_t index) {
        int64_t count, computed;
        if (!read_count(index, count) || !stepper_.num_computed_tokens_.read_count(request(index), computed)) return false;
        const Holding* holding = stepper_.holdings_->of(request(index));
        return holding != nullptr && stepper_.is_quiet(*holding, computed, count, options_);
    }

    // False: it was refused or is not ours.
    bool step_first() {
        int64_t index = waiting_[0], count;
        Outcome outcome = read_count(index, count) ? stepper_.step(request(index), count, options_) : Outcome::not_ours;
        if (outcome == Outcome::not_ours) return false;
        if (outcome == Outcome::stepped) {
            slots_.add(index, stepper_.holdings_->of(request(index))->tables(), stepper_.lengths_);
        }
        if (outcome == Outcome::refused) slots_.refused = index;
        if (outcome != Outcome::quiet) stepper_.tell(request(index));
        if (outcome == Outcome::refused) return false;
        std::copy(waiting_.begin() + 1, waiting_.begin() + num_waiting_, waiting_.begin());
        --num_waiting_;
        return true;
    }

    // With thousands of running requests, what is read of each is in no near cache.
    void prefetch_requests(int64_t index) const {
        int64_t size = PyTuple_GET_SIZE(requests_);
        if (index + 8 < size) {
            prefetch(request(index + 8));
            stepper_.num_computed_tokens_.prefetch_slot(request(index + 8));
            stepper_.holdings_->prefetch_slot(request(index + 8));
        }
        if (index + 4 < size) {
            stepper_.num_computed_tokens_.prefetch_value(request(index + 4));
            stepper_.holdings_->prefetch_holding(request(index + 4));
        }
    }

    void prefetch_link(int64_t index, int64_t link) const {
        const Holding* holding = stepper_.holdings_->of(request(index));
        PyObject* hashes = stepper_.block_hashes_.in_slot(request(index));
        if (holding == nullptr) return;
        if (link == 0) {
            prefetch(holding->tables().data());
            stepper_.num_prompt_tokens_.prefetch_value(request(index));
            prefetch(hashes);
        } else if (link == 1) {
            for (const BlockList* table : holding->tables()) table->prefetch_all();
            if (hashes != nullptr && BlockHashes::of(hashes) != nullptr) BlockHashes::of(hashes)->prefetch_last();
        } else {
            for (const BlockList* table : holding->tables()) table->prefetch_ends();
        }
    }

    Stepper& stepper_;
    PyObject *requests_, *counts_;  // tuples, or None for the counts
    const StepOptions& options_;
    DecodeSlots& slots_;
    int64_t most_waiting_ = 2;
    std::array<int64_t, 3> waiting_;
    int64_t num_waiting_ = 0;
};

int64_t Stepper::step_all(nb::handle requests, nb::handle counts, nb::handle num_lookahead, int64_t num_reserved,
                          bool has_scheduled_reqs, int64_t start, DecodeSlots& slots) {
    nb::tuple batch = as_tuple(requests);
    nb::object given = counts.is_none() ? nb::none() : nb::object(as_tuple(counts));
    StepOptions options{0, num_reserved, has_scheduled_reqs};
    if (!is_count(num_lookahead, options.num_lookahead) || num_reserved < 0) return start;
    if (!given.is_none() && nb::len(given) != nb::len(batch)) {
        raise(invalid_request_error, "give one number of new tokens for each of the %zu requests", nb::len(batch));
    }
    return Batch(*this, batch.ptr(), given.ptr(), options, slots).run(std::max<int64_t>(start, 0));
}

int Stepper::traverse(visitproc visit, void* arg) {
    Py_VISIT(pool_object_.ptr());
    Py_VISIT(holdings_object_.ptr());
    Py_VISIT(fits_alone_.ptr());
    Py_VISIT(log_stored_.ptr());
    for (const nb::dict& tables : tables_) Py_VISIT(tables.ptr());
    Py_VISIT(wrap_.ptr());
    Py_VISIT(empty_.ptr());
    return 0;
}

void Stepper::clear_references() {
    nb::object fits_alone = std::exchange(fits_alone_, nb::none());
    nb::object log_stored = std::exchange(log_stored_, nb::none());
    nb::object wrap = std::exchange(wrap_, nb::none());
    nb::object empty = std::exchange(empty_, nb::none());
}

}  // namespace kvpager
