// HuggingFace model directories: reading their layout and tensors, and writing them again bit for bit.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// What a HF directory needs beside its tensors' bytes. Travels with a layout but is no part of its digest.
struct Sidecar {
  /// One safetensors file: its exact header (the 8-byte length and the JSON), then the data section, which holds
  /// the listed layout tensors one after the other without gaps.
  struct WeightFile {
    std::string name;                    ///< relative, no "..", e.g. "model-00001-of-00004.safetensors"
    std::vector<std::byte> header;       ///< 8 + JSON bytes
    std::vector<std::uint32_t> tensors;  ///< layout indices in file order
  };
  /// Any other file, byte for byte: config.json, tokenizer.json, model.safetensors.index.json …
  struct OtherFile {
    std::string name;
    std::vector<std::byte> bytes;
  };
  std::vector<WeightFile> weights;
  std::vector<OtherFile> others;

  bool empty() const noexcept { return weights.empty() && others.empty(); }
  std::vector<std::byte> encode() const;
  /// Checks names (relative, unique), header sizes and that tensors refer to `layout`, each at most once.
  static Result<Sidecar> decode(std::span<const std::byte> encoded, const Layout& layout);
};

/// A model directory opened for reading: files are mapped, nothing is copied.
class HfModel {
 public:
  struct Options {
    std::uint64_t tensor_parallel = 1;               ///< cuts by add_even_cuts
    std::uint64_t other_file_bytes_max = 64u << 20;  ///< larger side files (and *.bin, *.pt …) are left out
  };
  /// `model.safetensors`, or all files named by `model.safetensors.index.json`, or every `*.safetensors` in name order.
  /// Layout order: file order, then offset order in each file. Errors name file and tensor.
  static Result<HfModel> open(const std::filesystem::path& dir, const Options& options);
  static Result<HfModel> open(const std::filesystem::path& dir) { return open(dir, Options()); }

  const LayoutPtr& layout() const noexcept { return layout_; }
  const Sidecar& sidecar() const noexcept { return sidecar_; }
  /// Row-major bytes of a tensor (layout index), valid while this object lives.
  std::span<const std::byte> tensor(std::uint32_t index) const;

  HfModel(HfModel&&) noexcept;
  HfModel& operator=(HfModel&&) noexcept;
  ~HfModel();

 private:
  HfModel();
  struct Mapping;
  LayoutPtr layout_;
  Sidecar sidecar_;
  std::vector<std::unique_ptr<Mapping>> files_;
  std::vector<std::span<const std::byte>> tensors_;
};

/// Where each tensor's bytes lie in the directory that a sidecar describes.
struct HfPlace {
  std::uint32_t file = 0;    ///< index in Sidecar::weights
  std::uint64_t offset = 0;  ///< bytes from the start of that file
};
/// One entry per layout tensor. Fails if the sidecar misses a tensor of the layout.
Result<std::vector<HfPlace>> hf_places(const Layout& layout, const Sidecar& sidecar);

/// A sidecar for a layout that did not come from a directory: one `model.safetensors` with all tensors.
Sidecar make_sidecar(const Layout& layout);

}  // namespace deltasync
