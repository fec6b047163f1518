// The layout: which HF tensors a model has, in which order, where each lies in a half, and how each is cut
// into tiles. Immutable once built; its identity is a digest of its canonical encoding (layout_format.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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

/// One HF tensor as the user describes it. The 2-D view used everywhere: columns = the last dimension,
/// rows = the product of the others (a scalar is 1×1, a 1-D tensor is 1×n; with any zero dimension it is 0×0). Where
/// values are packed (dtype_packed), a column is a pack, and the last dimension a multiple of it.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::bf16;
  std::vector<std::uint64_t> shape;
  /// Rows and columns (of the 2-D view) where slices may begin, strictly increasing, in (0, rows) and
  /// (0, columns): tensor-parallel boundaries. The tile grid restarts at each.
  std::vector<std::uint64_t> row_cuts;
  std::vector<std::uint64_t> col_cuts;

  bool operator==(const TensorSpec&) const = default;
};

/// A 2-D rectangle of a tensor's 2-D view, in elements. Half-open in effect: [row, row+rows) × [col, col+cols).
struct Rect {
  std::uint64_t row = 0;
  std::uint64_t col = 0;
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;

  bool operator==(const Rect&) const = default;
  std::uint64_t elements() const noexcept { return rows * cols; }
};

/// A tensor with everything that is derived from its spec.
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

/// Where a tile lies. `rect` is in the tensor's 2-D view.
struct Tile {
  std::uint64_t index = 0;   ///< global
  std::uint32_t tensor = 0;  ///< index in the layout
  Rect rect;                 ///< rect.elements() ≤ kTileElementsMax
};

/// 128-bit digest (XXH3-128, canonical big-endian byte order as xxHash's canonical form).
struct Digest128 {
  std::array<std::uint8_t, 16> bytes{};
  auto operator<=>(const Digest128&) const = default;
};
std::string to_string(const Digest128& digest);  ///< 32 hex digits

/// Immutable; shared by const pointer between threads without locks.
class Layout {
 public:
  /// Checks the specs (names unique, UTF-8, non-empty, ≤ kTensorNameBytesMax bytes, no NUL; sizes; cuts) and derives
  /// offsets, tiles and the digest. Errors name the tensor.
  static Result<std::shared_ptr<const Layout>> build(std::vector<TensorSpec> specs);
  /// Decodes a canonical encoding. Rejects anything that `encode` would not have produced byte for byte.
  static Result<std::shared_ptr<const Layout>> decode(std::span<const std::byte> encoded);

  /// The canonical encoding (layout_format.md "Layout").
  std::vector<std::byte> encode() const;
  /// XXH3-128 of the canonical encoding.
  const Digest128& digest() const noexcept { return digest_; }

  std::span<const Tensor> tensors() const noexcept { return tensors_; }
  /// Index by name, or nullopt.
  std::optional<std::uint32_t> find(std::string_view name) const;

  /// Bytes of a half: the end of the last tensor, rounded up to kTensorAlignment. Padding bytes are zero.
  std::uint64_t half_bytes() const noexcept { return half_bytes_; }
  /// Sum of the tensors' bytes, padding left out: what "full size" means in reports.
  std::uint64_t model_bytes() const noexcept { return model_bytes_; }
  std::uint64_t elements() const noexcept { return elements_; }
  std::uint64_t tile_count() const noexcept { return tile_count_; }

  /// The tile with this global index (< tile_count()). O(log tensors + cuts).
  Tile tile(std::uint64_t index) const;
  /// Index of the tensor that owns a tile. O(log tensors).
  std::uint32_t tensor_of_tile(std::uint64_t index) const;

  /// Tile geometry of one tensor, for loops over many of its tiles: bands × panels, numbered band by band. All
  /// panels of a band share its rows, so a band is a contiguous byte range of a half. Band height and panel widths
  /// follow from the shape and the cuts alone (layout_format.md "Tiling").
  struct Grid {
    std::uint64_t band_rows = 0;              ///< rows of a full band
    std::vector<std::uint64_t> row_segments;  ///< 0, row cuts …, rows
    std::vector<std::uint64_t> band_base;     ///< first band of each row segment, then the number of bands
    std::vector<std::uint64_t> panel_starts;  ///< 0 … cols: one entry per panel, then cols
    std::uint64_t bands() const noexcept { return band_base.empty() ? 0 : band_base.back(); }
    std::uint64_t panels() const noexcept { return panel_starts.empty() ? 0 : panel_starts.size() - 1; }
    /// Rows of a band: {first row, number of rows}.
    std::pair<std::uint64_t, std::uint64_t> band(std::uint64_t index) const;
    /// The band that has this row.
    std::uint64_t band_of(std::uint64_t row) const;
  };
  /// Computed on demand from the spec: O(cuts + panels).
  Grid grid(std::uint32_t tensor) const;

  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  ~Layout();

 private:
  Layout();
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

/// Cuts for the usual tensor-parallel sizes: every 2-D tensor gets cuts at multiples of rows/n and cols/n where n
/// divides them; 1-D tensors likewise over their columns. `n` = 1 returns the specs as they are.
void add_even_cuts(std::vector<TensorSpec>& specs, std::uint64_t n);

}  // namespace deltasync
