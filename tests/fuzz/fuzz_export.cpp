// A family page, config.json, the HF tensors (as a shard's pieces) and a shard for each rank, with lines "----" between
// them. A plan that is made writes every element once, within the memory that it speaks of, and as rectangles the same.
#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "deltasync/export.hpp"
#include "export/plan.hpp"

namespace {

using namespace deltasync;

constexpr std::string_view kBetween = "\n----\n";
constexpr std::uint64_t kElementsMax = 1 << 14;  ///< of plans that are carried out

std::vector<std::string_view> sections(std::string_view text) {
  std::vector<std::string_view> out;
  for (;;) {
    const std::size_t end = text.find(kBetween);
    out.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return out;
    text.remove_prefix(end + kBetween.size());
  }
}

std::uint64_t elements(const std::vector<std::uint64_t>& shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t size : shape) count *= size;
  return count;
}

void require(bool holds) {
  if (!holds) std::abort();
}

/// Adds 1 to each element of the tensor that the copy writes.
void count_elements(const ExportCopy& copy, std::span<std::uint8_t> counts) {
  std::vector<std::uint64_t> places{copy.target_offset};
  for (const CopyStep& step : copy.steps) {
    std::vector<std::uint64_t> next;
    for (const std::uint64_t place : places) {
      for (std::uint64_t i = 0; i < step.count; ++i) next.push_back(place + i * step.target_stride);
    }
    places = std::move(next);
  }
  for (const std::uint64_t place : places) {
    require(place < counts.size());
    ++counts[place];
  }
}

void carry_out(const ExportPlan& plan, const std::vector<std::vector<ShardPiece>>& shards) {
  std::vector<std::vector<std::uint8_t>> counts;
  for (const Tensor& tensor : plan.layout->tensors()) counts.emplace_back(tensor.rows * tensor.cols);
  for (const ExportCopy& copy : plan.copies) {
    const ShardPiece& piece = shards.at(copy.rank).at(copy.piece);
    const Tensor& tensor = plan.layout->tensors()[copy.tensor];
    require(copy.row < plan.rows.size());
    count_elements(copy, counts[copy.tensor]);
    std::vector<std::byte> source(elements(piece.shape) * dtype_bytes(piece.dtype));
    std::vector<std::byte> target(tensor.bytes);
    require(apply_on_host(plan, copy, piece.dtype, source, target).ok());
    const auto slices = export_slices(plan, copy, piece.dtype);
    if (!slices) continue;  // computed
    std::uint64_t written = 0;
    for (const PlacedSlice& slice : *slices) {
      require(slice.rect.row + slice.rect.rows <= tensor.rows && slice.rect.col + slice.rect.cols <= tensor.cols);
      const std::uint64_t last = slice.offset + (slice.rect.rows - 1) * slice.row_stride +
                                 (slice.rect.cols - 1) * slice.col_stride + dtype_bytes(piece.dtype);
      require(last <= source.size());
      written += slice.rect.elements();
    }
    require(written == copy.elements());
  }
  for (std::uint32_t i = 0; i < counts.size(); ++i) {
    const bool constant = std::find(plan.constants.begin(), plan.constants.end(), i) != plan.constants.end();
    require(std::all_of(counts[i].begin(), counts[i].end(), [&](std::uint8_t n) { return n == (constant ? 0 : 1); }));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto parts = sections({reinterpret_cast<const char*>(data), size});
  const auto page = exporting::parse_family(parts[0], "page");
  if (!page || parts.size() < 3) return 0;
  const auto wanted = exporting::parse_shard(parts[2], "tensors");
  std::vector<std::vector<ShardPiece>> shards;
  for (std::size_t i = 3; i < parts.size(); ++i) {
    auto shard = exporting::parse_shard(parts[i], "shard");
    if (!shard) return 0;
    shards.push_back(std::move(shard->second));
  }
  if (!wanted) return 0;
  std::vector<TensorSpec> specs;
  for (const ShardPiece& one : wanted->second) {
    specs.push_back({.name = one.key, .dtype = one.dtype, .shape = one.global_shape});
  }
  const auto layout = Layout::build(std::move(specs));
  if (!layout) return 0;
  const auto plan = exporting::plan_export(*page, parts[1], *layout, shards);
  if (!plan) {
    require(!plan.error().message().empty());
    return 0;
  }
  (void)exporting::to_json(*plan);
  if ((*layout)->elements() <= kElementsMax) carry_out(*plan, shards);
  return 0;
}
