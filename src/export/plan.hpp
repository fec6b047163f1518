// Which bytes of which rank's memory are which bytes of the HF tensors: made once from what all ranks hold, a family's
// page and the HF directory that the run began from. Pure: no file, no memory of a trainer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "export/family.hpp"

namespace deltasync::exporting {

/// What a rank holds of a tensor of the trainer: the box that begins at `offset`, row-major and without gaps.
struct ShardPiece {
  std::string key;  ///< of the whole tensor, with the numbers of the whole model's layers and experts
  Dtype dtype = Dtype::bf16;
  std::vector<std::uint64_t> global_shape;
  std::vector<std::uint64_t> offset;
  std::vector<std::uint64_t> shape;
};

/// The elements that a copy steps through along one dimension.
struct CopyStep {
  std::uint64_t count = 1;
  std::uint64_t source_stride = 1;  ///< in elements, as all of a copy
  std::uint64_t target_stride = 1;

  bool operator==(const CopyStep&) const = default;
};

/// Elements of a piece that are elements of a HF tensor; cast where the dtypes differ.
struct ExportCopy {
  std::uint32_t tensor = 0;  ///< of the layout
  std::uint32_t rank = 0;
  std::uint32_t piece = 0;  ///< of those that the rank gave
  std::uint32_t row = 0;    ///< of ExportPlan::rows
  std::uint64_t source_offset = 0;
  std::uint64_t target_offset = 0;
  std::vector<CopyStep> steps;  ///< the largest target stride first; none: one element
  double add = 0;               ///< to each value

  std::uint64_t elements() const;
};

struct ExportPlan {
  LayoutPtr layout;
  std::string family;
  std::vector<std::string> rows;         ///< labels
  std::vector<ExportCopy> copies;        ///< sorted by tensor and target
  std::vector<std::uint32_t> constants;  ///< tensors whose bytes are the directory's
  std::vector<std::string> ignored;      ///< keys of the trainer that go nowhere; KEY[PART]: of which a part does
};

/// `config`: the text of config.json. `shards`: the pieces of each rank; where several have the same box the first has
/// it. Every tensor of the layout is written once, and every tensor of the trainer used or ignored.
///   - Errc::coverage: what is not, on both sides, by name.
///   - Errc::layout_mismatch: a shape that the page does not make; the message names row and tensors.
///   - Errc::unsupported: a cast that there is none for.
///   - Errc::invalid_argument: a config or page that cannot be used.
Result<ExportPlan> plan_export(const Family& family, std::string_view config, LayoutPtr layout,
                               std::span<const std::vector<ShardPiece>> shards,
                               std::span<const std::string> ignored = {});

/// The architectures that config.json names.
Result<std::vector<std::string>> architectures_of(std::string_view config);

/// Carries out one copy. `source`: the piece; `target`: the whole HF tensor.
///   - Errc::out_of_range: memory that is smaller than what the plan speaks of.
Status apply_on_host(const ExportPlan& plan, const ExportCopy& copy, Dtype source_dtype,
                     std::span<const std::byte> source, std::span<std::byte> target);

/// A rank's pieces from {"rank": 0, "pieces": [{"key", "dtype", "global_shape", "offset", "shape"}, …]}, and its
/// number.
Result<std::pair<std::uint32_t, std::vector<ShardPiece>>> parse_shard(std::string_view json, std::string_view file);

/// As docs/reference/export.md has it.
std::string to_json(const ExportPlan& plan);

}  // namespace deltasync::exporting
