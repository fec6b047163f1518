// Full updates from an agent on this host: tiles are copied out of its half into the target's final place, with their
// digests in the same pass.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "base/racing_reads.hpp"
#include "base/trace.hpp"
#include "delta/codec.hpp"
#include "format/tiling.hpp"
#include "receiver/pull/pull.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync::receiver {
namespace {

std::uint64_t bytes_of(const Layout& layout, const Tile& tile) {
  return tile.rect.elements() * layout.tensors()[tile.tensor].element_bytes;
}

/// Works of about `bytes` each: neighbouring tiles, so that memory is read in its order.
std::vector<Ranges> cut(const Layout& layout, const Ranges& ranges, std::uint64_t bytes) {
  std::vector<Ranges> works;
  std::uint64_t taken = bytes;
  for (const wire::TileRange& range : ranges) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile) {
      if (taken >= bytes) {
        works.emplace_back();
        taken = 0;
      }
      taken += bytes_of(layout, tile_of(layout, tile));
      Ranges& work = works.back();
      if (!work.empty() && work.back().end == tile) {
        ++work.back().end;
      } else {
        work.push_back({tile, tile + 1});
      }
    }
  }
  return works;
}

}  // namespace

Result<std::optional<Pull::Progress>> Pull::fetch_local(const wire::PlanReply& reply, const Ranges& ranges) {
  using Fetched = std::optional<Progress>;
  if (connection_only_) return Fetched();
  DS_ASSIGN(const bool tries, s_.local.tries(s_.control));
  if (!tries) return Fetched();
  stage_ = "looking for the agent's memory";
  auto answer = s_.control.local(reply.plan, until_.deadline());
  if (!answer.value && (answer.broken || answer.refused->code() == Errc::lease_revoked)) {
    FetchRoundResult round;
    round.end = FetchRoundEnd::replan;
    round.error = answer.refused ? answer.refused : answer.broken;
    DS_ASSIGN(const Progress progress, settle(round, {}));
    return Fetched(progress);
  }
  if (!answer.value) {
    DS_TRY(s_.local.give_up(*answer.refused));
    return Fetched();
  }
  auto half = LocalHalf::map(*answer.value, s_.control.instance(), s_.layout, until_);
  DS_TRY(until_.check(stage_));
  if (!half) {
    DS_TRY(s_.local.give_up(half.error()));
    return Fetched();
  }
  stage_ = "copying tiles of " + to_string(reply.target);
  DS_ASSIGN(const Progress progress, copy_from(**half, ranges));
  return Fetched(progress);
}

/// A writer that gets the half back meanwhile waits for nobody here: each work looks afterwards whether what it read
/// was still the version, and the tiles of one that came too late count as missing.
Result<Pull::Progress> Pull::copy_from(const LocalHalf& half, const Ranges& ranges) {
  constexpr std::uint64_t kWorkBytesMin = 1u << 20;
  trace::Span span("local copy");
  PartialUpdate& partial = s_.partial;
  const std::uint64_t share = std::max(kWorkBytesMin, bytes_of_tiles(s_.layout, ranges) / s_.pool.size());
  const std::vector<Ranges> works = cut(s_.layout, ranges, std::min(s_.peer.tuning.item_bytes, share));
  std::vector<StreamTally> tallies(s_.pool.size());
  std::vector<std::vector<std::byte>> scratch(s_.pool.size());
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> copied{0};
  const auto copy_some = [&](std::uint64_t work, unsigned worker) -> Status {
    if (over || !half.still_there()) {
      over = true;
      return {};
    }
    std::uint64_t bytes = 0;
    std::uint64_t tiles = 0;
    for (const wire::TileRange& range : works[work]) {
      for (std::uint64_t index = range.first; index < range.end; ++index, ++tiles) {
        DS_ASSIGN(const bool right, copy_tile(half, index, scratch[worker]));
        partial.have[index] = right ? 1 : 0;
        if (right) bytes += bytes_of(s_.layout, tile_of(s_.layout, index));
      }
    }
    if (s_.peer.tuning.after_local_copy) s_.peer.tuning.after_local_copy();
    if (!half.still_there()) {
      over = true;
      for (const wire::TileRange& range : works[work]) {
        std::fill(partial.have.begin() + static_cast<std::ptrdiff_t>(range.first),
                  partial.have.begin() + static_cast<std::ptrdiff_t>(range.end), std::uint8_t{0});
      }
      return {};
    }
    if (s_.can.hand_on != nullptr) hand_on(works[work]);
    tallies[worker].tiles += tiles;
    copied += bytes;
    s_.progress.add(bytes);
    return {};
  };
  DS_TRY(run_all(s_.pool, works.size(), until_, stage_, copy_some));
  DS_TRY(until_.check(stage_));
  span.set({"bytes", copied.load()});
  out_.report.local_bytes += copied;
  FetchRoundResult round;
  if (over) {
    round.end = FetchRoundEnd::replan;
    round.error = Error(Errc::lease_revoked, "a writer has the half by now; plan again");
    connection_only_ = copied == 0 && s_.options.local != true;
  }
  return settle(round, tallies);
}

/// Those that are right.
void Pull::hand_on(const Ranges& ranges) {
  std::vector<std::uint64_t> right;
  for (const wire::TileRange& range : ranges) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile) {
      if (s_.partial.have[tile] != 0) right.push_back(tile);
    }
  }
  s_.can.hand_on->came(right);
}

/// Whether the tile is there, and right.
Result<bool> Pull::copy_tile(const LocalHalf& half, std::uint64_t index, std::vector<std::byte>& scratch) {
  const Tile tile = tile_of(s_.layout, index);
  const Tensor& tensor = s_.layout.tensors()[tile.tensor];
  const std::size_t stride = tensor.row_bytes();
  const std::size_t row_bytes = std::size_t{tile.rect.cols} * tensor.element_bytes;
  const std::uint64_t first = tile.rect.row * stride + tile.rect.col * tensor.element_bytes;
  const std::byte* const from = half.bytes().data() + tensor.offset + first;
  std::byte* const rows = s_.can.rows != nullptr ? s_.can.rows->full_rows(tile.tensor) : nullptr;
  if (rows != nullptr) {
    const RacingReads racing;
    return delta::copy_tile_digest(rows + first, stride, from, stride, tile.rect.rows, row_bytes) ==
           s_.partial.digests[index];
  }
  scratch.resize(std::max(scratch.size(), tile.rect.rows * row_bytes));
  {
    const RacingReads racing;
    for (std::uint64_t r = 0; r < tile.rect.rows; ++r) {
      std::memcpy(scratch.data() + r * row_bytes, from + r * stride, row_bytes);
    }
  }
  if (delta::tile_digest(scratch.data(), row_bytes, tile.rect.rows, row_bytes) != s_.partial.digests[index]) {
    return false;
  }
  DS_TRY(s_.target.put_tile(tile, {scratch.data(), row_bytes}));
  return true;
}

}  // namespace deltasync::receiver
