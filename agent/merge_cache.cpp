#include "agent/merge_cache.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::agent {

std::list<MergeCache::Slot>::const_iterator MergeCache::slot(const MergeKey& key) const {
  return std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.key == key; });
}

std::list<MergeCache::Slot>::iterator MergeCache::slot(const MergeKey& key) {
  return std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.key == key; });
}

MergeCache::State MergeCache::state(const MergeKey& key) const {
  const auto found = slot(key);
  return found == slots_.end() ? State::none : found->state;
}

RingEntryPtr MergeCache::find(const MergeKey& key) const {
  const auto found = slot(key);
  return found == slots_.end() ? nullptr : found->entry;
}

std::size_t MergeCache::wanted() const noexcept {
  return static_cast<std::size_t>(
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.state == State::wanted; }));
}

bool MergeCache::want(const MergeKey& key) {
  if (wanted() >= wanted_max_ || slots_.size() >= kSlotsMax || slot(key) != slots_.end()) return false;
  slots_.push_back({key, State::wanted, nullptr});
  return true;
}

std::optional<MergeKey> MergeCache::next() const {
  for (const Slot& s : slots_) {
    if (s.state == State::wanted) return s.key;
  }
  return std::nullopt;
}

std::vector<RingEntryPtr> MergeCache::put(const MergeKey& key, RingEntryPtr entry) {
  std::vector<RingEntryPtr> out;
  const auto found = slot(key);
  if (found == slots_.end() || found->state != State::wanted || entry->delta->frame_bytes > bytes_max_) {
    if (found != slots_.end() && found->state == State::wanted) found->state = State::impossible;
    out.push_back(std::move(entry));
    return out;
  }
  bytes_ += entry->delta->frame_bytes;
  for (auto s = slots_.begin(); bytes_ > bytes_max_;) {
    if (s->state != State::made) {
      ++s;
      continue;
    }
    bytes_ -= s->entry->delta->frame_bytes;
    out.push_back(std::move(s->entry));
    s = slots_.erase(s);
  }
  found->state = State::made;
  found->entry = std::move(entry);
  slots_.splice(slots_.end(), slots_, found);
  return out;
}

void MergeCache::fail(const MergeKey& key) {
  const auto found = slot(key);
  if (found != slots_.end() && found->state == State::wanted) found->state = State::impossible;
}

void MergeCache::forget(const MergeKey& key) {
  const auto found = slot(key);
  if (found != slots_.end() && found->state == State::wanted) slots_.erase(found);
}

std::vector<RingEntryPtr> MergeCache::retain(const std::deque<RingEntryPtr>& ring) {
  std::vector<RingEntryPtr> out;
  const auto begins = [&](const MergeKey& key) {
    return std::any_of(ring.begin(), ring.end(), [&](const RingEntryPtr& e) {
      return e->delta->from == key.from && e->delta->from_root == key.from_root;
    });
  };
  const auto ends = [&](const MergeKey& key) {
    return std::any_of(ring.begin(), ring.end(), [&](const RingEntryPtr& e) { return e->delta->to == key.to; });
  };
  for (auto s = slots_.begin(); s != slots_.end();) {
    if (begins(s->key) && ends(s->key)) {
      ++s;
      continue;
    }
    if (s->entry) {
      bytes_ -= s->entry->delta->frame_bytes;
      out.push_back(std::move(s->entry));
    }
    s = slots_.erase(s);
  }
  return out;
}

std::vector<RingEntryPtr> MergeCache::entries() const {
  std::vector<RingEntryPtr> out;
  for (const Slot& s : slots_) {
    if (s.entry) out.push_back(s.entry);
  }
  return out;
}

}  // namespace deltasync::agent
