#include "agent/versions/arriving_delta.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/hash.hpp"

namespace deltasync::agent {
namespace {

constexpr std::uint64_t kSlackBytes = 1u << 20;

std::string tiles_text(const wire::TileRange& tiles) {
  return "tiles " + std::to_string(tiles.first) + " to " + std::to_string(tiles.end);
}

}  // namespace

ArrivingDelta::ArrivingDelta(LayoutPtr layout, std::uint64_t frames, std::uint64_t frame_bytes)
    : layout_(std::move(layout)),
      frames_(frames),
      bytes_max_(2 * std::min(frame_bytes, layout_->half_bytes()) + kSlackBytes) {
  if (frames_ != 0) return;  // else nobody asks for any
  tiles_settled_ = layout_->tile_count();
  ranges_.emplace(0, tiles_settled_);
}

Status ArrivingDelta::add(const wire::TileRange& tiles, std::vector<std::byte> bytes) {
  if (tiles.first >= tiles.end || tiles.end > layout_->tile_count()) {
    return Error(Errc::out_of_range, tiles_text(tiles) + " of " + std::to_string(layout_->tile_count()));
  }
  PiecePtr piece;
  if (!bytes.empty()) {
    DS_ASSIGN(const std::vector<delta::TileRecord> records, delta::parse_frame(*layout_, bytes));
    if (records.empty() || records.front().tile < tiles.first || records.back().tile >= tiles.end) {
      return Error(Errc::protocol, "a frame has other tiles than " + tiles_text(tiles));
    }
    auto made = std::make_shared<Piece>();
    made->frame.first_tile = records.front().tile;
    made->frame.last_tile = records.back().tile;
    made->frame.tiles = static_cast<std::uint32_t>(records.size());
    for (const delta::TileRecord& record : records) made->frame.changed += record.changed;
    made->frame.bytes = std::move(bytes);
    made->hash = xxh3_64(made->frame.bytes);
    piece = std::move(made);
  }
  DS_TRY(settle(tiles, std::move(piece)));
  changes_.notify();
  return {};
}

Status ArrivingDelta::settle(const wire::TileRange& tiles, PiecePtr piece) {
  const std::lock_guard lock(mutex_);
  if (ended_) return {};
  auto next = ranges_.upper_bound(tiles.first);
  const auto before = next == ranges_.begin() ? ranges_.end() : std::prev(next);
  if ((next != ranges_.end() && next->first < tiles.end) || (before != ranges_.end() && before->second > tiles.first)) {
    return Error(Errc::protocol, tiles_text(tiles) + " were settled before");
  }
  if (piece) {
    if (piece->frame.bytes.size() > bytes_max_ - bytes_) {
      return Error(Errc::no_space, "its frames have more than " + std::to_string(bytes_max_) + " bytes");
    }
    bytes_ += piece->frame.bytes.size();
    const std::uint64_t first = piece->frame.first_tile;
    pieces_.emplace(first, std::move(piece));
  }
  tiles_settled_ += tiles.end - tiles.first;
  wire::TileRange merged = tiles;
  if (next != ranges_.end() && next->first == tiles.end) {
    merged.end = next->second;
    ranges_.erase(next);
  }
  if (before != ranges_.end() && before->second == tiles.first) {
    before->second = merged.end;
  } else {
    ranges_.emplace(merged.first, merged.end);
  }
  return {};
}

ArrivingDelta::Settled ArrivingDelta::settled(std::uint64_t first, std::uint64_t end) const {
  const std::lock_guard lock(mutex_);
  Settled found{first, {}};
  auto range = ranges_.upper_bound(first);
  if (range == ranges_.begin()) return found;
  --range;
  if (range->second <= first) return found;
  found.end = std::min(end, range->second);
  auto piece = pieces_.upper_bound(first);
  if (piece != pieces_.begin() && std::prev(piece)->second->frame.last_tile >= first) --piece;
  for (; piece != pieces_.end() && piece->first < found.end; ++piece) found.pieces.push_back(piece->second);
  return found;
}

std::uint64_t ArrivingDelta::tiles_settled() const {
  const std::lock_guard lock(mutex_);
  return tiles_settled_;
}

bool ArrivingDelta::cut_short() const {
  const std::lock_guard lock(mutex_);
  return ended_ && !whole_locked();
}

void ArrivingDelta::end() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changes_.notify();
}

}  // namespace deltasync::agent
