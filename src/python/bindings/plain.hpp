// Tensors that are nothing but memory of the host, taken off Python's iterators without a line of Python for each.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include "deltasync/writer.hpp"

namespace deltasync::python {

namespace nb = nanobind;

/// Finds tensors that are plain: whole tensors of the layout, of its shape and dtype, dense in the memory of the host.
/// They are asked through DLPack's C exchange API, version 1, which describes one without Python and without a copy.
class PlainTensors {
 public:
  /// `index`: from name to index in the layout. `types`: of objects that may be plain, exactly these; all of one
  /// library, whose capsule `exchange` is (type.__dlpack_c_exchange_api__). With None, or one of another major version,
  /// nothing is plain.
  PlainTensors(std::shared_ptr<const Layout> layout, nb::dict index, nb::tuple types, nb::object exchange);

  /// Where the tensor lies, if it is plain. Both are borrowed. Throws what Python raises for a name that cannot be one.
  std::optional<SliceSource> find(nb::handle name, nb::handle tensor);

 private:
  using Describe = int (*)(void* tensor, nb::dlpack::dltensor* out);

  /// In the layout; SIZE_MAX for a name that it does not have.
  std::size_t index_of(nb::handle name);
  /// Whether these bytes are torch's storage's, which may have been given up (a view's address there is its offset) or
  /// shrunk.
  bool is_in_storage(nb::handle tensor, const void* data, std::uint64_t bytes) const;

  const std::shared_ptr<const Layout> layout_;
  const nb::dict index_;
  const nb::tuple types_;
  const nb::object exchange_;  ///< keeps what describe_ belongs to
  const nb::object storage_ = nb::str("untyped_storage"), address_ = nb::str("data_ptr"), size_ = nb::str("nbytes");
  Describe describe_ = nullptr;
  /// By index: which one came behind it last time. Tensors come in much the same order each time, and a look at the
  /// name that is expected is a fraction of a look into the dict.
  std::vector<std::uint32_t> next_;
  std::size_t last_ = SIZE_MAX;  ///< the last one that was found
};

/// The (name, tensor) pairs of an iterator that are not plain; plain ones go to `take` on the way, in their order.
class OddPairs {
 public:
  using Take = std::function<void(const SliceSource& item, nb::handle tensor)>;

  /// `plain` outlives it.
  OddPairs(PlainTensors& plain, nb::object pairs, Take take)
      : plain_(&plain), pairs_(std::move(pairs)), take_(std::move(take)) {}

  /// The next one, whatever kind of pair it is. Throws stop_iteration, and what the iterator or `take` throws.
  nb::object next();
  /// Whether a plain tensor that came so far begins there.
  bool saw(std::uintptr_t address);

 private:
  PlainTensors* plain_;
  const nb::object pairs_;
  const Take take_;
  std::vector<std::uintptr_t> fresh_;  ///< addresses that are not in seen_ yet: few ask
  std::unordered_set<std::uintptr_t> seen_;
};

void bind_plain(nb::module_& module);

}  // namespace deltasync::python
