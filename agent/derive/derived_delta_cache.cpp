#include "agent/derive/derived_delta_cache.hpp"

#include <algorithm>
#include <utility>

namespace deltasync::agent {

std::list<DerivedDeltaCache::Slot>::const_iterator DerivedDeltaCache::slot(const DeltaKey& key) const {
  return std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.key == key; });
}

std::list<DerivedDeltaCache::Slot>::iterator DerivedDeltaCache::slot(const DeltaKey& key) {
  return std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.key == key; });
}

DerivedDeltaCache::State DerivedDeltaCache::state(const DeltaKey& key) const {
  const auto found = slot(key);
  return found == slots_.end() || found->is_abandoned() ? State::none : found->state;
}

RingEntryPtr DerivedDeltaCache::find(const DeltaKey& key) const {
  const auto found = slot(key);
  return found == slots_.end() ? nullptr : found->entry;
}

std::size_t DerivedDeltaCache::wanted() const noexcept {
  return static_cast<std::size_t>(
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.is_wanted(); }));
}

bool DerivedDeltaCache::has_room_for(DeltaForm form) const noexcept {
  if (slots_.size() >= kSlotsMax || wanted() >= wanted_max_) return false;
  if (form == DeltaForm::plain) return true;
  const auto compact = std::count_if(slots_.begin(), slots_.end(),
                                     [](const Slot& s) { return s.is_wanted() && s.key.form == DeltaForm::compact; });
  return static_cast<std::size_t>(compact) < wanted_max_ / 2;
}

DerivedDeltaCache::Request DerivedDeltaCache::request(const DeltaKey& key) {
  std::erase_if(slots_, [](const Slot& s) { return s.is_abandoned(); });
  auto found = slot(key);
  if (found == slots_.end()) {
    if (key.revision != revision_ || !has_room_for(key.form)) return nullptr;
    found = slots_.insert(slots_.end(), Slot{key, State::wanted, false, {}, nullptr});
  }
  if (found->state != State::wanted) return nullptr;
  Request request = found->requests.lock();
  if (!request) {  // new, or begun for those who have left
    request = std::make_shared<const char>();
    found->requests = request;
  }
  return request;
}

std::optional<DeltaKey> DerivedDeltaCache::begin(DeltaForm form) {
  std::erase_if(slots_, [](const Slot& s) { return s.is_abandoned(); });
  const auto found = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) {
    return s.key.form == form && s.state == State::wanted && !s.begun;
  });
  if (found == slots_.end()) return std::nullopt;
  found->begun = true;
  return found->key;
}

std::vector<RingEntryPtr> DerivedDeltaCache::put(const DeltaKey& key, RingEntryPtr entry) {
  std::vector<RingEntryPtr> out;
  const auto found = slot(key);
  if (found == slots_.end() || found->state != State::wanted || entry->delta->frame_bytes > bytes_max_) {
    if (found != slots_.end() && found->state == State::wanted) found->state = State::impossible;
    out.push_back(std::move(entry));
    return out;
  }
  out.reserve(slots_.size());  // where memory is short, nothing changes
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

void DerivedDeltaCache::fail(const DeltaKey& key) {
  const auto found = slot(key);
  if (found != slots_.end() && found->state == State::wanted) found->state = State::impossible;
}

void DerivedDeltaCache::forget(const DeltaKey& key) {
  const auto found = slot(key);
  if (found != slots_.end() && found->state == State::wanted) slots_.erase(found);
}

std::vector<RingEntryPtr> DerivedDeltaCache::retain(const std::vector<RingEntryPtr>& ring, std::uint64_t revision) {
  std::vector<RingEntryPtr> out;
  out.reserve(slots_.size());  // where memory is short, nothing changes
  revision_ = revision;
  const auto begins = [&](const DeltaKey& key) {
    return std::any_of(ring.begin(), ring.end(), [&](const RingEntryPtr& e) {
      return e->delta->from == key.from && e->delta->from_root == key.from_root;
    });
  };
  const auto ends = [&](const DeltaKey& key) {
    return std::any_of(ring.begin(), ring.end(), [&](const RingEntryPtr& e) { return e->delta->to == key.to; });
  };
  for (auto s = slots_.begin(); s != slots_.end();) {
    if (s->key.revision == revision && begins(s->key) && ends(s->key)) {
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

std::vector<RingEntryPtr> DerivedDeltaCache::entries() const {
  std::vector<RingEntryPtr> out;
  for (const Slot& s : slots_) {
    if (s.entry) out.push_back(s.entry);
  }
  return out;
}

}  // namespace deltasync::agent
