#include "deltasync/placement.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <set>

#include "python/bindings/bind.hpp"
#include "python/bindings/calls.hpp"

namespace deltasync::python {
namespace {

using namespace nb::literals;

using RectTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

Rect rect_of(const RectTuple& rect) {
  const auto& [row, col, rows, cols] = rect;
  return {row, col, rows, cols};
}

Slice slice_of(std::string tensor, const std::optional<RectTuple>& rect) {
  Slice slice{std::move(tensor), std::nullopt};
  if (rect) slice.rect = rect_of(*rect);
  return slice;
}

void add_memory(PlacementPlan& plan, std::string name, std::uintptr_t address, std::uint64_t bytes, int device,
                const std::optional<std::string>& dtype, bool whole) {
  LiveMemory memory;
  memory.whole = whole;
  memory.name = std::move(name);
  memory.base = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  memory.bytes = bytes;
  memory.device.ordinal = device;
  if (dtype) {
    memory.dtype = dtype_from_string(*dtype);
    if (!memory.dtype) throw Failure{Error(Errc::invalid_argument, memory.name + ": no dtype '" + *dtype + "'")};
  }
  plan.memories.push_back(std::move(memory));
}

}  // namespace

void bind_placement(nb::module_& module) {
  nb::class_<PlacementPlan>(module, "PlacementPlan",
                            "Where each slice of the HF tensors lies in live memory. Owns no memory.")
      .def(nb::init<>())
      .def(
          "add_memory",
          [](PlacementPlan& plan, std::string name, std::uintptr_t address, std::uint64_t bytes, int device,
             const std::optional<std::string>& dtype, bool whole) {
            add_memory(plan, std::move(name), address, bytes, device, dtype, whole);
            return plan.memories.size() - 1;
          },
          "name"_a, "address"_a, "nbytes"_a, "device"_a = Device::kHost, "dtype"_a = nb::none(), "whole"_a = false,
          "A range of addresses that stays mapped while the plan is used; device: a CUDA ordinal, or -1 for the host; "
          "whole: each of its bytes has to be placed. "
          "Returns its index.")
      .def(
          "place",
          [](PlacementPlan& plan, std::string tensor, const RectTuple& rect, std::uint32_t memory, std::uint64_t offset,
             std::uint64_t row_stride, std::uint64_t col_stride) {
            plan.slices.push_back({std::move(tensor), rect_of(rect), memory, offset, row_stride, col_stride});
          },
          "tensor"_a, "rect"_a, "memory"_a, "offset"_a, "row_stride"_a, "col_stride"_a,
          "rect: (row, col, rows, cols) of the tensor's 2-D view; its element (r, c) is at offset + r·row_stride + "
          "c·col_stride bytes in the memory, r and c counted from the rectangle's corner.")
      .def(
          "ignore",
          [](PlacementPlan& plan, std::string tensor, const std::optional<RectTuple>& rect) {
            plan.ignored.push_back(slice_of(std::move(tensor), rect));
          },
          "tensor"_a, "rect"_a = nb::none(), "It has no place here. Without a rectangle: all of it.")
      .def_prop_ro(
          "slice_count", [](const PlacementPlan& plan) { return plan.slices.size(); }, "Slices that are placed.")
      .def_prop_ro(
          "memory_count", [](const PlacementPlan& plan) { return plan.memories.size(); }, "Memories that were added.");
  nb::class_<Placement>(module, "Placement", "A plan that was found valid.")
      .def_static(
          "build",
          [](std::shared_ptr<const Layout> layout, const PlacementPlan& plan) {
            auto built = unwrap(released([&] { return Placement::build(std::move(layout), plan); }));
            return std::const_pointer_cast<Placement>(built);
          },
          "layout"_a, "plan"_a,
          "The plan for this layout. NotFound, OutOfRange (no such tensor or rectangle), InvalidArgument (memories "
          "that "
          "overlap, other dtypes or strides), CoverageError (what has no place, or two).")
      .def_prop_ro(
          "devices",
          [](const Placement& placement) {
            std::set<std::int32_t> devices;
            for (const LiveMemory& memory : placement.memories()) {
              if (!memory.device.is_host()) devices.insert(memory.device.ordinal);
            }
            return std::vector<std::int32_t>(devices.begin(), devices.end());
          },
          "CUDA ordinals of its memories, in order.")
      .def("live_names", &Placement::live_names, "(a memory's name, a tensor that it has elements of), in order.")
      .def_prop_ro("placed_bytes", &Placement::placed_bytes, "What a full update writes in live memory.")
      .def_prop_ro("rest_bytes", &Placement::rest_bytes,
                   "Host memory for the rest of tiles that a slice cuts through.");
}

}  // namespace deltasync::python
