// From a trainer's tensors to those of a HF directory: which elements of which rank's memory are which elements of the
// HF tensors. export.md has family pages and the rules. Pure: no file, socket, thread or device.
//
// ```cpp
// DS_ASSIGN(const HfModel model, HfModel::open("/models/qwen3-8b"));  // that the run began from
// const std::string config = R"({"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 16})";
// const std::vector<std::vector<ShardPiece>> shards = {{{.key = "decoder.final_layernorm.weight",
//                                                        .dtype = Dtype::bf16,
//                                                        .global_shape = {4096},
//                                                        .offset = {0},
//                                                        .shape = {4096}}}};
// DS_ASSIGN(const ExportPlan plan, plan_export({}, config, model.layout(), shards));
// const std::vector<std::byte> norm(4096 * 2);                               // rank 0's first piece
// std::vector<std::byte> half(model.layout()->half_bytes());
// for (const ExportCopy& copy : plan.copies) {
//   const Tensor& tensor = plan.layout->tensors()[copy.tensor];
//   DS_TRY(apply_on_host(plan, copy, Dtype::bf16, norm, std::span(half).subspan(tensor.offset, tensor.bytes)));
// }
// ```
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// What a rank holds of a tensor of the trainer: the box that begins at `offset`, row-major and without gaps. Sizes are
/// in elements.
struct ShardPiece {
  std::string key = {};  ///< of the whole tensor, with the numbers of the whole model's layers and experts
  Dtype dtype = Dtype::bf16;
  std::vector<std::uint64_t> global_shape = {};
  std::vector<std::uint64_t> offset = {};  ///< as long as global_shape, and so is `shape`
  std::vector<std::uint64_t> shape = {};
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
  std::vector<CopyStep> steps = {};  ///< the largest target stride first; none: one element
  double add = 0;                    ///< to each value

  std::uint64_t elements() const;
};

/// A tensor of fp8 codes. Copies to it speak of the values before, which are quantised where all of a block are there
/// (export.md); no copy writes its scales.
struct QuantisedTensor {
  std::uint32_t tensor = 0;  ///< of the layout; two dimensions
  std::uint32_t scale = 0;   ///< tensor of its scales
  bool by_block = true;      ///< or it has one scale, by another formula
  std::uint64_t block_rows = 0;
  std::uint64_t block_cols = 0;
  bool powers_of_two = false;  ///< its scales are

  bool operator==(const QuantisedTensor&) const = default;
};

/// All that is copied. The ranks make the same one from the same shards, and each carries out the copies of its rank.
struct ExportPlan {
  LayoutPtr layout = {};
  std::string family = {};                    ///< the page's name
  std::vector<std::string> rows = {};         ///< "PAGE:LINE"
  std::vector<ExportCopy> copies = {};        ///< sorted by tensor and target
  std::vector<std::uint32_t> constants = {};  ///< layout indices of tensors whose bytes are the directory's
  std::vector<std::string> ignored = {};      ///< keys of the trainer that go nowhere; KEY[PART]: of which a part does
  std::vector<QuantisedTensor> quantised = {};  ///< in the layout's order
};

/// A family page: how the tensors of a trainer's model family become those of a HF directory. Immutable, for any
/// thread; copies are cheap.
class ExportFamily {
 public:
  const std::string& name() const noexcept;
  /// Of config.json, that the page is for.
  const std::vector<std::string>& architectures() const noexcept;

 private:
  struct Page;
  explicit ExportFamily(std::shared_ptr<const Page> page);
  friend Result<ExportFamily> parse_family(std::string_view toml, std::string_view file);
  friend Result<ExportPlan> plan_export(std::span<const ExportFamily> families, std::string_view config,
                                        LayoutPtr layout, std::span<const std::vector<ShardPiece>> shards,
                                        std::span<const std::string> ignored);
  std::shared_ptr<const Page> page_;
};

/// `toml`: the text of a page; `file`: for messages, which say "FILE:LINE: …".
///   - Errc::invalid_argument: no TOML, a key that is not known, or one that is missing.
Result<ExportFamily> parse_family(std::string_view toml, std::string_view file);

/// By the page for the architecture that `config`, the text of config.json, names: of `families`, or of those that come
/// with deltasync. `layout`: of the HF directory that the run began from. `shards`: the pieces of each rank; where
/// several have the same box the first has it. `ignored`: keys of the trainer that are no part of the model, `*` for
/// any part of one. Every tensor of the layout is written once, and every tensor of the trainer used or ignored.
///   - Errc::not_found: no page for the architecture; the message names those that there are.
///   - Errc::coverage: what is not written or used, on both sides, by name; pieces that overlap, or that nobody has.
///   - Errc::layout_mismatch: a shape that the page does not make (the message names row and tensors), or ranks that
///     say different things of one tensor.
///   - Errc::unsupported: a cast that there is none for; a quantisation that is not exported.
///   - Errc::invalid_argument, Errc::out_of_range: a config, page or piece that cannot be used; a page for another
///     architecture, from which nothing is inherited.
Result<ExportPlan> plan_export(std::span<const ExportFamily> families, std::string_view config, LayoutPtr layout,
                               std::span<const std::vector<ShardPiece>> shards,
                               std::span<const std::string> ignored = {});

/// Carries out one copy. `source`: the piece, all of it; `target`: the whole HF tensor, in the layout's dtype. Neither
/// has to be aligned, and they do not overlap. Copies of one plan write disjoint elements: any threads.
///   - Errc::out_of_range: memory that is smaller than what the copy speaks of, or no such tensor.
///   - Errc::unsupported: a cast that there is none for; a quantised tensor, whose values come of many copies.
Status apply_on_host(const ExportPlan& plan, const ExportCopy& copy, Dtype source_dtype,
                     std::span<const std::byte> source, std::span<std::byte> target);

/// What a copy writes as rectangles, for Writer::write(): offset and strides in bytes of its piece, which `memory` is
/// the number of.
///   - Errc::unsupported: it casts, adds, or moves elements one by one (in more than 65,536 rectangles): make the
///   tensor
///     by apply_on_host().
///   - Errc::out_of_range: a copy that is none of the plan's.
Result<std::vector<PlacedSlice>> export_slices(const ExportPlan& plan, const ExportCopy& copy, Dtype source_dtype);

}  // namespace deltasync
