// Slices collected in Python and written by one call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "deltasync/writer.hpp"

namespace deltasync::python {

namespace nb = nanobind;

/// Slices and their sources, which it keeps alive until clear().
class Batch {
 public:
  /// `owner` keeps the source's memory; null: the caller does.
  void add(const SliceSource& item, nb::handle owner) {
    slices_.push_back(item);
    if (!item.source.device.is_host()) on_device_ = true;
    if (owner.is_valid()) owners_.push_back(nb::borrow(owner));
  }
  void clear() {
    slices_.clear();
    owners_.clear();
    on_device_ = false;
  }

  std::size_t size() const { return slices_.size(); }
  bool on_device() const { return on_device_; }
  std::span<const SliceSource> slices() const { return slices_; }
  /// The slices without their sources.
  std::vector<TensorSlice> plan() const;

 private:
  std::vector<SliceSource> slices_;
  std::vector<nb::object> owners_;
  bool on_device_ = false;
};

void bind_batch(nb::module_& module);

}  // namespace deltasync::python
