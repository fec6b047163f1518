#include "agent/serve/children.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::agent {
namespace {

constexpr std::size_t kNamedMax = 8;  ///< endpoints in one answer

}  // namespace

std::size_t Children::count_locked() const {
  return static_cast<std::size_t>(
      std::count_if(children_.begin(), children_.end(), [](const auto& entry) { return entry.second.has_place; }));
}

bool Children::takes_others(const Child& child, Clock::time_point now) const {
  return child.has_place && child.stands_well && !child.endpoint.empty() && !is_silent(child, now);
}

/// Relays that others can be sent to, those that were sent the fewest first; never to oneself.
std::vector<Children::Child*> Children::takers_locked(std::uint64_t besides_instance, Clock::time_point now) {
  std::vector<Child*> takers;
  for (auto& [connection, child] : children_) {
    if (!takes_others(child, now)) continue;
    if (besides_instance == 0 || child.instance != besides_instance) takers.push_back(&child);
  }
  std::stable_sort(takers.begin(), takers.end(), [](const Child* a, const Child* b) { return a->sent < b->sent; });
  return takers;
}

/// The last that came, of those that are no relay's and know how to follow: as many as there are too many, and only
/// while there is somewhere to go.
bool Children::must_go_locked(std::uint64_t connection, Clock::time_point now) const {
  if (max_ == 0) return false;  // all who wait ask this all the time
  const std::size_t count = count_locked();
  if (count <= max_) return false;
  const bool somewhere = std::any_of(children_.begin(), children_.end(),
                                     [&](const auto& entry) { return takes_others(entry.second, now); });
  if (!somewhere) return false;
  std::size_t too_many = count - max_;
  for (auto at = children_.rbegin(); at != children_.rend() && too_many != 0; ++at) {
    const Child& child = at->second;
    if (!child.has_place || !child.endpoint.empty() || !child.can_follow) continue;
    if (at->first == connection) return true;
    --too_many;
  }
  return false;
}

std::optional<Children::Elsewhere> Children::ask(std::uint64_t connection, bool can_follow, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  Child& child = children_[connection];
  child.can_follow = can_follow;
  child.heard_at = now;
  if (max_ == 0) child.has_place = true;
  if (child.has_place && !must_go_locked(connection, now)) return std::nullopt;
  child.has_place = false;
  if (count_locked() >= max_) {
    for (auto& [other, held] : children_) held.has_place = held.has_place && !is_silent(held, now);
  }
  // One that comes last of all has to go where there is no place for it, too.
  const bool displaces =
      !child.endpoint.empty() && std::any_of(children_.begin(), children_.end(), [](const auto& entry) {
        return entry.second.has_place && entry.second.endpoint.empty() && entry.second.can_follow;
      });
  if (count_locked() < max_ || displaces) {
    child.has_place = true;
    return std::nullopt;
  }
  Elsewhere elsewhere;
  const std::vector<Child*> takers = takers_locked(child.instance, now);
  for (Child* const taker : takers) {
    if (elsewhere.endpoints.size() < kNamedMax) elsewhere.endpoints.push_back(taker->endpoint);
  }
  if (!takers.empty()) ++takers.front()->sent;
  return elsewhere;
}

bool Children::must_go(std::uint64_t connection, Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  return must_go_locked(connection, now);
}

void Children::heard(std::uint64_t connection, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (const auto found = children_.find(connection); found != children_.end()) found->second.heard_at = now;
}

void Children::is(std::uint64_t connection, std::uint64_t receiver) {
  const std::lock_guard lock(mutex_);
  Child& child = children_[connection];
  if (child.receiver == receiver) return;
  child.receiver = receiver;
  for (auto at = children_.begin(); at != children_.end(); ++at) {
    if (at->first == connection || at->second.receiver != receiver) continue;
    child.has_place = child.has_place || at->second.has_place;
    child.sent = at->second.sent;
    child.heard_at = at->second.heard_at;
    children_.erase(at);
    return;
  }
}

void Children::relays(std::uint64_t connection, std::uint64_t instance, std::string endpoint) {
  const std::lock_guard lock(mutex_);
  Child& child = children_[connection];
  child.instance = instance;
  child.endpoint = std::move(endpoint);
}

void Children::stands(std::uint64_t connection, bool well) {
  const std::lock_guard lock(mutex_);
  children_[connection].stands_well = well;
}

void Children::left(std::uint64_t connection) {
  const std::lock_guard lock(mutex_);
  children_.erase(connection);
}

std::size_t Children::count() const {
  const std::lock_guard lock(mutex_);
  return count_locked();
}

std::vector<std::string> Children::endpoints(Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> list;
  for (const auto& [connection, child] : children_) {
    if (takes_others(child, now)) list.push_back(child.endpoint);
  }
  return list;
}

}  // namespace deltasync::agent
