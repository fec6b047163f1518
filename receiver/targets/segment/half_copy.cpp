#include "receiver/targets/segment/half_copy.hpp"

#include <cstring>
#include <utility>

#include "format/tiling.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::relay {
namespace {

/// Of tiles in a round: patched ones stay in the caches until they are written, and a deadline passes between rounds.
constexpr std::uint64_t kRoundBytesPerThread = 1u << 20;
constexpr std::uint64_t kRoundTilesMax = 4096;

}  // namespace

HalfCopy::HalfCopy(const Layout& layout, Writer& writer, ThreadPool& pool, std::function<void()> written)
    : layout_(layout), writer_(writer), pool_(pool), written_(std::move(written)) {}

std::size_t HalfCopy::row_bytes(const Tile& tile) const {
  return static_cast<std::size_t>(tile.rect.cols) * layout_.tensors()[tile.tensor].element_bytes;
}

const std::byte* HalfCopy::in_half(ByteSpan half, const Tile& tile) const {
  const Tensor& tensor = layout_.tensors()[tile.tensor];
  return half.data() + tensor.offset + tile.rect.row * tensor.row_bytes() + tile.rect.col * tensor.element_bytes;
}

Status HalfCopy::run(const VersionSource& source, Deadline deadline) {
  for (std::uint64_t tile = 0; tile < layout_.tile_count();) {
    if (deadline.passed()) {
      return Error(Errc::timed_out, "deadline passed while tile " + std::to_string(tile) + " of " +
                                        std::to_string(layout_.tile_count()) + " was to be written");
    }
    tile = take_round(tile, source.patches);
    DS_TRY(patch(source));
    DS_TRY(write(source));
    if (written_) written_();
    DS_TRY(read_back(source));
  }
  return {};
}

/// The tiles from `first` on that make the next round; returns the one after them.
std::uint64_t HalfCopy::take_round(std::uint64_t first, const TilePatches& patches) {
  round_.clear();
  std::uint64_t bytes = 0;
  std::size_t patched = 0;
  std::uint64_t next = first;
  for (; next < layout_.tile_count() && round_.size() < kRoundTilesMax && bytes < kRoundBytesPerThread * pool_.size();
       ++next) {
    RoundTile item{tile_of(layout_, next), patched, patches.has(next)};
    const std::size_t tile_bytes = static_cast<std::size_t>(item.tile.rect.rows) * row_bytes(item.tile);
    bytes += tile_bytes;
    if (item.patched) patched += tile_bytes;
    round_.push_back(item);
  }
  if (scratch_.size() < patched) scratch_.resize(patched);
  return next;
}

Status HalfCopy::patch(const VersionSource& source) {
  return run_all(pool_, round_.size(), [&](std::uint64_t i, unsigned) -> Status {
    const RoundTile& item = round_[i];
    if (!item.patched) return {};
    const std::byte* from = in_half(source.base, item.tile);
    const auto stride = static_cast<std::size_t>(layout_.tensors()[item.tile.tensor].row_bytes());
    const std::size_t width = row_bytes(item.tile);
    std::byte* const rows = scratch_.data() + item.at;
    for (std::uint64_t row = 0; row < item.tile.rect.rows; ++row) {
      std::memcpy(rows + row * width, from + row * stride, width);
    }
    auto patched = source.patches.apply(layout_, item.tile.index, rows, width, source.before[item.tile.index]);
    return patched ? Status() : std::move(patched).error();
  });
}

/// Always the same slices in the same order, which the writer's coverage check knows again from the last version.
Status HalfCopy::write(const VersionSource& source) {
  slices_.clear();
  for (const RoundTile& item : round_) {
    Source from;
    if (item.patched) {
      from.data = scratch_.data() + item.at;
    } else {
      from.data = in_half(source.base, item.tile);
      from.row_stride_bytes = static_cast<std::size_t>(layout_.tensors()[item.tile.tensor].row_bytes());
    }
    slices_.push_back({{item.tile.tensor, item.tile.rect}, from});
  }
  return writer_.write(slices_);
}

Status HalfCopy::read_back(const VersionSource& source) {
  const ByteSpan half = writer_.filling();
  return run_all(pool_, round_.size(), [&](std::uint64_t i, unsigned) -> Status {
    const std::uint64_t tile = round_[i].tile.index;
    if (delta::tile_digest(layout_, half, tile) == source.after[tile]) return {};
    return Error(Errc::corrupt, describe_tile(layout_, tile) +
                                    " differs from its digest where it was written: what it was made of is another "
                                    "one, or somebody wrote to the half");
  });
}

}  // namespace deltasync::relay
