// BlockPool as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include "../pool/pool.h"

namespace kvpager {

// Owns a pool and who is told of its blocks' history. Arguments are converted before a verb, answers made and the
// sampler told after it: a finalizer, a callback or another thread that calls in finds the pool whole.
struct PoolObject {
    PoolObject(int64_t num_blocks, int64_t num_groups, nanobind::handle order, bool enable_events,
               nanobind::object sampler);

    BlockPool pool;
    nanobind::object residency;

    // Tells the residency sampler what happened since the last time: the last thing a verb does.
    void tell_sampler() {
        if (pool.has_history()) tell_history();
    }

    // For Python's cycle collector.
    int traverse(visitproc visit, void* argument);
    void clear_references() { nanobind::object gone = std::exchange(residency, nanobind::none()); }

private:
    void tell_history();
};

// For classes that hold Python objects: how the cycle collector looks into them.
template <typename Class>
struct Collectable {
    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        return nanobind::inst_ready(self) ? nanobind::inst_ptr<Class>(self)->traverse(visit, arg) : 0;
    }
    static int clear(PyObject* self) {
        if (nanobind::inst_ready(self)) nanobind::inst_ptr<Class>(self)->clear_references();
        return 0;
    }
    inline static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                         {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                         {0, nullptr}};
};

// Block ids of this pool.
BlockId checked_id(const BlockPool& pool, nanobind::handle id);

void bind_pool(nanobind::module_& module);

}  // namespace kvpager
