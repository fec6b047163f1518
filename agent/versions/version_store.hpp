// What the agent has: the generations of the segment, the version that is served, the ring of deltas that lead to it,
// and when versions were published. Readers get snapshots. The publisher and the trainer's side change it.
//
// Invariants:
//   - A snapshot never changes. Whatever receivers may get that has changed makes a new one, and listeners hear of it.
//   - The ring's chain ends at the served version, and is of its layout.
//   - A lease may be begun on what a snapshot serves, but it counts only if is_current() says so afterwards. Then the
//     publisher, which looks at leases after it has published, sees the lease before it gives the half back.
//
// Its mutex is held for looks and exchanges only, and under it those of the reclaimer, the ring's keeper and, in
// drop_old(), the leases.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "agent/metrics.hpp"
#include "agent/options.hpp"
#include "agent/versions/adopt.hpp"
#include "agent/versions/bell.hpp"
#include "agent/versions/changes.hpp"
#include "agent/versions/publications.hpp"
#include "agent/versions/reclaimer.hpp"
#include "agent/versions/ring.hpp"
#include "agent/versions/ring_keeper.hpp"
#include "agent/versions/snapshot.hpp"

namespace deltasync::agent {

/// Epochs beyond this are not believed when a receiver names them: a quarter of the counting bits, which leaves 3·10⁹
/// trainers to come. (Epochs that older releases made from a clock reach it in the year 2109.)
inline constexpr std::uint64_t kEpochHeardMax = std::uint64_t{1} << 62;

/// Thread-safe.
class VersionStore {
 public:
  /// `bell` follows the newest generation. What is passed by reference outlives the store.
  VersionStore(const CoreOptions& options, AdoptedSegments adopted, Bell& bell, std::shared_ptr<Reclaimer> reclaimer,
               Metrics& metrics);

  /// The thread that keeps the ring's deltas in files. Throws std::system_error if it is not to be had.
  void start() { keeper_.start(); }
  /// Idempotent.
  void stop() { keeper_.stop(); }

  SnapshotPtr snapshot() const;
  bool is_current(const Snapshot& snapshot) const;
  /// Ascending.
  std::vector<GenerationPtr> generations() const;
  GenerationPtr newest() const;  ///< null: none
  /// Tiles of the largest layout that a request may be about.
  std::uint64_t tiles_max() const;
  /// How far a receiver that holds this version (epoch 0: none) is behind what is served.
  Behind behind(const VersionId& held) const;
  /// The same of many at one moment.
  std::vector<Behind> behind(std::span<const VersionId> held) const;
  /// Told of each publication, of generations that come, of those that are released, and of deltas that others derived.
  Changes& changes() noexcept { return changes_; }

  /// A receiver says that it holds a version of this epoch. It may say anything: that moves the count of epochs up to
  /// kEpochHeardMax, far below where it ends.
  void hear_of_epoch(std::uint64_t epoch);
  std::uint64_t epoch_heard() const noexcept { return epoch_heard_; }

  // ---- the publisher's ----------------------------------------------------------------------------------------------
  /// An agent before this one left it, or a later one of its epoch.
  bool was_found(const VersionId& version) const noexcept;
  /// What an agent before this one kept of the deltas that lead to `served`. For the first version only.
  std::vector<RingEntryPtr> adopt_ring(const ServedVersion& served);
  /// From here on receivers get this version. `deltas` lead to it: they go on from those in the ring; none: the ring
  /// begins again. Does nothing if its generation was released meanwhile.
  void publish(ServedPtr served, std::vector<RingEntryPtr> deltas);
  /// `now` is the version of `before` in another state; `ring` has other deltas between the same versions as now. Does
  /// nothing if another version is served meanwhile.
  void publish_again(const ServedPtr& before, ServedPtr now, std::vector<RingEntryPtr> ring);
  /// While nothing is served, those who take it may plan for this version, which a relay is bringing. False if
  /// something is served meanwhile, or its generation is not the one whose layout receivers get.
  bool announce(ServedPtr arriving);
  /// They may not any more. Does nothing if something else is announced or served meanwhile.
  void withdraw(const ServedPtr& arriving);
  /// A relay is receiving this delta: who holds what it leads from may plan for it, once that is what is served. It
  /// takes the place of another one.
  void expect(RingEntryPtr delta);
  /// It is over. Does nothing if it is another one by now.
  void expect_no_more(const RingEntryPtr& delta);
  /// Drops the generations before the served one that `idle` says nobody reads, and returns them: their files are the
  /// caller's to remove. Plans that hold one keep its mapping.
  std::vector<GenerationPtr> drop_old(const std::function<bool(std::uint64_t generation)>& idle);

  // ---- the trainer-setup thread's -----------------------------------------------------------------------------------
  /// The next generation, which becomes the newest. no_space as Generation::create.
  Result<GenerationPtr> create(LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded);
  /// Removes a generation that holds no version, and its file.
  Status remove(const GenerationPtr& generation);
  /// Serves nothing any more, and removes all generations and their files. Returns their numbers: they stay mapped
  /// until their last reader has left (Reclaimer::held, has). `why`: for the log.
  Result<std::vector<std::uint64_t>> release_all(const std::string& why);

 private:
  void set_snapshot_locked(GenerationPtr generation, ServedPtr served, ServedPtr arriving = nullptr);

  const CoreOptions& options_;
  Bell& bell_;
  const std::shared_ptr<Reclaimer> reclaimer_;
  Metrics& metrics_;
  const VersionId found_;                      // the newest that an agent before this one left; epoch 0 if none
  std::uint64_t next_number_;                  // the trainer-setup thread's
  std::atomic<std::uint64_t> epoch_heard_{0};  // the latest that receivers hold
  Changes changes_;
  RingKeeper keeper_;

  mutable std::mutex mutex_;
  std::vector<GenerationPtr> generations_;  // protected by mutex_, as all below; ascending
  SnapshotPtr snapshot_;                    // never null
  DeltaRing ring_;
  RingEntryPtr ahead_;  // that a relay is receiving; or null
  Publications publications_;
};

}  // namespace deltasync::agent
