// The plans that are open: what each holds, and when it ends.
//
// Invariants:
//   - An open plan holds what it lists, so that steps may leave the ring.
//   - What plans hold of deltas that have left the ring is bounded by the ring's own bound: at each change of the store
//     the oldest of these plans end until it is.
//
// Its mutex protects the table. Those of the revoker, the builder, the store, the leases and the reclaimer are taken
// under it; none of them calls back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/derive/delta_builder.hpp"
#include "agent/metrics.hpp"
#include "agent/options.hpp"
#include "agent/plans/lease_revoker.hpp"
#include "agent/plans/open_plan.hpp"
#include "agent/room.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/version_store.hpp"

namespace deltasync::agent {

/// What plans hold, and what they use up. Outlives them.
struct PlanParts {
  const CoreOptions& options;
  VersionStore& versions;
  DeltaBuilder& deltas;
  LeaseTable& leases;
  LeaseRevoker& revoker;
  std::shared_ptr<Reclaimer> reclaimer;
  Room peer_room;             ///< for packed frames that are kept
  unsigned pack_threads = 0;  ///< told to receivers
  Metrics& metrics;
};

/// Thread-safe.
class OpenPlans {
 public:
  /// Listens to the store's changes from here on.
  explicit OpenPlans(PlanParts parts);

  /// Opens a plan, whose id it chooses, and begins its leases. `served`: of a full plan, else null. `replaced`: a plan
  /// that the caller ends next, and that does not count; 0: none. invalid_argument if the connection has too many;
  /// connection after close(). The caller has to check afterwards that what the plan is made from is still current.
  Result<std::uint64_t> open(OpenPlan plan, const Asker& asker, ServedPtr served, std::uint64_t replaced);
  /// lease_revoked if the plan is over (released, expired, its control connection closed) or was never made.
  Result<OpenPlanPtr> find(std::uint64_t id) const;
  /// As LeaseTable::enter, for the plan as a whole. Whatever sends what the plan holds (deltas that may have left the
  /// ring, a mapping) is such a Reader, and stops when the plan ends.
  Result<LeaseTable::Reader> enter(const OpenPlan& plan, std::function<void()> wake);
  /// The receiver has what it wanted. Does nothing if the plan is over, or another connection's.
  void release(std::uint64_t id, std::uint64_t connection);
  /// Does nothing if the plan is over.
  void end(std::uint64_t id);
  /// Ends all plans of a control conversation.
  void connection_closed(std::uint64_t connection);
  void end_all();
  /// Ends all plans, and refuses new ones from now on.
  void close();
  bool closed() const;
  /// Ends plans that are past their time, or of a version that arrives no more.
  void run_maintenance();

  struct Info {
    std::uint64_t connection = 0;
    wire::PlanMode mode = wire::PlanMode::delta;
    VersionId target;
    bool live = true;
  };
  std::vector<Info> list() const;

 private:
  std::vector<std::uint64_t> plans_of_locked(std::uint64_t connection) const;
  void end_locked(std::uint64_t id);
  template <class Ended>
  std::size_t end_if_locked(const Ended& ended);
  void trim_pinned();

  const PlanParts parts_;
  LeaseTable holds_{[] {}};  // one for each plan, on no half
  mutable std::mutex mutex_;
  std::map<std::uint64_t, OpenPlanPtr> plans_;                       // protected by mutex_, as the next three
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_connection_;  // (connection, plan) of each
  ServedPackedFrameCache packed_frames_;
  bool closed_ = false;
  const Changes::Listener listener_;
};

}  // namespace deltasync::agent
