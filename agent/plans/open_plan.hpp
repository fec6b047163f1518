// A plan that a receiver was given, and what its request and its tries consist of.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/derive/delta_builder.hpp"
#include "agent/plans/packed_frame_cache.hpp"
#include "agent/plans/subset.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/snapshot.hpp"
#include "format/wire.hpp"

namespace deltasync::agent {

/// What data requests may ask for. Immutable, but for the state of its leases.
struct OpenPlan {
  std::uint64_t id = 0;
  std::uint64_t connection = 0;  ///< the control conversation that it ends with
  wire::PlanMode mode = wire::PlanMode::delta;
  LayoutPtr layout;
  ServedPtr served;     ///< full only
  LeasePtr lease;       ///< full only: on the half
  bool copied = false;  ///< full only: extents are copied out of it first, so that no writer waits for them
  std::shared_ptr<PackedFrameCache> packed_frames;  ///< full only: of all such plans of this half
  LeasePtr hold;                                    ///< on everything else, from the plan's beginning to its end
  std::vector<RingEntryPtr> steps;                  ///< oldest first
  SubsetPtr subset;                                 ///< the tiles that it is about; null: all
  std::chrono::steady_clock::time_point opened_at;
  std::chrono::steady_clock::time_point expires_at;

  VersionId target() const { return served ? served->version.id : steps.back()->to.id; }
  Digest128 target_root() const { return served ? served->root : steps.back()->delta->to_root; }
};
using OpenPlanPtr = std::shared_ptr<const OpenPlan>;

/// A plan request that waits for a derived delta. It is tried again whenever something changes; this is what the tries
/// have in common. Owned by the conversation that made the request.
struct PendingPlan {
  DerivedWait derived;
  /// The plan that it could have had at once, of steps of the ring. Opened when the waiting began, so that the steps
  /// stay available if they leave the ring meanwhile. Written by the plan service.
  std::optional<wire::PlanReply> chain;
};

/// Who asks for a plan.
struct Asker {
  std::uint64_t connection = 0;
  std::string host;  ///< the peer's address without its port; lease budgets are by host
  std::string name;  ///< for the log
};

}  // namespace deltasync::agent
