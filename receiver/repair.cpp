// Single tiles of the committed version: from the target's shadow if it has one, else from the agent, as raw copies of
// a full plan of that very version.
#include <algorithm>
#include <utility>

#include "deltasync/receiver.hpp"
#include "format/tiling.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/targets/attest.hpp"
#include "receiver/targets/target_checks.hpp"

namespace deltasync {
namespace receiver {

/// The newest version is asked for, and not the one that is wanted: of a version that is past or to come an agent would
/// speak or wait in its own way, while this answer says which one it is that there is now.
Result<PullReport> Pull::repair(const Ranges& tiles) {
  const TargetState& committed = *s_.target.committed();
  PartialUpdate& partial = s_.partial;
  partial.have.assign(static_cast<std::size_t>(s_.layout.tile_count()), 1);
  partial.digests = committed.digests;
  for (const wire::TileRange& range : tiles) {
    std::fill(partial.have.begin() + static_cast<std::ptrdiff_t>(range.first),
              partial.have.begin() + static_cast<std::ptrdiff_t>(range.end), std::uint8_t{0});
  }
  repairing_ = true;
  for (;;) {
    auto reply = plan();
    if (!reply) return stopped(std::move(reply).error());
    Result<Progress> progress = repair_from(*reply);
    s_.control.release(reply->plan, until_.deadline());
    if (!progress) return stopped(std::move(progress).error());
    if (*progress == Progress::whole) break;
    until_.pause(std::exchange(pause_, std::chrono::milliseconds(0)));
    if (until_.deadline().passed()) return out_of_time();
  }
  out_.report.wire_bytes = bytes_received() - bytes_before_;
  out_.report.metadata_bytes = out_.report.wire_bytes - payload_bytes_;
  return out_.report;
}

Result<Pull::Progress> Pull::repair_from(const wire::PlanReply& reply) {
  const TargetState& committed = *s_.target.committed();
  stage_ = "repairing tiles of " + to_string(committed.version);
  if (reply.target.id == committed.version.id && reply.target_root == committed.root) return repair_missing(reply);
  return Error(Errc::gone, "the agent serves " + to_string(reply.target) + " by now: the next pull brings all of it");
}

namespace {

/// Sorted, each once; all of them kept.
Result<Ranges> ranges_of(std::span<const std::uint64_t> tiles, const Layout& layout, const TileSet& kept) {
  std::vector<std::uint64_t> sorted(tiles.begin(), tiles.end());
  std::sort(sorted.begin(), sorted.end());
  Ranges ranges;
  for (const std::uint64_t tile : sorted) {
    if (tile >= layout.tile_count()) {
      return Error(Errc::out_of_range, "tile " + std::to_string(tile) + " of " + std::to_string(layout.tile_count()) +
                                           " is to be repaired");
    }
    if (!kept.contains(tile)) {
      return Error(Errc::invalid_argument, describe_tile(layout, tile) + " is not kept by the target");
    }
    if (!ranges.empty() && ranges.back().end > tile) continue;  // once more
    if (!ranges.empty() && ranges.back().end == tile) {
      ++ranges.back().end;
    } else {
      ranges.push_back({tile, tile + 1});
    }
  }
  return ranges;
}

/// Repairs what the target has valid copies of; returns the others.
Result<Ranges> repair_from_shadow(Target& target, const Ranges& tiles, const CallContext& until) {
  const Layout& layout = *target.layout();
  const TargetCapabilities can = target.capabilities();
  std::vector<std::byte> scratch;
  Ranges rest;
  for (const wire::TileRange& range : tiles) {
    for (std::uint64_t index = range.first; index < range.end; ++index) {
      DS_TRY(until.check("repairing tiles"));
      const Tile tile = tile_of(layout, index);
      TileRows kept;
      if (can.sleep != nullptr) {
        DS_ASSIGN(kept, can.sleep->kept_tile(tile, scratch));
      }
      if (kept.first != nullptr && digest_of_rows(layout, tile, kept) == target.committed()->digests[index]) {
        DS_TRY(can.repair->repair_tile(tile, kept));
      } else if (!rest.empty() && rest.back().end == index) {
        ++rest.back().end;
      } else {
        rest.push_back({index, index + 1});
      }
    }
  }
  return rest;
}

std::vector<std::uint64_t> list_of(const Ranges& ranges) {
  std::vector<std::uint64_t> tiles;
  for (const wire::TileRange& range : ranges) {
    for (std::uint64_t tile = range.first; tile < range.end; ++tile) tiles.push_back(tile);
  }
  return tiles;
}

}  // namespace

/// Between begin_repair and end_repair.
Status ReceiverImpl::repair_tiles(const Ranges& tiles, const CallContext& until, RepairReport& report) {
  DS_ASSIGN(const Ranges rest, repair_from_shadow(*target_, tiles, until));
  report.fetched = tiles_in(rest);
  if (rest.empty()) return {};
  const auto stopping = control_.stop_by(until.stop());
  PartialUpdate nothing;
  bool invalidated = true;
  Pull pull(session(nothing, invalidated), {}, until);
  auto fetched = pull.repair(rest);
  if (!fetched.ok()) return std::move(fetched).error();
  report.wire_bytes = fetched->wire_bytes;
  report.metadata_bytes = fetched->metadata_bytes;
  return {};
}

Status ReceiverImpl::repair_and_attest(const Ranges& tiles, const CallContext& until, RepairReport& report) {
  CanRepair* const can = target_->capabilities().repair;
  if (can == nullptr) return Error(Errc::unsupported, "this kind of target does not take single tiles");
  DS_TRY(can->begin_repair(until));
  Status repaired = repair_tiles(tiles, until, report);
  Status ended = can->end_repair();
  DS_TRY(std::move(ended));
  DS_TRY(std::move(repaired));
  DS_ASSIGN(const auto again, deltasync::attest(*target_, list_of(tiles), until));
  if (again.empty()) return {};
  return Error(Errc::corrupt, describe(again) + " right after the repair");
}

Result<RepairReport> ReceiverImpl::repair_listed(std::span<const std::uint64_t> tiles, const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  if (target_ == nullptr) return Error(Errc::invalid_argument, "no target is bound");
  DS_ASSIGN(const Ranges ranges, ranges_of(tiles, *layout_, tiles_));
  const TargetState* const committed = target_->committed();
  if (committed == nullptr) return Error(Errc::not_found, "nothing is committed that could be repaired");
  RepairReport report;
  report.version = committed->version;
  report.tiles = tiles_in(ranges);
  if (report.tiles == 0) return report;
  if (Status repaired = repair_and_attest(ranges, until, report); !repaired.ok()) {
    if (target_->committed() == nullptr) {
      forget_unfinished();
    } else if (repaired.error().code() != Errc::unsupported) {
      // Who asks for tiles knows them to be wrong, and some may be half written: that is no base for a delta.
      invalidated_ = true;
    }
    return std::move(repaired).error();
  }
  if (invalidated_) {
    DS_ASSIGN(const auto others, deltasync::attest(*target_, tiles_, until));
    invalidated_ = !others.empty();
  }
  report.total_s = seconds_since(start);
  return report;
}

Result<RepairReport> ReceiverImpl::repair(std::span<const std::uint64_t> tiles, const CallOptions& call) {
  return repair_listed(tiles, call).with_context("repair");
}

}  // namespace receiver

Result<RepairReport> Receiver::repair(std::span<const TileMismatch> mismatches, const CallOptions& call) {
  std::vector<std::uint64_t> tiles;
  tiles.reserve(mismatches.size());
  for (const TileMismatch& mismatch : mismatches) tiles.push_back(mismatch.tile);
  return repair(tiles, call);
}

}  // namespace deltasync
