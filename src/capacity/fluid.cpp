#include "capacity/fluid.hpp"

#include <algorithm>
#include <cassert>

namespace deltasync::capacity {
namespace {

/// What differs by less is one event, or one level: sums of the same numbers in another order differ so much.
constexpr double kSame = 1e-9;

bool not_later(double a, double b) {
  return a <= b + kSame * std::max(1e-3, b);
}

}  // namespace

ResourceId Fluid::add_resource(double per_s) {
  assert(per_s > 0);
  resources_.emplace_back().per_s = per_s;
  return static_cast<ResourceId>(resources_.size() - 1);
}

WorkId Fluid::add(Work work, std::span<const WorkId> after) {
  assert(work.weight > 0);
  const auto id = static_cast<WorkId>(items_.size());
  std::erase_if(work.uses,
                [&](const Use& use) { return use.each <= 0 || resources_[use.resource].per_s == kUnlimited; });
  Item& item = items_.emplace_back();
  item.work = std::move(work);
  item.waits_for = static_cast<std::uint32_t>(after.size());
  for (const WorkId before : after) {
    assert(before < id);
    items_[before].then.push_back(id);
  }
  return id;
}

void Fluid::run() {
  for (WorkId id = 0; id < items_.size(); ++id) {
    if (items_[id].waits_for == 0) release(id, 0);
  }
  std::vector<Event> batch;
  while (!events_.empty()) {
    const double now_s = events_.top().at_s;
    batch.clear();
    while (!events_.empty() && not_later(events_.top().at_s, now_s)) {
      if (events_.top().round == items_[events_.top().work].round) batch.push_back(events_.top());
      events_.pop();
    }
    for (const Event& event : batch) {
      if (items_[event.work].state == State::delayed) {
        start(event.work, now_s);
      } else {
        finish(event.work, now_s);
      }
    }
    make_rates(now_s);
  }
}

/// All that it waits for is over.
void Fluid::release(WorkId id, double now_s) {
  Item& item = items_[id];
  item.state = State::delayed;
  events_.push({now_s + item.work.delay_s, id, item.round});
}

void Fluid::start(WorkId id, double now_s) {
  Item& item = items_[id];
  item.since_s = now_s;
  item.left = item.work.amount;
  if (item.left <= 0 || item.work.uses.empty()) {
    finish(id, now_s);
    return;
  }
  item.state = State::active;
  for (const Use& use : item.work.uses) {
    resources_[use.resource].active.push_back(id);
    touch(use.resource);
  }
}

void Fluid::touch(ResourceId id) {
  if (std::exchange(resources_[id].touched, true)) return;
  touched_.push_back(id);
}

void Fluid::finish(WorkId id, double now_s) {
  if (items_[id].state == State::active) {
    account(items_[id], now_s);
    for (const Use& use : items_[id].work.uses) touch(use.resource);
  }
  Item& item = items_[id];
  item.state = State::ended;
  item.end_s = now_s;
  ++item.round;
  for (const WorkId next : item.then) {
    if (--items_[next].waits_for > 0) continue;
    items_[next].released_by = id;
    release(next, now_s);
  }
}

/// The time since its rate was made is time that its limit cost.
void Fluid::account(Item& item, double now_s) {
  const double passed_s = now_s - item.since_s;
  item.left = std::max(0.0, item.left - item.rate * passed_s);
  item.since_s = now_s;
  if (passed_s <= 0) return;
  if (item.limited.empty() || item.limited.back().first != item.limit) item.limited.emplace_back(item.limit, 0);
  item.limited.back().second += passed_s;
}

void Fluid::make_rates(double now_s) {
  if (touched_.empty()) return;
  for (const ResourceId id : touched_) {
    resources_[id].touched = false;
    std::erase_if(resources_[id].active, [&](WorkId user) { return items_[user].state != State::active; });
  }
  collect_touched();
  touched_.clear();
  for (const WorkId id : open_) account(items_[id], now_s);
  const std::vector<WorkId> changed = open_;
  fill();
  for (const WorkId id : changed) {
    Item& item = items_[id];
    ++item.round;
    events_.push({now_s + item.left / item.rate, id, item.round});
  }
}

/// What shares anything with a touched resource, with what shares something with that, and so on.
void Fluid::collect_touched() {
  ++turn_;
  open_.clear();
  open_resources_.clear();
  const auto see = [&](ResourceId id) {
    if (resources_[id].seen == turn_) return;
    resources_[id].seen = turn_;
    open_resources_.push_back(id);
  };
  for (const ResourceId id : touched_) see(id);
  for (std::size_t i = 0; i < open_resources_.size(); ++i) {
    for (const WorkId id : resources_[open_resources_[i]].active) {
      if (items_[id].seen == turn_) continue;
      items_[id].seen = turn_;
      open_.push_back(id);
      for (const Use& use : items_[id].work.uses) see(use.resource);
    }
  }
  std::sort(open_.begin(), open_.end());
}

/// Progressive filling: the rates of all grow alike, each by its weight, until a resource has no more. Who uses that
/// one stays where it is, and the others go on.
void Fluid::fill() {
  for (const ResourceId id : open_resources_) {
    resources_[id].free = resources_[id].per_s;
    resources_[id].wanted = 0;
    resources_[id].users = 0;
  }
  for (const WorkId id : open_) {
    for (const Use& use : items_[id].work.uses) {
      resources_[use.resource].wanted += use.each * items_[id].work.weight;
      ++resources_[use.resource].users;
    }
  }
  while (!open_.empty()) {
    double level = kUnlimited;
    for (const ResourceId id : open_resources_) {
      if (resources_[id].users > 0) level = std::min(level, resources_[id].free / resources_[id].wanted);
    }
    std::vector<WorkId> rest;
    std::vector<std::pair<WorkId, ResourceId>> frozen;
    for (const WorkId id : open_) {
      const auto& uses = items_[id].work.uses;
      const auto full = std::find_if(uses.begin(), uses.end(), [&](const Use& use) {
        return resources_[use.resource].free / resources_[use.resource].wanted <= level * (1 + kSame);
      });
      if (full == uses.end()) {
        rest.push_back(id);
      } else {
        frozen.emplace_back(id, full->resource);
      }
    }
    for (const auto& [id, limit] : frozen) freeze(id, limit, level);
    open_ = std::move(rest);
  }
}

void Fluid::freeze(WorkId id, ResourceId limit, double level) {
  Item& item = items_[id];
  item.rate = level * item.work.weight;
  item.limit = limit;
  for (const Use& use : item.work.uses) {
    Resource& resource = resources_[use.resource];
    resource.free = std::max(0.0, resource.free - item.rate * use.each);
    resource.wanted -= item.work.weight * use.each;
    --resource.users;
  }
}

std::vector<PathPart> Fluid::path_to(WorkId work) const {
  std::vector<PathPart> parts;
  const auto add = [&](std::uint32_t stage, ResourceId limit, double seconds) {
    if (seconds <= 0) return;
    const auto same = std::find_if(parts.begin(), parts.end(),
                                   [&](const PathPart& part) { return part.stage == stage && part.limit == limit; });
    if (same != parts.end()) {
      same->seconds += seconds;
    } else {
      parts.push_back({stage, limit, seconds});
    }
  };
  for (WorkId id = work; id != kNobody; id = items_[id].released_by) {
    const Item& item = items_[id];
    for (auto limited = item.limited.rbegin(); limited != item.limited.rend(); ++limited) {
      add(item.work.stage, limited->first, limited->second);
    }
    add(item.work.stage, kNobody, item.work.delay_s);
  }
  return parts;
}

}  // namespace deltasync::capacity
