// Answers plan requests.
//
// Invariant: a plan is made from one snapshot, without a lock. It counts only if that is still the store's once the
// plan is open: else it is ended, and made again. So no plan outlives a release, and no lease is overlooked
// (VersionStore). No lock of its own: what it changes is the request's, or OpenPlans'.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/plans/open_plan.hpp"
#include "agent/plans/open_plans.hpp"
#include "agent/plans/planner.hpp"

namespace deltasync::agent {

/// Thread-safe.
class PlanService {
 public:
  PlanService(PlanParts parts, OpenPlans& plans) : parts_(std::move(parts)), plans_(plans) {}

  /// One try to answer a plan request. Nothing if it has to wait: `waiting_for` says for what, and those who listen to
  /// the store's changes hear when to try again. A full answer has begun a lease. `pending` is the same for all tries
  /// of one request. `subset` has the tiles that the connection subscribed to and the request names; null: all tiles.
  Result<std::optional<wire::PlanReply>> plan(const wire::PlanRequest& request, const Asker& asker,
                                              std::string* waiting_for, PendingPlan& pending,
                                              const SubsetPtr& subset = nullptr);

 private:
  /// One try.
  struct Attempt {
    const wire::PlanRequest& request;
    const Asker& asker;
    const SubsetPtr& subset;
    const SnapshotPtr& now;
    const ServedPtr& served;  ///< or what arrives, for who takes that; null: neither
    const Offer& offer;       ///< for the subset
    std::string* waiting_for;
    PendingPlan& pending;
    bool moved_on = false;  ///< the store has: once more
  };
  using Answer = Result<std::optional<wire::PlanReply>>;
  Answer attempt(Attempt& a);
  /// By the delta that a relay is still receiving; nothing if that is not what is asked for.
  std::optional<Answer> attempt_ahead(Attempt& a);
  Answer wait_for_delta(Attempt& a, const Decision& decision);
  static void prefer_smaller(const Attempt& a, Decision& decision, std::vector<RingEntryPtr>& steps);
  /// `steps`: of a delta, or listed with a full answer. `replaced`: the plan that ends with it; 0: none.
  Answer open(Attempt& a, const Decision& decision, std::vector<RingEntryPtr> steps, std::uint64_t replaced);
  std::optional<wire::PlanReply> chain_of(const PendingPlan& pending) const;

  const PlanParts parts_;
  OpenPlans& plans_;
};

}  // namespace deltasync::agent
