#include "agent/versions/arrival.hpp"

#include <algorithm>
#include <utility>

#include "agent/versions/damage.hpp"
#include "base/log.hpp"
#include "base/racing_reads.hpp"
#include "delta/delta.hpp"
#include "delta/geometry.hpp"

namespace deltasync::agent {
namespace {

constexpr unsigned kNoHalf = shm::kHalves;  ///< of leases on what lies in none

constexpr auto kPatience = std::chrono::seconds(5);        ///< without a tile, from the first on
constexpr auto kPatienceFirst = std::chrono::seconds(30);  ///< for the first
constexpr auto kPatienceMore = std::chrono::seconds(1);    ///< for each agent on the way but the first, so that the
                                                           ///< relay next to what stands still goes elsewhere first
constexpr auto kPatienceMax = std::chrono::seconds(60);

}  // namespace

void Arrival::begin(std::uint64_t connection, ServedVersion version) {
  const std::lock_guard lock(mutex_);
  if (now_) end_locked("the relay brings another one");
  version.half = {version.generation->number, kNoHalf, ++count_};
  version.relayed = true;
  version.published_at = Clock::now();
  auto made = std::make_shared<const ServedVersion>(std::move(version));
  if (!versions_.announce(made)) return;
  now_ = std::move(made);
  connection_ = connection;
  tiles_ = now_->arriving->tiles_in_place();
  moved_at_ = Clock::now();
  longest_ = {};
  stands_ = false;
  log::info("version_arrives version=\"{}\" root={} generation={}", to_string(now_->version), to_string(now_->root),
            now_->generation->number);
}

void Arrival::end(std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  if (now_ && connection == connection_) end_locked("its relay has given it up, or is gone");
}

/// A relay behind a slow link is given as long as it took before, and as long again.
std::chrono::nanoseconds Arrival::patience() const {
  if (tiles_ == 0) return kPatienceFirst;
  const auto above = static_cast<int>(origin_.parents().size());
  const auto usual = kPatience + std::max(above - 1, 0) * kPatienceMore;
  return std::clamp<std::chrono::nanoseconds>(2 * longest_, usual, kPatienceMax);
}

void Arrival::look() {
  const std::lock_guard lock(mutex_);
  if (!now_) return;
  const SnapshotPtr snapshot = versions_.snapshot();
  if (snapshot->served || snapshot->generation != now_->generation)
    return end_locked("it is served, or its layout left");
  const auto at = Clock::now();
  const std::uint64_t tiles = now_->arriving->tiles_in_place();
  if (std::exchange(tiles_, tiles) == tiles) {
    if (stands_ || tiles == now_->arriving->tiles() || at - moved_at_ < patience()) return;
    stands_ = true;
    const std::string version = to_string(now_->version);
    log::warn("version_stands version=\"{}\" tiles={} of={} effect=\"receivers go elsewhere, or wait\"", version, tiles,
              now_->arriving->tiles());
    stop_offering_locked();
    origin_.stands(Origin::CutOff{"its relay is there, but brings no more tiles of " + version, moved_at_});
    return;
  }
  longest_ = std::max<std::chrono::nanoseconds>(longest_, at - moved_at_);
  moved_at_ = at;
  if (!std::exchange(stands_, false)) return;
  log::info("version_arrives_again version=\"{}\"", to_string(now_->version));
  origin_.stands(std::nullopt);
  versions_.announce(now_);
}

bool Arrival::check(const ServedVersion& version, std::span<const wire::TileRange> tiles, const std::string& who) {
  const Layout& layout = *version.generation->layout;
  for (const std::uint64_t tile : tiles_to_check(layout, tiles)) {
    if (!version.arriving->in_place(tile)) continue;
    {
      const RacingReads racing;
      if (delta::tile_digest(layout, version.bytes(), tile) == (*version.digests)[static_cast<std::size_t>(tile)]) {
        continue;
      }
    }
    log::error("arriving_tile_is_wrong version=\"{}\" tile={} found_by=\"{}\" effect=\"it is served once it is whole\"",
               to_string(version.version), delta::tile_name(layout, tile), who);
    const std::lock_guard lock(mutex_);
    leases_.revoke(version.half);
    if (now_ && now_->half == version.half) end_locked("a tile of it is wrong");
    return false;
  }
  return true;
}

/// SYNC POINT plan: it is withdrawn first, so a lease that is not seen here begins too late to count.
void Arrival::stop_offering_locked() {
  versions_.withdraw(now_);
  leases_.revoke(now_->half);
}

/// Who has not read all of it plans again: for the half, or for what comes next.
void Arrival::end_locked(const char* why) {
  stop_offering_locked();
  const ServedPtr over = std::exchange(now_, nullptr);
  origin_.stands(std::nullopt);
  log::info("version_arrives_no_more version=\"{}\" why=\"{}\"", to_string(over->version), why);
}

}  // namespace deltasync::agent
