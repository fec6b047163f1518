// Placements of the usual decoder layers, from a tensor-parallel rank: what goes where in fused, stacked, transposed
// and padded parameters. Plans that an engine's own loader was traced for need none of this (deltasync/placement.hpp).
//
// An HF weight is *out × in*: its rows make outputs, its columns take inputs. A 1-D tensor (bias, norm) is out × 1.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// One of several that share a model.
struct Rank {
  std::uint64_t index = 0;
  std::uint64_t count = 1;
};

/// A parameter in live memory, or a part of one, as out × in elements: (o, i) at offset + o·out_stride + i·in_stride.
struct ParamView {
  std::uint32_t memory = 0;  ///< as DecoderPlacement::add_memory named it
  std::uint64_t offset = 0;  ///< bytes
  std::uint64_t outs = 0;
  std::uint64_t ins = 0;
  std::uint64_t out_stride = 0;  ///< bytes
  std::uint64_t in_stride = 0;

  /// Stored row by row without gaps. For a 1-D parameter ins is 1.
  static ParamView dense(std::uint32_t memory, std::uint64_t outs, std::uint64_t ins, std::uint64_t element_bytes,
                         std::uint64_t offset = 0);
  /// A parameter that is stored as in × out, row by row without gaps.
  static ParamView dense_transposed(std::uint32_t memory, std::uint64_t outs, std::uint64_t ins,
                                    std::uint64_t element_bytes, std::uint64_t offset = 0);
  /// Its outs (its ins) from `first` on; beyond the end the result has none.
  ParamView out_range(std::uint64_t first, std::uint64_t count) const;
  ParamView in_range(std::uint64_t first, std::uint64_t count) const;
};

/// `count` parameters that are alike, `stride` bytes apart: [E, …].
struct StackedView {
  ParamView first;
  std::uint64_t stride = 0;
  std::uint64_t count = 0;
  ParamView at(std::uint64_t index) const;
};

/// Which half of a fused gate and up projection comes first in memory.
enum class GateUp : std::uint8_t { gate_first, up_first };

/// The weights of one expert: tensors of their own, or slices of stacked ones (row_slice(layout, tensor, e, experts)).
struct Expert {
  Slice gate;
  Slice up;
  Slice down;
};
/// Tensors of `count` experts, named by patterns in which "{}" stands for the expert's number:
/// "model.layers.3.mlp.experts.{}.gate_proj.weight".
std::vector<Expert> named_experts(const std::string& gate, const std::string& up, const std::string& down,
                                  std::uint64_t count);
/// The experts of an expert-parallel rank, in the order of their places: consecutive ones, one more for each of the
/// first few ranks where they do not divide evenly.
std::vector<std::uint64_t> consecutive_experts(std::uint64_t experts, Rank rank);

/// Collects a plan. Each call accounts for all elements of the HF slices that it names: those that this rank keeps are
/// placed, and what no call places is ignored. `to` has exactly the rank's part. Errors name the tensor: not_found,
/// out_of_range, invalid_argument (parts that do not divide, shapes that differ); after one the plan is of no use.
class DecoderPlacement {
 public:
  /// `rank` is the tensor-parallel one.
  explicit DecoderPlacement(LayoutPtr layout, Rank rank = {});

  std::uint32_t add_memory(LiveMemory memory);

  /// Kept by all ranks: norms, routers, biases of row-parallel layers.
  Status whole(const Slice& from, const ParamView& to);
  /// Column-parallel: each rank has its part of the outs.
  Status out_part(const Slice& from, const ParamView& to);
  /// Row-parallel: each rank has its part of the ins.
  Status in_part(const Slice& from, const ParamView& to);
  /// q, k, v below each other. Where there are more ranks than key heads, several ranks keep the same one. Works for
  /// weights, biases and block scales: what divides into as many equal parts as there are heads.
  Status qkv(const Slice& q, const Slice& k, const Slice& v, std::uint64_t heads, std::uint64_t kv_heads,
             const ParamView& to);
  /// The rank's parts of both, below each other.
  Status gate_up(const Slice& gate, const Slice& up, const ParamView& to, GateUp order = GateUp::gate_first);
  /// Rows of a vocabulary that is padded to `padded` rows and divided then: `to` has padded / ranks, of which the last
  /// ones may be padding, which is never written. Tied embeddings are one memory (call it once; `ignore` the second
  /// tensor if there is one) or two that are both placed (call it twice).
  Status vocabulary(const Slice& from, std::uint64_t padded, const ParamView& to);
  /// Stacked experts: expert `local[i]` goes to place i of both views, divided over `rank`; all others are ignored.
  Status experts(std::span<const Expert> experts, std::span<const std::uint64_t> local, Rank rank,
                 const StackedView& gate_up, const StackedView& down, GateUp order = GateUp::gate_first);
  /// Not kept here: layers of another pipeline stage, a second name of what is placed already.
  Status ignore(const Slice& from);

  /// What was collected, with everything that is accounted for and has no place as ignored.
  PlacementPlan plan() const;
  Result<std::shared_ptr<const Placement>> build() const { return Placement::build(layout_, plan()); }

 private:
  struct Block;
  Result<Block> find(const Slice& from) const;
  Status place(const Block& block, std::uint64_t out, std::uint64_t outs, std::uint64_t in, std::uint64_t ins,
               const ParamView& to);
  Status place_outs(const Block& block, std::uint64_t out, std::uint64_t outs, const ParamView& to);
  Status out_part(const Block& block, Rank rank, const ParamView& to);
  Status in_part(const Block& block, Rank rank, const ParamView& to);
  Status gate_up(const Slice& gate, const Slice& up, Rank rank, const ParamView& to, GateUp order);

  LayoutPtr layout_;
  Rank rank_;
  PlacementPlan plan_;
  std::vector<Slice> accounted_;
};

}  // namespace deltasync
