// When a writer waits for a half, its readers lose their leases: each after the time that its host has left, all of
// them after half of the writer's own time.
//
// Invariant: a host that lost a lease has less time at the next, until it gives leases back in time.
// Its mutex protects the budgets. Those of the store and of the leases are taken under it.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>

#include "agent/metrics.hpp"
#include "agent/plans/lease_budgets.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/version_store.hpp"

namespace deltasync::agent {

/// Thread-safe.
class LeaseRevoker {
 public:
  /// `grace`: of a host that never lost a lease. What is passed by reference outlives it.
  LeaseRevoker(LeaseBudgets::Time grace, VersionStore& versions, LeaseTable& leases, Metrics& metrics)
      : versions_(versions), leases_(leases), metrics_(metrics), budgets_(grace) {}

  /// How long a reader of this host may keep a writer waiting.
  LeaseBudgets::Time time_of(const std::string& host) const;
  /// A reader released its lease while it lived.
  void gave_back(const std::string& host);
  /// Revokes what has had its time. True while a half retires: then writers may wait soon, and it is to be called again
  /// within milliseconds.
  bool run_maintenance();

 private:
  void revoke_locked(const HalfKey& half, const VersionId& version, std::chrono::nanoseconds waited);

  struct HalfRequest {
    HalfKey half;
    std::chrono::steady_clock::time_point since;
    std::chrono::steady_clock::time_point revoke_all_at;
  };

  VersionStore& versions_;
  LeaseTable& leases_;
  Metrics& metrics_;
  mutable std::mutex mutex_;
  LeaseBudgets budgets_;               // protected by mutex_, as the next one
  std::optional<HalfRequest> waited_;  // the half that a writer waits for
};

}  // namespace deltasync::agent
