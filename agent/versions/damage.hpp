// Damage: tiles of the served half whose bytes are not what their digests say. Somebody wrote where nobody may, or
// memory lost a bit; in the version that is served, or in the one that it was diffed against. Such a tile's digest is
// taken again, so that what is served is what there is, and who holds the version as it was before goes on from there.
// Not of a version that a relay brought: it has the right bytes where it pulls from, and who pulls from here is to
// have the same. Such a version is withdrawn: deltas lead to it, nobody gets it whole.
//
// Invariant: only the publisher's thread takes digests again. All others tell of suspects and ring.
// No lock of its own: that of the suspects protects them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "agent/metrics.hpp"
#include "agent/versions/bell.hpp"
#include "agent/versions/scrub.hpp"
#include "agent/versions/suspects.hpp"
#include "agent/versions/version_store.hpp"
#include "base/thread_pool.hpp"
#include "delta/delta.hpp"
#include "format/wire.hpp"

namespace deltasync::agent {

/// Of tiles that a receiver asks about: the first, so that one question has no more read again than a moment takes.
std::vector<std::uint64_t> tiles_to_check(const Layout& layout, std::span<const wire::TileRange> ranges);

class Damage {
 public:
  /// What is passed by reference outlives it.
  Damage(VersionStore& versions, Bell& bell, std::shared_ptr<Reclaimer> reclaimer, Metrics& metrics)
      : versions_(versions), bell_(bell), reclaimer_(std::move(reclaimer)), metrics_(metrics) {}

  /// The thread that reads what is served again. Throws std::system_error if it is not to be had.
  void start(const ScrubOptions& options);
  /// Idempotent.
  void stop();

  // ---- any thread ---------------------------------------------------------------------------------------------------
  /// What a receiver has to do that could not verify tiles of its plan's target.
  enum class Verdict : std::uint8_t {
    valid,       ///< they have their digests here
    plan_again,  ///< there is another version by now, or another state of it
    not_yet,     ///< they are wrong, and will be published again soon: ask again when told of a change
  };
  /// A state of a version.
  struct Target {
    const Layout& layout;
    VersionId id;
    Digest128 root;
  };
  /// Looks at the first of these tiles. `who` asks: for the log.
  Verdict check(const Target& target, std::span<const wire::TileRange> ranges, const std::string& who);
  /// These tiles of a served half may be wrong: the publisher checks them soon.
  void doubt(const HalfKey& half, std::span<const std::uint64_t> tiles, const std::string& found_by);

  // ---- the publisher's thread ---------------------------------------------------------------------------------------
  /// Between two versions: looks at suspects, and publishes the version again if some are wrong.
  void look_at_suspects();
  /// Makes a fresh delta from `before` to `sealed` lead to what the half has now, and `digests` too. Nothing if it
  /// cannot.
  std::optional<delta::Delta> repair_diff(const ServedVersion& before, const shm::HalfView& sealed, delta::Delta delta,
                                          std::vector<std::uint64_t>& digests, ThreadPool& pool);
  /// Tiles of a sealed half, of a relay, that are not what the relay says that they are: a look at a few, and at all
  /// where one of them is wrong.
  std::vector<std::uint64_t> find_in(const Generation& generation, const shm::HalfView& sealed,
                                     const std::vector<std::uint64_t>& digests, ThreadPool& pool);

 private:
  ScrubSource scrub_source();
  void note(const Layout& layout, const Version& version, std::uint64_t tile, const std::string& found_by,
            bool relayed = false);
  void publish_again(const ServedPtr& before, std::span<const std::uint64_t> wrong);
  void withdraw(const ServedPtr& before, std::span<const std::uint64_t> wrong);

  VersionStore& versions_;
  Bell& bell_;
  const std::shared_ptr<Reclaimer> reclaimer_;
  Metrics& metrics_;
  Suspects suspects_;
  std::uint64_t spot_cursor_ = 0;  // the publisher's: the tile that spot_check looks at next
  std::optional<Scrub> scrub_;
};

}  // namespace deltasync::agent
