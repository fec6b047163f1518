#include "agent/trainer_plans.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::agent {

void PlanBoard::submit(std::uint32_t slot, std::uint32_t writers, std::vector<TensorSlice> plan) {
  if (writers != writers_) {  // another job
    entries_.clear();
    writers_ = writers;
  }
  entries_[slot] = Entry{std::move(plan), true, std::nullopt};
  settle();
}

void PlanBoard::settle() {
  if (entries_.size() < writers_) return;
  std::vector<TensorSlice> all;
  bool all_fresh = true;
  for (const auto& [slot, entry] : entries_) {
    // A verdict that was not picked up yet is as good as final: that plan takes no part in another one.
    if (entry.outcome && !entry.outcome->ok()) return;
    all.insert(all.end(), entry.plan.begin(), entry.plan.end());
    all_fresh = all_fresh && entry.fresh;
  }
  const Status fits = check_(all);
  if (!fits && !all_fresh) {
    last_misfit_ = fits.error().message();
    return;
  }
  last_misfit_.clear();
  for (auto& [slot, entry] : entries_) {
    if (!entry.fresh) continue;
    entry.outcome = fits;
    entry.fresh = !fits.ok();
  }
}

std::optional<Status> PlanBoard::take_outcome(std::uint32_t slot) {
  const auto found = entries_.find(slot);
  if (found == entries_.end()) return Status(Error(Errc::aborted, "the plan was dropped"));
  if (!found->second.outcome) return std::nullopt;
  std::optional<Status> outcome = std::exchange(found->second.outcome, std::nullopt);
  if (!outcome->ok()) entries_.erase(found);
  return outcome;
}

std::string PlanBoard::missing() const {
  std::string list;
  for (std::uint32_t slot = 0; slot < writers_; ++slot) {
    if (entries_.count(slot) == 0) list += (list.empty() ? "" : ", ") + std::to_string(slot);
  }
  return list;
}

Error PlanBoard::give_up(std::uint32_t slot) {
  const std::string absent = missing();
  entries_.erase(slot);
  if (!absent.empty()) return {Errc::timed_out, "no plan yet from writer(s) " + absent};
  return {Errc::timed_out,
          "the plan does not fit those that the other writers registered before, and they sent no new ones: " +
              last_misfit_};
}

void PlanBoard::remove(std::uint32_t slot, const Error& why) {
  if (entries_.erase(slot) == 0 && slot >= writers_) return;
  for (auto& [other, entry] : entries_) {
    if (entry.fresh && !entry.outcome) entry.outcome = Status(why);
  }
}

bool PlanBoard::accepted(std::uint32_t slot) const {
  const auto found = entries_.find(slot);
  return found != entries_.end() && !found->second.fresh;
}

bool PlanBoard::waiting(std::uint32_t slot) const {
  const auto found = entries_.find(slot);
  return found != entries_.end() && found->second.fresh && !found->second.outcome;
}

}  // namespace deltasync::agent
