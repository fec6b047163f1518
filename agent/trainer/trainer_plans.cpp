#include "agent/trainer/trainer_plans.hpp"

#include <utility>

namespace deltasync::agent {

void WriterPlanBoard::submit(std::uint32_t slot, std::uint32_t writers, WriterPlan plan) {
  put(slot, writers, std::move(plan), true);
}

void WriterPlanBoard::restore(std::uint32_t slot, std::uint32_t writers, WriterPlan plan) {
  put(slot, writers, std::move(plan), false);
}

void WriterPlanBoard::put(std::uint32_t slot, std::uint32_t writers, WriterPlan plan, bool fresh) {
  if (writers != writers_) {  // another job
    entries_.clear();
    writers_ = writers;
  }
  entries_[slot] = Entry{std::move(plan), fresh, std::nullopt};
  ++state_;
}

std::optional<WriterPlanBoard::Trial> WriterPlanBoard::next_trial() {
  if (trying_ || state_ == tried_ || entries_.size() < writers_) return std::nullopt;
  Trial trial{state_, {}};
  bool awaited = false;
  for (const auto& [slot, entry] : entries_) {
    // A verdict that was not picked up yet is as good as final: that plan takes no part in another one.
    if (entry.outcome && !entry.outcome->ok()) return std::nullopt;
    awaited = awaited || waiting(slot);
    trial.plans.push_back(entry.plan);
  }
  if (!awaited) return std::nullopt;
  tried_ = state_;
  trying_ = true;
  return trial;
}

void WriterPlanBoard::conclude(const Trial& trial, const Status& fits) {
  trying_ = false;
  if (trial.state != state_) return;
  bool all_fresh = true;
  for (const auto& [slot, entry] : entries_) all_fresh = all_fresh && entry.fresh;
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

void WriterPlanBoard::fail(const Trial& trial, const Error& why) {
  trying_ = false;
  if (trial.state == state_) tell_waiting(why);
}

void WriterPlanBoard::tell_waiting(const Error& why) {
  for (auto& [slot, entry] : entries_) {
    if (entry.fresh && !entry.outcome) entry.outcome = Status(why);
  }
}

std::optional<Status> WriterPlanBoard::take_outcome(std::uint32_t slot) {
  const auto found = entries_.find(slot);
  if (found == entries_.end()) return Status(Error(Errc::aborted, "the plan was dropped"));
  if (!found->second.outcome) return std::nullopt;
  std::optional<Status> outcome = std::exchange(found->second.outcome, std::nullopt);
  if (!outcome->ok()) {
    entries_.erase(found);
    ++state_;
  }
  return outcome;
}

std::string WriterPlanBoard::missing_besides(std::uint32_t besides, std::uint32_t writers) const {
  std::string list;
  for (std::uint32_t slot = 0; slot < writers; ++slot) {
    if (slot != besides && (writers != writers_ || entries_.count(slot) == 0))
      list += (list.empty() ? "" : ", ") + std::to_string(slot);
  }
  return list;
}

Error WriterPlanBoard::give_up(std::uint32_t slot) {
  const std::string absent = missing_besides(slot, writers_);
  entries_.erase(slot);
  ++state_;
  if (!absent.empty()) return {Errc::timed_out, "no plan yet from writer(s) " + absent};
  if (trying_ || last_misfit_.empty()) return {Errc::timed_out, "all plans are there; their check is not done yet"};
  return {Errc::timed_out,
          "the plan does not fit those that the other writers registered before, and they sent no new ones: " +
              last_misfit_};
}

void WriterPlanBoard::remove(std::uint32_t slot, const Error& why) {
  if (entries_.erase(slot) == 0 && slot >= writers_) return;
  ++state_;
  tell_waiting(why);
}

bool WriterPlanBoard::accepted(std::uint32_t slot) const {
  const auto found = entries_.find(slot);
  return found != entries_.end() && !found->second.fresh;
}

bool WriterPlanBoard::waiting(std::uint32_t slot) const {
  const auto found = entries_.find(slot);
  return found != entries_.end() && found->second.fresh && !found->second.outcome;
}

}  // namespace deltasync::agent
