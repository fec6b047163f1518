// What all ranks together hold of the trainer's tensors.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "deltasync/result.hpp"
#include "export/plan.hpp"

namespace deltasync::exporting {

/// A piece, which is not owned, and who has it.
struct PieceAt {
  std::uint32_t rank;
  std::uint32_t index;  ///< of those that the rank gave
  const ShardPiece* piece;
};

/// All pieces of one tensor of the trainer: they cover it, and do not overlap.
struct TrainerTensor {
  std::vector<PieceAt> pieces;  ///< each box once, of the first rank that has it
  std::uint64_t elements = 0;
  const ShardPiece& first() const { return *pieces.front().piece; }
};

/// By their keys. `shards`: the pieces of each rank; they are to outlive the result.
///   - Errc::invalid_argument, Errc::out_of_range: a piece that cannot be; the message names it and its rank.
///   - Errc::layout_mismatch: ranks that say different shapes or dtypes of one tensor.
///   - Errc::coverage: pieces that overlap, or elements that no rank has.
Result<std::map<std::string, TrainerTensor>> collect_tensors(std::span<const std::vector<ShardPiece>> shards);

/// "[64, 6]"
std::string shape_text(std::span<const std::uint64_t> shape);

}  // namespace deltasync::exporting
