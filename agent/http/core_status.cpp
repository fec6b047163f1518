// What pages ask of the core.
#include <chrono>
#include <span>
#include <vector>

#include "agent/core.hpp"

namespace deltasync::agent {

std::vector<AgentCore::PlanInfo> AgentCore::plans() const {
  const std::lock_guard lock(mutex_);
  std::vector<PlanInfo> list;
  list.reserve(plans_.size());
  for (const auto& entry : plans_) {
    const OpenPlan& plan = *entry.second;
    list.push_back({plan.connection, plan.mode, plan.target(), !plan.lease || plan.lease->live()});
  }
  return list;
}

Behind AgentCore::behind(const VersionId& held) const {
  const std::lock_guard lock(mutex_);
  return publications_.behind(held, std::chrono::steady_clock::now());
}

std::vector<Behind> AgentCore::behind(std::span<const VersionId> held) const {
  std::vector<Behind> all;
  all.reserve(held.size());
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  for (const VersionId& one : held) all.push_back(publications_.behind(one, now));
  return all;
}

std::vector<GenerationPtr> AgentCore::generations() const {
  const std::lock_guard lock(mutex_);
  return generations_;
}

std::uint64_t AgentCore::ring_bytes_max() const {
  const std::lock_guard lock(mutex_);
  return ring_.bytes_max();
}

}  // namespace deltasync::agent
