#include "hashing_bindings.h"

#include "arguments.h"
#include "tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvpager {

namespace {

// Below this many tokens letting go of the GIL costs more than it gives.
constexpr size_t gil_threshold = 512;

Hash parent_of(nb::bytes parent) {
    if (parent.size() != digest_bytes) raise(PyExc_ValueError, "parent must be 32 bytes, got %zu", parent.size());
    Hash hash;
    std::memcpy(hash.bytes, parent.data(), digest_bytes);
    return hash;
}

// One for each block, or none; `held` keeps them while the GIL is let go.
std::vector<Suffix> suffixes_of(nb::handle source, size_t num_blocks, nb::object& held) {
    std::vector<Suffix> suffixes;
    if (source.is_none()) return suffixes;
    held = as_tuple(source);
    if (size_t count = nb::len(held); count != num_blocks) {
        raise(ErrorKind::invalid_request,
              "extra_keys has %zu entries for %zu full blocks; give one for each (None: no keys)", count, num_blocks);
    }
    for (nb::handle item : held) {
        if (!PyBytes_Check(item.ptr())) raise(PyExc_TypeError, "a suffix must be bytes, got %R", item.ptr());
        auto* data = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(item.ptr()));
        suffixes.emplace_back(data, static_cast<size_t>(PyBytes_GET_SIZE(item.ptr())));
    }
    return suffixes;
}

}  // namespace

BlockHashes::BlockHashes(size_t block_size, nb::bytes parent, bool cbor)
    : chain_(block_size, parent_of(parent), cbor ? HashFormat::cbor : HashFormat::canonical) {}

void BlockHashes::extend(nb::handle token_ids, nb::handle suffixes) {
    size_t first = chain_.first_token();
    Tokens tokens(token_ids, first);
    nb::object held;
    std::vector<Suffix> behind = suffixes_of(suffixes, tokens.ids().size() / chain_.block_size(), held);
    std::vector<Hash> fresh;
    const Hash parent = chain_.last();
    if (tokens.ids().size() < gil_threshold) {
        fresh = chain_.compute(parent, tokens.ids(), behind);
    } else {
        nb::gil_scoped_release released;
        fresh = chain_.compute(parent, tokens.ids(), behind);
    }
    if (chain_.first_token() != first) {
        raise(ErrorKind::invalid_request,
              "block hashes were extended by somebody else at the same time; extend them in one thread");
    }
    chain_.append(std::move(fresh));
}

namespace {

// Every `step`-th hash from `start` on, `count` of them.
nb::list as_list(std::span<const Hash> hashes, Py_ssize_t start, Py_ssize_t step, Py_ssize_t count) {
    nb::object list = nb::steal(PyList_New(count));
    if (!list.is_valid()) throw nb::python_error();
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyList_SET_ITEM(list.ptr(), i, as_bytes(hashes[static_cast<size_t>(start + i * step)]).release().ptr());
    }
    return nb::borrow<nb::list>(list);
}

nb::list as_list(const BlockHashes& hashes) {
    return as_list(hashes.chain().all(), 0, 1, static_cast<Py_ssize_t>(hashes.chain().all().size()));
}

nb::object item(const BlockHashes& self, nb::handle index) {
    Py_ssize_t size = static_cast<Py_ssize_t>(self.chain().all().size()), start, stop, step;
    if (PySlice_Check(index.ptr())) {
        if (PySlice_Unpack(index.ptr(), &start, &stop, &step) != 0) throw nb::python_error();
        Py_ssize_t count = PySlice_AdjustIndices(size, &start, &stop, step);
        return as_list(self.chain().all(), start, step, count);
    }
    Py_ssize_t position = PyNumber_AsSsize_t(index.ptr(), PyExc_IndexError);
    if (position == -1 && PyErr_Occurred()) throw nb::python_error();
    if (position < 0) position += size;
    if (position < 0 || position >= size) raise(PyExc_IndexError, "there are %zd block hashes", size);
    return as_bytes(self.chain().all()[static_cast<size_t>(position)]);
}

// Equal to any list or tuple of the same hashes.
nb::object equals(const BlockHashes& self, nb::handle other) {
    if (const BlockHashes* same = BlockHashes::of(other)) {
        std::span<const Hash> theirs = same->chain().all();
        return nb::bool_(
            std::equal(self.chain().all().begin(), self.chain().all().end(), theirs.begin(), theirs.end()));
    }
    if (!PyList_Check(other.ptr()) && !PyTuple_Check(other.ptr())) return nb::borrow(Py_NotImplemented);
    nb::object list = nb::steal(PySequence_List(other.ptr()));
    if (!list.is_valid()) throw nb::python_error();
    return nb::bool_(as_list(self).equal(list));
}

}  // namespace

void bind_hashing(nb::module_& module) {
    nb::class_<BlockHashes> hashes(module, "BlockHashes", nb::is_final());
    hashes.def(nb::init<size_t, nb::bytes, bool>(), "block_size"_a, "parent"_a, "cbor"_a)
        .def("extend", &BlockHashes::extend, "token_ids"_a.none(), "suffixes"_a = nb::none())
        .def("__len__", [](const BlockHashes& self) { return self.chain().all().size(); })
        .def("__getitem__", &item, "index"_a)
        .def("__iter__", [](const BlockHashes& self) { return nb::iter(as_list(self)); })
        .def(
            "index",
            [](const BlockHashes& self, nb::handle value, nb::args range) {
                return as_list(self).attr("index")(value, *range);
            },
            "value"_a.none(), "range"_a)
        .def(
            "count", [](const BlockHashes& self, nb::handle value) { return as_list(self).attr("count")(value); },
            "value"_a.none())
        .def("__eq__", &equals, "other"_a.none())
        .def("__repr__", [](const BlockHashes& self) { return nb::repr(as_list(self)); });
    BlockHashes::type = reinterpret_cast<PyTypeObject*>(hashes.ptr());
    hashes.attr("__hash__") = nb::none();  // it grows
    module.def("token_list", &token_list, nb::arg("token_ids").none(), "A new list of checked token ids.");
}

}  // namespace kvpager
