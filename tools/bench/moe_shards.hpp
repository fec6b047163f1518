// A model as a trainer's ranks hold it: a decoder with experts, of which tensor and expert parallelism give each rank
// an eighth, under Megatron's names. In bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "deltasync/export.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::bench {

inline constexpr std::uint32_t kExportRanks = 8;

struct MoeShards {
  std::string config;                           ///< of the HF model: config.json
  std::vector<TensorSpec> specs;                ///< of the HF model
  std::vector<std::vector<ShardPiece>> pieces;  ///< of each rank
  std::vector<std::vector<std::uint64_t>> at;   ///< where each piece begins in a memory that has all, in bytes
  std::uint64_t bytes = 0;                      ///< of that memory
};

/// About `model_bytes`; at least one layer.
MoeShards moe_shards(std::uint64_t model_bytes);

}  // namespace deltasync::bench
