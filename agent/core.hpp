// The agent without its sockets: its parts, wired together. Who wants something of a part asks that part.
//
//   Reclaimer     frees what is large on a thread of its own
//   Bell          what the publisher waits for
//   VersionStore  generations, what is served, the ring
//   LeaseTable    who reads which half
//   Damage        tiles that are not what their digests say, and the scrub that looks for them
//   Origin        where a relay has the versions from
//   Arrival       the version that a relay is bringing, while nothing is served
//   DeltaArrival  the delta that a relay is bringing to what is served
//   Publisher     the thread that moves halves through their states
//   DeltaBuilder  merged and compact deltas, and the threads that make them
//   LeaseRevoker  takes leases back when a writer waits
//   OpenPlans     the plans that receivers have, and what those hold
//   PlanService   plan requests
//   SubsetTable   subscriptions
//   SegmentHooks  what the trainer server asks for
//   AgentFiles    names of files
//
// Each part knows only those above it. Its header says what its lock protects, or why it needs none. Locks are taken in
// this order, and never upwards:
//
//   Arrival, DeltaArrival → Changes → OpenPlans → LeaseRevoker → DeltaBuilder → VersionStore → LeaseTable → Bell,
//   Reclaimer, RingKeeper, AgentRole, Origin
//
// A part that calls others mostly holds none: it works on an immutable Snapshot, and asks in the end whether that is
// still the present one.
#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include "agent/derive/delta_builder.hpp"
#include "agent/metrics.hpp"
#include "agent/options.hpp"
#include "agent/plans/lease_revoker.hpp"
#include "agent/plans/open_plans.hpp"
#include "agent/plans/plan_service.hpp"
#include "agent/plans/subset_table.hpp"
#include "agent/room.hpp"
#include "agent/serve/pack_pool.hpp"
#include "agent/trainer/segment_hooks.hpp"
#include "agent/versions/agent_files.hpp"
#include "agent/versions/arrival.hpp"
#include "agent/versions/bell.hpp"
#include "agent/versions/damage.hpp"
#include "agent/versions/delta_arrival.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/origin.hpp"
#include "agent/versions/publisher.hpp"
#include "agent/versions/reclaimer.hpp"
#include "agent/versions/version_store.hpp"
#include "base/log_limit.hpp"

namespace deltasync::agent {

class AgentCore {
 public:
  /// Takes the lock of `options.name`, adopts what an agent before left and starts the threads. Errors:
  /// already_exists (another agent), permission, io.
  static Result<std::unique_ptr<AgentCore>> start(const CoreOptions& options);
  /// Joins the threads. The segment stays.
  ~AgentCore();
  AgentCore(const AgentCore&) = delete;
  AgentCore& operator=(const AgentCore&) = delete;

  const CoreOptions& options() const noexcept { return options_; }
  Metrics& metrics() noexcept { return metrics_; }
  VersionStore& versions() noexcept { return versions_; }
  LeaseTable& leases() noexcept { return leases_; }
  Damage& damage() noexcept { return damage_; }
  DeltaBuilder& deltas() noexcept { return deltas_; }
  OpenPlans& open_plans() noexcept { return open_plans_; }
  PlanService& plans() noexcept { return plans_; }
  SubsetTable& subsets() noexcept { return subsets_; }
  Arrival& arrival() noexcept { return arrival_; }
  DeltaArrival& delta_arrival() noexcept { return delta_arrival_; }
  const Origin& origin() const noexcept { return origin_; }
  SegmentHooks& trainer_hooks() noexcept { return trainer_hooks_; }
  AgentFiles& files() noexcept { return files_; }
  PackPool& packers() noexcept { return packers_; }
  const Room& copy_room() const noexcept { return copy_room_; }
  /// Memory for peers: their requests, what waits to be sent to them, their subscriptions, and what is cached for
  /// others that may ask for the same.
  const Room& peer_room() const noexcept { return peer_room_; }

  /// Ends what is past its time, and revokes leases that a writer has waited for long enough. Returns after which time
  /// to call it again. One thread at a time.
  std::chrono::milliseconds run_maintenance();

  /// Stops the threads and ends all plans. Idempotent. Conversations may still be there.
  void stop();

 private:
  AgentCore(const CoreOptions& options, shm::AgentLock lock, std::shared_ptr<Reclaimer> reclaimer,
            AdoptedSegments adopted);
  PlanParts plan_parts();
  void start_threads();

  // Destroyed from the bottom up, after stop() has joined the threads: each outlives those that use it.
  const CoreOptions options_;
  Metrics metrics_;
  const Room copy_room_;
  const Room peer_room_;
  PackPool packers_;
  const std::shared_ptr<Reclaimer> reclaimer_;
  AgentFiles files_;
  Bell bell_;
  LeaseTable leases_{[this] { bell_.ring(); }};
  VersionStore versions_;
  Damage damage_;
  Origin origin_;
  Arrival arrival_;
  DeltaArrival delta_arrival_;
  Publisher publisher_;
  DeltaBuilder deltas_;
  LeaseRevoker revoker_;
  OpenPlans open_plans_;
  PlanService plans_;
  SubsetTable subsets_;
  log::LineLimit origin_lines_{1, std::chrono::seconds(30)};
  SegmentHooks trainer_hooks_;
  std::thread reclaimer_thread_;  // unmaps and frees what nobody holds any more
};

}  // namespace deltasync::agent
