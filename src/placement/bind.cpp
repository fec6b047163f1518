#include "placement/bind.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_set>

#include "format/coverage.hpp"
#include "placement/destinations.hpp"

namespace deltasync {
namespace {

std::string rect_text(const Rect& r) {
  return "rows " + std::to_string(r.row) + ".." + std::to_string(r.row + r.rows) + ", columns " +
         std::to_string(r.col) + ".." + std::to_string(r.col + r.cols);
}

Status check_memory(const LiveMemory& memory) {
  if (memory.base == nullptr) return Error(Errc::invalid_argument, "it has no address");
  if (memory.bytes == 0) return Error(Errc::invalid_argument, "it has no byte");
  if (memory.bytes > std::numeric_limits<std::uintptr_t>::max() - reinterpret_cast<std::uintptr_t>(memory.base)) {
    return Error(Errc::invalid_argument, "its " + std::to_string(memory.bytes) + " bytes end behind the last address");
  }
  if (memory.device.ordinal < Device::kHost) {
    return Error(Errc::invalid_argument, "device " + std::to_string(memory.device.ordinal) + " is none");
  }
  if (memory.dtype && dtype_bytes(*memory.dtype) == 0) return Error(Errc::invalid_argument, "its dtype is none");
  return {};
}

Destination destination_of(const Region& place, std::uint32_t element_bytes) {
  return {place.offset, place.rect.rows, place.rect.cols, place.row_stride, place.col_stride, element_bytes};
}

/// Bytes from the slice's first one to behind its last; nothing if that is more than `most`.
std::optional<std::uint64_t> extent(const Destination& d, std::uint64_t most) {
  const auto span = [&](std::uint64_t count, std::uint64_t stride) -> std::optional<std::uint64_t> {
    if (count == 1 || stride == 0) return 0;
    if ((count - 1) > most / stride) return std::nullopt;
    return (count - 1) * stride;
  };
  const auto rows = span(d.rows, d.row_stride);
  const auto cols = span(d.cols, d.col_stride);
  if (!rows || !cols || *rows > most - *cols || d.element_bytes > most - *cols - *rows) return std::nullopt;
  return *rows + *cols + d.element_bytes;
}

/// Of one slice with elements, inside its tensor.
Status check_place(const Tensor& tensor, const LiveMemory& memory, const Destination& d) {
  const std::uint64_t width = tensor.element_bytes;
  if (memory.dtype && *memory.dtype != tensor.spec.dtype) {
    return Error(Errc::invalid_argument, "the tensor is " + std::string(to_string(tensor.spec.dtype)) +
                                             ", the memory " + std::string(to_string(*memory.dtype)));
  }
  const auto strided = [&](std::uint64_t count, std::uint64_t stride) { return count == 1 || stride % width == 0; };
  if ((reinterpret_cast<std::uintptr_t>(memory.base) + d.offset) % width != 0 || !strided(d.rows, d.row_stride) ||
      !strided(d.cols, d.col_stride)) {
    return Error(Errc::invalid_argument, "its elements are not aligned to their width of " + std::to_string(width) +
                                             " bytes (strides " + std::to_string(d.row_stride) + " and " +
                                             std::to_string(d.col_stride) + ")");
  }
  const auto bytes = d.offset <= memory.bytes ? extent(d, memory.bytes - d.offset) : std::nullopt;
  if (!bytes) {
    return Error(Errc::out_of_range, "with strides of " + std::to_string(d.row_stride) + " and " +
                                         std::to_string(d.col_stride) + " bytes it passes the end of the memory's " +
                                         std::to_string(memory.bytes) + " bytes");
  }
  if (folds_onto_itself(d)) {
    return Error(Errc::invalid_argument, "its strides of " + std::to_string(d.row_stride) + " and " +
                                             std::to_string(d.col_stride) + " bytes lay several elements on one place");
  }
  return {};
}

}  // namespace

std::string describe(const PlacementPlan& plan, std::size_t slice) {
  const PlacedSlice& s = plan.slices[slice];
  const std::string memory =
      s.memory < plan.memories.size() ? "'" + plan.memories[s.memory].name + "'" : "memory " + std::to_string(s.memory);
  return "slice " + std::to_string(slice) + " (" + s.tensor + " " + rect_text(s.rect) + ", into " + memory +
         " at byte " + std::to_string(s.offset) + ")";
}

Status check_memories(std::span<const LiveMemory> memories) {
  std::unordered_set<std::string_view> names;
  for (const LiveMemory& memory : memories) {
    DS_TRY(check_memory(memory).with_context("live memory '" + memory.name + "'"));
    if (!names.insert(memory.name).second) {
      return Error(Errc::invalid_argument, "two live memories are called '" + memory.name + "'");
    }
  }
  std::vector<const LiveMemory*> sorted;
  sorted.reserve(memories.size());
  for (const LiveMemory& memory : memories) sorted.push_back(&memory);
  std::sort(sorted.begin(), sorted.end(), [](const LiveMemory* a, const LiveMemory* b) {
    return a->device.ordinal != b->device.ordinal ? a->device.ordinal < b->device.ordinal : a->base < b->base;
  });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const LiveMemory& before = *sorted[i - 1];
    const LiveMemory& memory = *sorted[i];
    if (before.device != memory.device || before.base + before.bytes <= memory.base) continue;
    return Error(Errc::invalid_argument, "live memories '" + before.name + "' and '" + memory.name +
                                             "' overlap: what several parameters share is one memory");
  }
  return {};
}

Result<TensorSlice> find_slice(const Layout& layout, const std::string& tensor, const std::optional<Rect>& rect,
                               const char* what, std::size_t index) {
  const auto found = layout.find(tensor);
  const auto named = [&] { return std::string(what) + " " + std::to_string(index); };
  if (!found) return Error(Errc::not_found, named() + ": the layout has no tensor '" + tensor + "'");
  const Tensor& t = layout.tensors()[*found];
  const TensorSlice slice{*found, rect.value_or(Rect{0, 0, t.rows, t.cols})};
  if (Status inside = check_slice(layout, slice); !inside.ok()) return std::move(inside).error().with_context(named());
  return slice;
}

Result<std::vector<BoundSlice>> bind_slices(const Layout& layout, const PlacementPlan& plan) {
  std::vector<BoundSlice> bound;
  bound.reserve(plan.slices.size());
  for (std::size_t i = 0; i < plan.slices.size(); ++i) {
    const PlacedSlice& s = plan.slices[i];
    DS_ASSIGN(const TensorSlice found, find_slice(layout, s.tensor, s.rect, "slice", i));
    if (s.memory >= plan.memories.size()) {
      return Error(Errc::out_of_range,
                   describe(plan, i) + ": there are " + std::to_string(plan.memories.size()) + " live memories");
    }
    if (s.rect.rows == 0 || s.rect.cols == 0) continue;
    const Tensor& tensor = layout.tensors()[found.tensor];
    const BoundSlice slice{
        found.tensor, static_cast<std::uint32_t>(i), {s.rect, s.memory, s.offset, s.row_stride, s.col_stride}};
    Status valid = check_place(tensor, plan.memories[s.memory], destination_of(slice.place, tensor.element_bytes));
    if (!valid.ok()) return std::move(valid).error().with_context(describe(plan, i));
    bound.push_back(slice);
  }
  return bound;
}

Result<std::vector<TensorSlice>> bind_ignored(const Layout& layout, const PlacementPlan& plan) {
  std::vector<TensorSlice> ignored;
  ignored.reserve(plan.ignored.size());
  for (std::size_t i = 0; i < plan.ignored.size(); ++i) {
    DS_ASSIGN(const TensorSlice slice,
              find_slice(layout, plan.ignored[i].tensor, plan.ignored[i].rect, "ignored slice", i));
    if (slice.rect.rows != 0 && slice.rect.cols != 0) ignored.push_back(slice);
  }
  return ignored;
}

Status check_destinations(const Layout& layout, const PlacementPlan& plan, std::span<const BoundSlice> slices) {
  std::vector<std::size_t> order(slices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return slices[a].place.memory < slices[b].place.memory; });
  std::vector<Destination> in_memory;
  for (std::size_t first = 0; first < order.size();) {
    const std::uint32_t memory = slices[order[first]].place.memory;
    in_memory.clear();
    std::size_t end = first;
    for (; end < order.size() && slices[order[end]].place.memory == memory; ++end) {
      const BoundSlice& slice = slices[order[end]];
      in_memory.push_back(destination_of(slice.place, layout.tensors()[slice.tensor].element_bytes));
    }
    if (const auto pair = find_shared_byte(in_memory)) {
      return Error(Errc::coverage, "'" + plan.memories[memory].name + "' would be written twice: by " +
                                       describe(plan, slices[order[first + pair->first]].index) + " and " +
                                       describe(plan, slices[order[first + pair->second]].index));
    }
    first = end;
  }
  return {};
}

}  // namespace deltasync
