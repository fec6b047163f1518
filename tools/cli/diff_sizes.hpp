// What one step changed and what it costs to say so: density by tensor, and the size of the change in several
// encodings beside what no encoding can beat. Used by `deltasync diff` and `deltasync bench codec --from`.
//
// All sizes are in bits or bytes over the whole model; "bits per change" divides by the changed elements.
//
//   coo       Σ changed · (32 + w): a u32 index inside the tensor (64 bits in tensors of more than 2^32 elements) and
//             the raw new value of w bits. What sparse weight updates are usually shipped as.
//   bitmap    Σ over tensors with a change: one bit an element, then the raw new values.
//   tiles     every changed tile, raw.
//   ulp, absolute   delta frames as the agent sends them (delta_format.md), in either value form, each with
//             its headers, tile records and hashes.
//   compact   the ulp frames with their tiles in exponent classes where that is smaller, decoded and compared.
//
// Floors: positions + values.
//   positions Σ over groups of n·H(c/n), H the binary entropy, n elements of which c changed: the cost of naming which
//             ones. The groups are: the whole model, each tile, or each exponent of the old value in each tensor (which
//             the receiver has, so it costs nothing to say).
//   values    the empirical entropy of the ulp difference (delta_format.md "Differences"), over the whole model for
//   the
//             first two, given the old exponent for the third. A difference of 4,096 ulp or more counts as its sign
//             and bit length plus its low bits one for one: it has no distribution worth learning.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/thread_pool.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::tools {

struct TensorDensity {
  std::string name;
  Dtype dtype = Dtype::bf16;
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
};

struct FloorBits {
  double positions = 0;
  double values = 0;
  double total() const { return positions + values; }
};

struct DiffSizes {
  std::vector<TensorDensity> tensors;  ///< in layout order
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
  std::uint64_t model_bytes = 0;
  std::uint64_t tiles = 0;
  std::uint64_t tiles_changed = 0;

  /// Changed elements by size of the change: ±1, ±2, 3 to 8, more ulp.
  std::array<std::uint64_t, 4> by_ulp{};

  std::uint64_t coo_bits = 0;
  std::uint64_t bitmap_bits = 0;
  std::uint64_t tile_bytes = 0;
  FloorBits floor_model;
  FloorBits floor_tile;
  FloorBits floor_exponent;

  std::uint64_t ulp_bytes = 0;
  std::uint64_t absolute_bytes = 0;
  std::uint64_t compact_bytes = 0;
  std::array<delta::CodecStats, delta::kCodecEnd> ulp_stats{};       ///< by delta::Codec
  std::array<delta::CodecStats, delta::kCodecEnd> absolute_stats{};  ///< by delta::Codec
  std::array<delta::CodecStats, delta::kCodecEnd> compact_stats{};   ///< by delta::Codec

  double density() const { return elements == 0 ? 0 : static_cast<double>(changed) / static_cast<double>(elements); }
  double bits_per_change(double bits) const { return changed == 0 ? 0 : bits / static_cast<double>(changed); }
};

/// Called with the bytes done so far.
using DiffProgress = std::function<void(std::uint64_t bytes_done)>;

/// Compares two models of one layout; layout_mismatch names the first tensor that differs; `corrupt` if the compact
/// form does not decode to the newer model. Memory: two copies of a group of tensors of about `group_bytes_max` (or of
/// the largest tensor).
Result<DiffSizes> diff_sizes(const HfModel& before, const HfModel& after, ThreadPool& pool,
                             const DiffProgress& progress = {}, std::uint64_t group_bytes_max = 512u << 20);

/// Row-major bytes of a tensor of the layout, valid until the comparison has ended.
using TensorBytes = std::function<ByteSpan(std::uint32_t tensor)>;
/// The same for two states of one layout, wherever they lie.
Result<DiffSizes> diff_sizes(const Layout& layout, const TensorBytes& before, const TensorBytes& after,
                             ThreadPool& pool, const DiffProgress& progress = {},
                             std::uint64_t group_bytes_max = 512u << 20);

/// The whole delta between two models of one layout as a container (delta_format.md), ulp form, as the agent
/// encodes it; as if `before` were version 1:1 and `after` version 1:2.
Result<std::vector<std::byte>> delta_container(const HfModel& before, const HfModel& after, ThreadPool& pool);

/// A delta's container and that of its compact form.
struct CompactSizes {
  std::uint64_t container_bytes = 0;
  std::uint64_t compact_container_bytes = 0;
  std::array<delta::CodecStats, delta::kCodecEnd> compact_stats{};  ///< by delta::Codec
};
/// Compacts a delta from `before` to `after`, halves of the layout, and decodes the result: `corrupt` if it does not
/// give the bytes of `after`. `digests` are those of `before`.
Result<CompactSizes> compact_sizes(const Layout& layout, const delta::Delta& delta, ByteSpan before, ByteSpan after,
                                   std::span<const std::uint64_t> digests, ThreadPool& pool);
/// The same for the delta that delta_container makes.
Result<CompactSizes> compact_sizes(const HfModel& before, const HfModel& after, ThreadPool& pool);

}  // namespace deltasync::tools
