// The two kinds of transfer. Extents: bytes of a half, received straight into the target's memory and verified tile by
// tile against a digest table while they are in cache. Frames: hashed, validated and handed on with their records.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "format/tile_set.hpp"
#include "format/tiling.hpp"
#include "receiver/pull/ranges.hpp"
#include "receiver/pull/streams.hpp"
#include "receiver/pull/transfer_meter.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::receiver {

/// A target that does not lend rows has bands buffered, one for each stream; longer ones come tile by tile.
inline constexpr std::uint64_t kBandBytesMax = 4u << 20;
/// True if the tensor's bands are such ones.
bool bands_are_too_long(const Layout& layout, Target& target, std::uint32_t tensor);

/// Where the bytes of a half go: tensors to the target's memory, or to a buffer for the band at hand where it has no
/// rows for them, the padding between them to a scratch.
class HalfScatter {
 public:
  HalfScatter(const Layout& layout, Target& target)
      : layout_(layout), target_(target), lender_(target.capabilities().rows) {}

  /// Starts at the first byte of a band.
  void seek(std::uint32_t tensor, std::uint64_t half_offset);
  /// Pieces for the next ≤ `bytes_max` bytes; the number of bytes that they cover (≥ 1). Buffered bytes end with their
  /// band, whose tiles are to be taken before the next call.
  std::uint64_t next(std::uint64_t bytes_max, std::vector<iovec>& pieces);
  /// A tile whose band was the last to end, or lies in the target's rows.
  TileRows tile(const Tile& tile);
  /// Gives the target a tile that is verified, if its band was buffered.
  Status put(const Tile& tile, const TileRows& rows);

 private:
  static constexpr std::size_t kPiecesMax = 512;
  /// Place for the tensor's bytes from the position on, at most `bytes` of them.
  std::byte* place(const Tensor& tensor, std::uint64_t& bytes);
  void enter_band(const Tensor& tensor);
  std::byte* rows_of(std::uint32_t tensor) const { return lender_ != nullptr ? lender_->full_rows(tensor) : nullptr; }

  const Layout& layout_;
  Target& target_;
  CanLendRows* const lender_;  ///< null: it lends none
  std::uint32_t tensor_ = 0;
  std::uint64_t position_ = 0;  // in the half
  std::byte scratch_[kTensorAlignment];
  std::vector<std::byte> band_;  // where the target lends no rows: bytes [band_begin_, band_end_) of the half
  std::uint64_t band_begin_ = 0;
  std::uint64_t band_end_ = 0;
  std::uint32_t grid_tensor_ = 0;
  TileGrid grid_;  // of grid_tensor_, if it has a band
};

struct StreamTally {
  std::uint64_t tiles = 0;
  std::uint64_t payload_bytes = 0;
  double verify_s = 0;
};

class ExtentFetch final : public Fetch {
 public:
  /// `have[tile]` becomes 1 for each tile whose digest equals `digests[tile]`. All is borrowed.
  ExtentFetch(const Layout& layout, Target& target, std::span<const std::uint64_t> digests,
              std::span<std::uint8_t> have, std::uint64_t plan, const Tuning& tuning, TransferMeter& meter,
              unsigned streams);

  Status ask(Connection& connection, std::uint64_t request, const Item& item, Deadline deadline) override;
  Outcome receive(Connection& connection, std::uint64_t request, Item& item, Deadline deadline,
                  unsigned stream) override;
  std::string describe(const Item& item) const override;

  std::span<const StreamTally> tallies() const { return tallies_; }

 private:
  struct Progress;
  Outcome receive_extent(Connection& connection, std::uint64_t bytes, Progress& progress, Deadline deadline);
  Status verify_up_to(Progress& progress);

  const Layout& layout_;
  Target& target_;
  CanHandOn* const relay_;  ///< that hands tiles on; null: none
  const std::span<const std::uint64_t> digests_;
  const std::span<std::uint8_t> have_;
  const std::uint64_t plan_;
  const Tuning& tuning_;
  TransferMeter& meter_;
  std::vector<StreamTally> tallies_;
};

class FrameFetch final : public Fetch {
 public:
  enum class Kind : std::uint8_t {
    frames,
    compact_frames,  ///< of a plan that asked for exponent classes
    raw_tiles,
    packed_tiles,  ///< in byte planes
  };
  /// Takes a validated frame whose tiles were asked for. An error means: right in form, wrong for what we hold; but io
  /// is the target's own. Of what was asked for it is all that comes in `tiles`, where the plan is about all tiles.
  using Sink = std::function<Status(std::uint32_t step, StagedFrame frame, wire::TileRange tiles, unsigned stream)>;
  /// In these tiles nothing comes. Any thread.
  using NoneIn = std::function<void(wire::TileRange tiles)>;

  /// `tiles` are those that the plan is about. `bytes_max` bounds what all frames together may hold: more is
  /// `protocol`.
  FrameFetch(const Layout& layout, const TileSet& tiles, Kind kind, std::uint64_t plan, std::uint64_t bytes_max,
             Sink sink, unsigned streams);
  /// Before the transfer.
  void on_none(NoneIn none_in) { none_in_ = std::move(none_in); }

  Status ask(Connection& connection, std::uint64_t request, const Item& item, Deadline deadline) override;
  Outcome receive(Connection& connection, std::uint64_t request, Item& item, Deadline deadline,
                  unsigned stream) override;
  std::string describe(const Item& item) const override;

  std::span<const StreamTally> tallies() const { return tallies_; }

 private:
  /// `protocol` names a tile that is outside of the item, or in a codec that was not asked for.
  Status check_asked_for(const Item& item, const StagedFrame& frame) const;
  Status take(std::uint32_t step, StagedFrame frame, wire::TileRange tiles, unsigned stream);

  const Layout& layout_;
  const TileSet& tiles_;
  const Kind kind_;
  const std::uint64_t plan_;
  const std::uint64_t bytes_max_;
  const Sink sink_;
  NoneIn none_in_;  ///< may be empty
  std::atomic<std::uint64_t> bytes_{0};
  std::vector<StreamTally> tallies_;
};

/// What the frames of one step may hold when they arrive, headers of cut frames and one repetition allowed for.
std::uint64_t frame_bytes_bound(const wire::DeltaStep& step);
/// The same for raw copies of so many tiles.
std::uint64_t raw_bytes_bound(std::uint64_t tiles);
/// How many requests a step of so many bytes is split into.
std::uint64_t frame_parts(std::uint64_t frame_bytes, const Tuning& tuning);

/// Seconds of CPU time that the calling thread has used.
double thread_cpu_s();

/// "tile 88 of model.layers.3.mlp.up_proj.weight"
std::string tile_name(const Layout& layout, std::uint64_t tile);
/// `protocol` names the tile and a codec that was not asked for: rice_class unless the plan was one for `classes`;
/// raw_planes, which FrameFetch lets through where it asked for packed tiles.
Status check_codec(const Layout& layout, const delta::TileRecord& record, bool classes);

}  // namespace deltasync::receiver
