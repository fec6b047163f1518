#include "agent/plans/lease_revoker.hpp"

#include "base/log.hpp"

namespace deltasync::agent {

LeaseBudgets::Time LeaseRevoker::time_of(const std::string& host) const {
  const std::lock_guard lock(mutex_);
  return budgets_.of(host);
}

void LeaseRevoker::gave_back(const std::string& host) {
  const std::lock_guard lock(mutex_);
  budgets_.gave_back(host);
}

bool LeaseRevoker::run_maintenance() {
  const auto now = std::chrono::steady_clock::now();
  bool retiring_any = false;
  std::optional<HalfRequest> waited;
  const std::lock_guard lock(mutex_);
  for (const GenerationPtr& generation : versions_.generations()) {
    const auto retiring = generation->role->retiring();
    if (!retiring) continue;
    retiring_any = true;
    const auto waiting = generation->role->writer_waiting();
    if (!waiting) continue;
    const HalfKey key{generation->number, retiring->half, retiring->sequence};
    waited = waited_ && waited_->half == key ? *waited_ : HalfRequest{key, now, now + waiting->remaining() / 2};
    const bool all = now >= waited->revoke_all_at;
    revoke_locked(key, retiring->version.id, all ? std::chrono::nanoseconds::max() : now - waited->since);
  }
  waited_ = waited;
  return retiring_any;
}

void LeaseRevoker::revoke_locked(const HalfKey& half, const VersionId& version, std::chrono::nanoseconds waited) {
  const auto revoked = leases_.revoke(half, waited);
  Metrics::add(metrics_.leases_revoked, revoked.size());
  for (const LeasePtr& lease : revoked) {
    const std::string& host = lease->terms().host;
    budgets_.lost(host);
    log::info("lease_revoked name=\"{}\" host={} version={} reason=\"a writer waits for the half\" next_time_ms={}",
              lease->terms().name, host, to_string(version), budgets_.of(host).count());
  }
}

}  // namespace deltasync::agent
