// Which files of a HuggingFace model directory hold the weights, and which others belong to the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/layout.hpp"
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
Result<std::vector<Sidecar::File>> read_other_files(const std::filesystem::path& dir,
                                                    const std::vector<std::string>& weights, std::uint64_t bytes_max);

/// Where each tensor's bytes lie in the directory that a sidecar describes.
struct HfPlace {
  std::uint32_t file = 0;    ///< index in Sidecar::weights
  std::uint64_t offset = 0;  ///< bytes from the start of that file
};
/// One entry per layout tensor. Fails if the sidecar misses a tensor of the layout.
Result<std::vector<HfPlace>> hf_places(const Layout& layout, const Sidecar& sidecar);

}  // namespace deltasync
