#include "agent/plans/open_plans.hpp"

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "agent/versions/arriving_delta.hpp"
#include "base/log.hpp"
#include "net/auth.hpp"

namespace deltasync::agent {

OpenPlans::OpenPlans(PlanParts parts)
    : parts_(std::move(parts)), listener_(parts_.versions.changes().listen([this] { trim_pinned(); })) {}

Result<std::uint64_t> OpenPlans::open(OpenPlan made, const Asker& asker, ServedPtr served, std::uint64_t replaced) {
  auto plan = std::make_shared<OpenPlan>(std::move(made));
  plan->connection = asker.connection;
  plan->opened_at = std::chrono::steady_clock::now();
  plan->expires_at = plan->opened_at + parts_.options.plan_limit;
  const std::lock_guard lock(mutex_);
  if (closed_) return Error(Errc::connection, "the agent is shutting down");
  const std::size_t open =
      plans_of_locked(asker.connection).size() - by_connection_.count({asker.connection, replaced});
  if (open >= parts_.options.plans_per_connection_max) {
    return Error(Errc::invalid_argument,
                 "this connection holds " + std::to_string(open) + " plans already; release one before the next");
  }
  do plan->id = net::make_random_id();
  while (plan->id == 0 || plans_.count(plan->id) != 0);
  plans_.emplace(plan->id, plan);  // first: what has begun for it ends with it, also if memory is short from here on
  try {
    by_connection_.emplace(plan->connection, plan->id);
    plan->hold = holds_.begin({});
    if (served) {
      const LeaseBudgets::Time time = parts_.revoker.time_of(asker.host);
      plan->copied = time < parts_.options.lease_grace && parts_.options.copy_bytes_max != 0;
      plan->packed_frames = packed_frames_.share(served->half, parts_.reclaimer, parts_.peer_room);
      plan->served = served;
      plan->lease =
          parts_.leases.begin(served->half, {plan->copied ? LeaseBudgets::Time(0) : time, asker.host, asker.name});
    }
  } catch (...) {
    end_locked(plan->id);
    throw;
  }
  return plan->id;
}

Result<OpenPlanPtr> OpenPlans::find(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = plans_.find(id);
  if (found == plans_.end()) {
    return Error(Errc::lease_revoked, "this plan is over (released, expired, or its connection closed); plan again");
  }
  return found->second;
}

Result<LeaseTable::Reader> OpenPlans::enter(const OpenPlan& plan, std::function<void()> wake) {
  return holds_.enter(plan.hold, std::move(wake));
}

void OpenPlans::release(std::uint64_t id, std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  const auto found = plans_.find(id);
  if (found == plans_.end() || found->second->connection != connection) return;
  const LeasePtr& lease = found->second->lease;
  if (lease && lease->live()) parts_.revoker.gave_back(lease->terms().host);
  parts_.metrics.pull.observe(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - found->second->opened_at).count());
  end_locked(id);
}

std::vector<std::uint64_t> OpenPlans::plans_of_locked(std::uint64_t connection) const {
  std::vector<std::uint64_t> ids;
  for (auto it = by_connection_.lower_bound({connection, 0}); it != by_connection_.end() && it->first == connection;
       ++it) {
    ids.push_back(it->second);
  }
  return ids;
}

void OpenPlans::connection_closed(std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t id : plans_of_locked(connection)) end_locked(id);
}

void OpenPlans::end_all() {
  const std::lock_guard lock(mutex_);
  while (!plans_.empty()) end_locked(plans_.begin()->first);
}

void OpenPlans::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  end_all();
}

bool OpenPlans::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void OpenPlans::run_maintenance() {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  const std::size_t expired = end_if_locked([&](const OpenPlan& plan) { return plan.expires_at <= now; });
  Metrics::add(parts_.metrics.plans_expired, expired);
  // Memory of which nothing may be sent any more: who does not ask would keep it until then.
  end_if_locked([](const OpenPlan& plan) {
    if (plan.served) return plan.served->arriving && !plan.lease->live();
    return plan.steps.front()->arriving && plan.steps.front()->arriving->cut_short();
  });
}

template <class Ended>
std::size_t OpenPlans::end_if_locked(const Ended& ended) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, plan] : plans_) {
    if (ended(*plan)) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) end_locked(id);
  return ids.size();
}

void OpenPlans::end(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  end_locked(id);
}

void OpenPlans::end_locked(std::uint64_t id) {
  const auto found = plans_.find(id);
  if (found == plans_.end()) return;
  if (found->second->lease) parts_.leases.end(*found->second->lease);
  if (found->second->hold) holds_.end(*found->second->hold);
  by_connection_.erase({found->second->connection, id});
  parts_.reclaimer->retire(std::move(found->second));  // with deltas that have left the ring
  plans_.erase(found);
}

/// Deltas that have left the ring, or are not kept any more, and that plans still hold are memory beside it. Who sends
/// them lets go of them when the plan ends.
void OpenPlans::trim_pinned() {
  const std::lock_guard lock(mutex_);
  if (plans_.empty()) return;
  const RetiredAtEnd<const Snapshot> now(*parts_.reclaimer, parts_.versions.snapshot());
  std::set<const RingEntry*> there;
  for (const RingEntryPtr& entry : now->ring) there.insert(entry.get());
  if (now->ahead) there.insert(now->ahead.get());
  for (RingEntryPtr& entry : parts_.deltas.kept()) {
    there.insert(entry.get());
    parts_.reclaimer->retire(std::move(entry));  // it may be the last share by now
  }
  for (;;) {
    std::set<const RingEntry*> pinned;
    std::uint64_t bytes = 0;
    const OpenPlan* oldest = nullptr;
    for (const auto& [id, plan] : plans_) {
      for (const RingEntryPtr& step : plan->steps) {
        if (there.count(step.get()) != 0) continue;
        if (pinned.insert(step.get()).second) bytes += step->bytes();
        if (oldest == nullptr || plan->expires_at < oldest->expires_at) oldest = plan.get();
      }
    }
    if (oldest == nullptr || bytes <= now->ring_bytes_max) return;
    log::warn("plan_ended connection={} reason=\"holds {} bytes of deltas that left the ring\"", oldest->connection,
              bytes);
    Metrics::add(parts_.metrics.plans_expired, 1);
    end_locked(oldest->id);
  }
}

std::vector<OpenPlans::Info> OpenPlans::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<Info> list;
  list.reserve(plans_.size());
  for (const auto& entry : plans_) {
    const OpenPlan& plan = *entry.second;
    list.push_back({plan.connection, plan.mode, plan.target(), !plan.lease || plan.lease->live()});
  }
  return list;
}

}  // namespace deltasync::agent
