#include "agent/versions/damage.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "agent/versions/overlapped_diff.hpp"
#include "base/log.hpp"
#include "delta/geometry.hpp"
#include "format/tiling.hpp"

namespace deltasync::agent {
namespace {

constexpr std::uint64_t kCheckBytesMax = 64u << 20;  ///< that one question has read again
constexpr std::size_t kFormerStatesMax = 8;
constexpr std::uint64_t kSpotTiles = 8;
constexpr std::size_t kToldMax = 16;  ///< tiles of one version that lines are about

/// The delta that led to the served version without the tiles that are wrong now, or with their bytes as they are; and
/// the digests of the version before.
Result<RingEntryPtr> amended(const RingEntry& entry, const ServedVersion& now, std::span<const std::uint64_t> wrong,
                             const ServedVersion& before) {
  const Generation& generation = *now.generation;
  const ByteSpan half = generation.half(now.half.half);
  const bool last = entry.delta->to == now.version.id;
  DS_ASSIGN(delta::Delta made,
            delta::amend(*generation.layout, generation.batches, *entry.delta, wrong, last ? &half : nullptr,
                         *now.digests, last ? now.root : entry.delta->to_root));
  std::vector<DigestBefore> digests = entry.before;
  if (last) {
    // Those that it did not change before have had the same digest since.
    for (const std::uint64_t tile : wrong) {
      const auto at = std::lower_bound(digests.begin(), digests.end(), tile,
                                       [](const DigestBefore& d, std::uint64_t t) { return d.tile < t; });
      if (at == digests.end() || at->tile != tile) digests.insert(at, {tile, (*before.digests)[tile]});
    }
  }
  auto fresh = RingEntry::make(std::move(made), entry.from, entry.to, entry.encode_s, std::move(digests));
  fresh->made_at = entry.made_at;
  fresh->found_at_start = entry.found_at_start;
  fresh->from_former = entry.from_former;
  fresh->partial = !last;
  return RingEntryPtr(std::move(fresh));
}

}  // namespace

std::vector<std::uint64_t> tiles_to_check(const Layout& layout, std::span<const wire::TileRange> ranges) {
  std::vector<std::uint64_t> tiles;
  std::uint64_t bytes = 0;
  for (const wire::TileRange& range : ranges) {
    for (std::uint64_t tile = range.first; tile < std::min(range.end, layout.tile_count()); ++tile) {
      const Tile at = tile_of(layout, tile);
      bytes += at.rect.elements() * layout.tensors()[at.tensor].element_bytes;
      if (!tiles.empty() && bytes > kCheckBytesMax) return tiles;
      tiles.push_back(tile);
    }
  }
  return tiles;
}

void Damage::start(const ScrubOptions& options) {
  scrub_.emplace(options, scrub_source());
}

void Damage::stop() {
  if (scrub_) scrub_->stop();
}

void Damage::doubt(const HalfKey& half, std::span<const std::uint64_t> tiles, const std::string& found_by) {
  suspects_.add(half, tiles, found_by);
  bell_.ring();
}

Damage::Verdict Damage::check(const Target& target, std::span<const wire::TileRange> ranges, const std::string& who) {
  const ServedPtr served = versions_.snapshot()->served;
  if (!served || served->version.id != target.id || served->root != target.root) return Verdict::plan_again;
  const auto wrong = wrong_tiles(*served, tiles_to_check(target.layout, ranges));
  if (!wrong) return Verdict::plan_again;
  if (wrong->empty()) return Verdict::valid;
  const auto known = [&](std::uint64_t tile) {
    return std::binary_search(served->damaged.begin(), served->damaged.end(), tile);
  };
  if (std::all_of(wrong->begin(), wrong->end(), known)) return Verdict::plan_again;
  doubt(served->half, *wrong, who);
  return Verdict::not_yet;
}

ScrubSource Damage::scrub_source() {
  ScrubSource source;
  source.with_served = [this](const auto& read) {
    if (ServedPtr served = versions_.snapshot()->served) {
      read({*served->generation, served->half, *served->digests});
      reclaimer_->retire(std::move(served));  // it may be the last to hold a generation
    }
  };
  source.found = [this](const HalfKey& half, std::span<const std::uint64_t> tiles) { doubt(half, tiles, "the scrub"); };
  source.counted = [this](std::uint64_t bytes, bool pass_done) {
    Metrics::add(metrics_.scrub_bytes, bytes);
    if (pass_done) Metrics::add(metrics_.scrub_passes, 1);
  };
  return source;
}

/// The publisher's, between two versions.
void Damage::look_at_suspects() {
  const ServedPtr served = versions_.snapshot()->served;
  if (!served) return;
  const auto suspects = suspects_.take(served->half);
  std::vector<std::uint64_t> tiles;
  tiles.reserve(suspects.size());
  for (const auto& suspect : suspects) tiles.push_back(suspect.first);
  const auto wrong = wrong_tiles(*served, tiles);
  if (!wrong || wrong->empty()) return;
  for (const std::uint64_t tile : *wrong) {
    if (std::binary_search(served->damaged.begin(), served->damaged.end(), tile)) continue;
    note(*served->generation->layout, served->version, tile, suspects.at(tile), served->relayed);
  }
  served->relayed ? withdraw(served, *wrong) : publish_again(served, *wrong);
}

void Damage::withdraw(const ServedPtr& before, std::span<const std::uint64_t> wrong) {
  auto now = std::make_shared<ServedVersion>(*before);
  now->damaged.clear();
  std::set_union(before->damaged.begin(), before->damaged.end(), wrong.begin(), wrong.end(),
                 std::back_inserter(now->damaged));
  if (now->damaged == before->damaged) return;
  log::warn(
      "version_withdrawn version=\"{}\" tiles={} effect=\"deltas lead to it; who needs all of it waits until the "
      "relay brings the next one\"",
      to_string(now->version), now->damaged.size());
  versions_.publish_again(before, std::move(now), versions_.snapshot()->ring);
}

std::vector<std::uint64_t> Damage::find_in(const Generation& generation, const shm::HalfView& sealed,
                                           const std::vector<std::uint64_t>& digests, ThreadPool& pool) {
  std::vector<std::uint64_t> wrong;
  if (!spot_check(generation, sealed.half, digests, kSpotTiles, spot_cursor_)) return wrong;
  std::vector<std::uint64_t> read(digests.size());
  delta::half_digests(*generation.layout, generation.half(sealed.half), read, pool);
  for (std::uint64_t tile = 0; tile < digests.size(); ++tile) {
    if (read[tile] == digests[tile]) continue;
    if (wrong.size() < kToldMax) {
      note(*generation.layout, sealed.version, tile, "the look at some tiles after each delta", true);
    }
    wrong.push_back(tile);
  }
  return wrong;
}

void Damage::note(const Layout& layout, const Version& version, std::uint64_t tile, const std::string& found_by,
                  bool relayed) {
  Metrics::add(metrics_.tiles_damaged, 1);
  if (relayed) {
    log::warn(
        "tile_damaged version=\"{}\" tile=\"{}\" found_by=\"{}\" remedy=\"its bytes are not those that the relay "
        "brought: look for stray writes of processes of this user, or for failing memory\"",
        to_string(version), delta::tile_name(layout, tile), found_by);
    return;
  }
  log::warn(
      "tile_damaged version=\"{}\" tile=\"{}\" found_by=\"{}\" remedy=\"its bytes are not those that were offloaded, "
      "or "
      "those before them were not: look for stray writes of the trainer, or for failing memory; it is served as it "
      "is\"",
      to_string(version), delta::tile_name(layout, tile), found_by);
}

/// What the delta has of these tiles is not to be trusted: receivers get them whole.
std::optional<delta::Delta> Damage::repair_diff(const ServedVersion& before, const shm::HalfView& sealed,
                                                delta::Delta delta, std::vector<std::uint64_t>& digests,
                                                ThreadPool& pool) {
  const Generation& generation = *before.generation;
  const Layout& layout = *generation.layout;
  const ByteSpan half = generation.half(sealed.half);
  std::set<std::uint64_t> tiles(before.damaged.begin(), before.damaged.end());
  // Of these, receivers that hold the version before may have other bytes than its half has.
  for (const FormerState& state : before.former) {
    for (const DigestBefore& was : state.before) tiles.insert(was.tile);
  }
  for (const auto& [tile, found_by] : suspects_.take(before.half)) {
    if (delta::tile_digest(layout, generation.half(before.half.half), tile) == (*before.digests)[tile]) continue;
    note(layout, before.version, tile, found_by);
    tiles.insert(tile);
  }
  if (spot_check(generation, sealed.half, digests, kSpotTiles, spot_cursor_)) {
    // Where one tile is wrong others may be: its own bytes changed after they had been counted, or those that it was
    // diffed against were not what their digest said, in this version or any before.
    std::vector<std::uint64_t> read(digests.size());
    delta::half_digests(layout, half, read, pool);
    std::size_t told = 0;
    for (std::uint64_t tile = 0; tile < digests.size(); ++tile) {
      if (read[tile] == digests[tile]) continue;
      if (told++ < kToldMax) note(layout, sealed.version, tile, "the look at some tiles after each diff");
      tiles.insert(tile);
    }
    if (told > kToldMax) log::warn("tiles_damaged version=\"{}\" count={}", to_string(sealed.version), told);
  }
  if (tiles.empty()) return delta;
  for (const std::uint64_t tile : tiles) digests[tile] = delta::tile_digest(layout, half, tile);
  const std::vector<std::uint64_t> list(tiles.begin(), tiles.end());
  auto made = delta::amend(layout, generation.batches, delta, list, &half, digests, delta::root_digest(digests));
  if (made) return std::move(*made);
  log::error("delta_dropped version=\"{}\" error=\"{}\"", to_string(sealed.version), made.error().to_string());
  return std::nullopt;
}

void Damage::publish_again(const ServedPtr& before, std::span<const std::uint64_t> wrong) {
  const Generation& generation = *before->generation;
  auto now = std::make_shared<ServedVersion>(*before);
  auto digests = std::make_shared<std::vector<std::uint64_t>>(*before->digests);
  FormerState former{before->root, {}};
  for (const std::uint64_t tile : wrong) {
    std::uint64_t& digest = (*digests)[static_cast<std::size_t>(tile)];
    former.before.push_back({tile, digest});
    digest = delta::tile_digest(*generation.layout, generation.half(before->half.half), tile);
  }
  now->root = delta::root_digest(*digests);
  now->digests = std::move(digests);
  now->former.push_back(std::move(former));
  if (now->former.size() > kFormerStatesMax) now->former.erase(now->former.begin());

  std::vector<RingEntryPtr> ring;
  const SnapshotPtr there = versions_.snapshot();
  for (const RingEntryPtr& entry : there->ring) {
    auto fresh = amended(*entry, *now, wrong, *before);
    if (!fresh) {
      log::error("ring_cleared reason=\"{}\"", fresh.error().to_string());
      ring.clear();
      break;
    }
    ring.push_back(std::move(*fresh));
  }
  log::info("version_published_again version=\"{}\" root={} tiles={}", to_string(now->version), to_string(now->root),
            wrong.size());
  versions_.publish_again(before, std::move(now), std::move(ring));
}

}  // namespace deltasync::agent
