// What a model is made of: a Layout lists its HF tensors and says where each lies in a half. Slices name parts of it, a
// Sidecar has what a model directory needs besides, an HfModel reads both from such a directory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync {

/// Element types of safetensors files. Values are part of the canonical encoding: never renumber.
enum class Dtype : std::uint8_t {
  f64 = 1,
  f32 = 2,
  f16 = 3,
  bf16 = 4,
  f8_e4m3 = 5,
  f8_e5m2 = 6,
  i64 = 7,
  i32 = 8,
  i16 = 9,
  i8 = 10,
  u8 = 11,
  boolean = 12,
  u16 = 13,
  u32 = 14,
  u64 = 15,
  f8_e8m0 = 16,
  f8_e4m3fnuz = 17,
  f8_e5m2fnuz = 18,
  c64 = 19,  ///< two F32, the real part first
  f4 = 20,   ///< two in a byte: see dtype_packed
};
/// Width of one element of the 2-D view in bytes: 1, 2, 4 or 8. 0 for a value that is no Dtype.
std::size_t dtype_bytes(Dtype dtype) noexcept;
/// How many values of the last dimension are one element of the 2-D view: 2 for F4, whose pairs share a byte, else 1.
std::size_t dtype_packed(Dtype dtype) noexcept;
/// True for sign-magnitude encodings (F64 to BF16, F8_* but E8M0): the ulp map of delta_format.md applies.
bool dtype_is_float(Dtype dtype) noexcept;
/// The safetensors spelling: "BF16", "F8_E4M3", "BOOL" …
std::string_view to_string(Dtype dtype) noexcept;
std::optional<Dtype> dtype_from_string(std::string_view name) noexcept;

inline constexpr std::size_t kTensorNameBytesMax = 1024;
inline constexpr std::size_t kTensorDimsMax = 16;
inline constexpr std::size_t kTensorsMax = 1'000'000;
inline constexpr std::size_t kTensorCutsMax = 65'536;  ///< of one tensor, per dimension of the 2-D view
inline constexpr std::uint64_t kModelBytesMax = std::uint64_t{1} << 43;  ///< 8 TiB
inline constexpr std::uint32_t kTileElementsMax = 65'536;
inline constexpr std::size_t kTensorAlignment = 64;  ///< bytes; every tensor starts at a multiple in a half

/// One HF tensor as the user describes it. All else speaks of its 2-D view: columns are the last dimension, rows the
/// product of the others. A scalar is 1×1, a 1-D tensor is 1×n; with any zero dimension it is 0×0. Where values are
/// packed (dtype_packed), a column is a pack, and the last dimension a multiple of it.
struct TensorSpec {
  std::string name = {};  ///< UTF-8, at most kTensorNameBytesMax bytes
  Dtype dtype = Dtype::bf16;
  std::vector<std::uint64_t> shape = {};
  /// Rows of the 2-D view where slices may begin, strictly increasing, in (0, rows): tensor-parallel boundaries. Tiles
  /// begin again at each, so that a slice between cuts is whole tiles.
  std::vector<std::uint64_t> row_cuts = {};
  std::vector<std::uint64_t> col_cuts = {};  ///< the same of columns

  bool operator==(const TensorSpec&) const = default;
};

/// A rectangle of a tensor's 2-D view, in elements: [row, row + rows) × [col, col + cols).
struct Rect {
  std::uint64_t row = 0;
  std::uint64_t col = 0;
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;

  bool operator==(const Rect&) const = default;
  std::uint64_t elements() const noexcept { return rows * cols; }
};

/// A tensor of a layout: its spec, and what follows from that.
struct Tensor {
  TensorSpec spec;
  std::uint64_t rows = 0;  ///< of the 2-D view
  std::uint64_t cols = 0;
  std::uint32_t element_bytes = 0;
  std::uint64_t offset = 0;      ///< of the first byte in a half; a multiple of kTensorAlignment
  std::uint64_t bytes = 0;       ///< rows × cols × element_bytes
  std::uint64_t first_tile = 0;  ///< global index of its first tile
  std::uint64_t tile_count = 0;  ///< 0 for an empty tensor

  std::uint64_t row_bytes() const noexcept { return cols * element_bytes; }
};

/// XXH3-128 in xxHash's canonical (big-endian) byte order.
struct Digest128 {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const Digest128&) const = default;
};
std::string to_string(const Digest128& digest);  ///< 32 hex digits

/// The ordered list of a model's tensors and where each lies in a half. Immutable: threads share it by a const pointer
/// without locks. Two layouts with one digest are the same.
///
/// ```cpp
/// auto layout = Layout::build({{.name = "embed.weight", .dtype = Dtype::bf16, .shape = {1000, 64}},
///                              {.name = "norm.weight", .dtype = Dtype::f32, .shape = {64}}});
/// ```
class Layout {
 public:
  /// Checks the specs and derives offsets, tiles and the digest. Errors name the tensor:
  ///   - Errc::unsupported: a dtype that is not known.
  ///   - Errc::invalid_argument: a name that is empty, doubled, too long, no UTF-8 or has a NUL; a shape or cuts that
  ///     cannot be; more tensors or bytes than the limits above allow.
  static Result<std::shared_ptr<const Layout>> build(std::vector<TensorSpec> specs);
  /// The layout of a canonical encoding.
  ///   - Errc::corrupt, Errc::unsupported: anything that encode() would not have produced byte for byte.
  static Result<std::shared_ptr<const Layout>> decode(std::span<const std::byte> encoded);

  /// The canonical encoding (layout_format.md "Layout").
  std::vector<std::byte> encode() const;
  /// XXH3-128 of the canonical encoding.
  const Digest128& digest() const noexcept { return digest_; }

  /// In the order of the layout; an index into it names a tensor everywhere else. Valid while the layout lives.
  std::span<const Tensor> tensors() const noexcept { return tensors_; }
  /// The index of a tensor, or nothing.
  std::optional<std::uint32_t> find(std::string_view name) const;

  /// Bytes of a half: the end of the last tensor, rounded up to kTensorAlignment. Padding bytes are zero.
  std::uint64_t half_bytes() const noexcept { return half_bytes_; }
  /// Sum of the tensors' bytes, padding left out: what "full size" means in reports.
  std::uint64_t model_bytes() const noexcept { return model_bytes_; }
  std::uint64_t elements() const noexcept { return elements_; }
  std::uint64_t tile_count() const noexcept { return tile_count_; }

  /// Index of the tensor that has a tile (< tile_count()). O(log tensors).
  std::uint32_t tensor_of_tile(std::uint64_t index) const;

  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  ~Layout();

 private:
  Layout();
  friend struct Tile tile_of(const Layout& layout, std::uint64_t index);  // src/format/tiling.hpp
  friend struct TileGrid grid_of(const Layout& layout, std::uint32_t tensor);
  friend class LayoutDecoder;
  /// Of tensors whose specs have been checked. The same errors as build().
  static Result<std::shared_ptr<const Layout>> make(std::vector<Tensor> derived);
  struct Index;
  std::vector<Tensor> tensors_;
  std::unique_ptr<Index> index_;  // names and first tiles for look-ups
  Digest128 digest_;
  std::uint64_t half_bytes_ = 0;
  std::uint64_t model_bytes_ = 0;
  std::uint64_t elements_ = 0;
  std::uint64_t tile_count_ = 0;
};
using LayoutPtr = std::shared_ptr<const Layout>;

/// Adds cuts for a tensor-parallel size: at multiples of rows / n and columns / n where n divides them; of 1-D tensors
/// over their columns. `n` = 1 changes nothing.
void add_even_cuts(std::vector<TensorSpec>& specs, std::uint64_t n);

/// A rectangle of one tensor, or all of it.
struct Slice {
  std::string tensor;        ///< its name
  std::optional<Rect> rect;  ///< nothing: the whole tensor
};

/// The rows of rank `index` of `count`: as many for each, and one more for the first few where they do not divide
/// evenly. A 1-D tensor is one row.
///   - Errc::not_found: no such tensor.
///   - Errc::invalid_argument: no such rank, or more ranks than rows.
Result<Slice> row_slice(const Layout& layout, std::string_view tensor, std::uint64_t index, std::uint64_t count);
/// The same of columns.
Result<Slice> col_slice(const Layout& layout, std::string_view tensor, std::uint64_t index, std::uint64_t count);

/// Whose memory: the host's, or a CUDA device's.
struct Device {
  static constexpr std::int32_t kHost = -1;
  std::int32_t ordinal = kHost;  ///< CUDA ordinal within the process, or kHost

  bool is_host() const noexcept { return ordinal == kHost; }
  bool operator==(const Device&) const = default;
};
std::string to_string(Device device);  ///< "host", "cuda:1"

/// What a model directory needs besides its tensors' bytes: how they are split into files, and all other files. It
/// travels with a layout, of whose digest it is no part. Empty: directories get one file, model.safetensors.
struct Sidecar {
  /// A file of the directory.
  struct File {
    std::string name;  ///< relative, no "..", e.g. "model-00001-of-00004.safetensors", "tokenizer/vocab.json"
    /// Of a weight file its exact safetensors header, the 8 bytes of length and the JSON; of any other all of it.
    std::vector<std::byte> bytes;
    /// Of a weight file: layout indices of the tensors whose bytes follow the header, in this order, without gaps.
    std::vector<std::uint32_t> tensors = {};
  };
  std::vector<File> weights;
  std::vector<File> others;  ///< config.json, tokenizer.json, model.safetensors.index.json …
  /// Of the layout of one trainer node of several: what of the model that node has (part.hpp). There are no files then.
  std::vector<std::byte> part = {};

  bool empty() const noexcept { return weights.empty() && others.empty() && part.empty(); }
  std::vector<std::byte> encode() const;
  /// What encode() gave.
  ///   - Errc::corrupt: names that are not relative or not unique, headers of another size, tensors that `layout`
  ///     does not have or that are there twice.
  static Result<Sidecar> decode(std::span<const std::byte> encoded, const Layout& layout);
};

/// A sidecar for a layout that did not come from a directory: one `model.safetensors` with all tensors.
Sidecar make_sidecar(const Layout& layout);

/// A model directory that is open for reading: its files are mapped, nothing is copied. Immutable; any thread.
///
/// ```cpp
/// DS_ASSIGN(const HfModel model, HfModel::open("/models/qwen3-8b"));
/// std::printf("%zu tensors\n", model.layout()->tensors().size());
/// ```
class HfModel {
 public:
  /// Of `dir`: `model.safetensors`, or all files that `model.safetensors.index.json` names, or every `*.safetensors` in
  /// name order. The layout has them in this order, and the tensors of each as they lie in it. `tensor_parallel`: cuts
  /// by add_even_cuts(). Other files larger than `other_file_bytes_max`, and *.bin, *.pt …, are left out of the
  /// sidecar. Errors name file and tensor:
  ///   - Errc::not_found, Errc::permission, Errc::io: the directory, or a file of it.
  ///   - Errc::corrupt, Errc::unsupported: no safetensors, or a dtype that is not known.
  static Result<HfModel> open(const std::filesystem::path& dir, std::uint64_t tensor_parallel = 1,
                              std::uint64_t other_file_bytes_max = std::uint64_t{64} << 20);

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

}  // namespace deltasync
