// Which files of a HuggingFace model directory hold the weights, and which others belong to the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/hf.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

struct IndexedTensor {
  std::string tensor;
  std::string file;  ///< relative name
};

struct WeightFileList {
  std::vector<std::string> files;      ///< relative names in the order in which they are laid out
  std::vector<IndexedTensor> indexed;  ///< what model.safetensors.index.json says; empty without one
};

/// The text of a `model.safetensors.index.json`: files in name order. corrupt for what is no index.
Result<WeightFileList> parse_weight_index(std::string_view text);

/// `model.safetensors`, or the files of `model.safetensors.index.json` in name order, or every `*.safetensors` in name
/// order. not_found if there is none; corrupt for an index that is no index.
Result<WeightFileList> find_weight_files(const std::filesystem::path& dir);

/// Every file but `weights` that is not hidden, holds no weights in another format, and is at most `bytes_max` large;
/// subdirectories too, in name order.
Result<std::vector<Sidecar::OtherFile>> read_other_files(const std::filesystem::path& dir,
                                                         const std::vector<std::string>& weights,
                                                         std::uint64_t bytes_max);

}  // namespace deltasync
