#include "agent/plans/subset.hpp"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "base/hash.hpp"

namespace deltasync::agent {
namespace {

/// The ring's oldest step that an answer to `plan` can begin with: from its base, or from a past version that it wants.
std::size_t first_needed(const wire::PlanRequest& plan, const Offer& offer) {
  for (std::size_t i = 0; i < offer.ring.size(); ++i) {
    const Version& from = offer.ring[i].from;
    if (plan.base.valid() && from.id == plan.base) return i;
    if (plan.want == wire::WantKind::number && from.id == numbered(plan, offer)) return i;
    if (plan.want == wire::WantKind::label && from.label == plan.label) return i;
  }
  return offer.ring.size();
}

}  // namespace

Offer Subset::offer(const Offer& whole, std::span<const RingEntryPtr> ring, std::span<const std::uint64_t> served,
                    std::span<const FormerState> served_former, const wire::PlanRequest& plan) {
  Offer offer = whole;
  offer.full_bytes = tiles_.bytes();
  if (!whole.has_version) return offer;
  const std::size_t first = first_needed(plan, whole);
  for (std::size_t i = 0; i < ring.size(); ++i) {
    RingStep& step = offer.ring[i];
    step.from_root = step.to_root = {};
    step.from_former_roots.clear();
    const Part part = i >= first ? part_of(ring[i]) : Part();
    step.frames = part.frames;
    step.frame_bytes = part.frame_bytes;
    step.changed = part.changed;
  }
  const std::lock_guard lock(roots_mutex_);
  find_roots_locked(offer, whole, ring, served, served_former, first);
  forget_roots_locked(whole);
  return offer;
}

/// From the served version back to the one that step `first` begins with: each step's changes of digests are taken
/// back. Where all roots are known already, as for a receiver that keeps up, nothing is done.
void Subset::find_roots_locked(Offer& offer, const Offer& whole, std::span<const RingEntryPtr> ring,
                               std::span<const std::uint64_t> served, std::span<const FormerState> served_former,
                               std::size_t first) {
  std::vector<std::uint64_t> digests;  // of the tiles, of the version that `at` steps lead to
  std::size_t at = ring.size();
  const auto rewind_to = [&](std::size_t step) {
    if (digests.empty()) digests = tiles_.gather(served);
    for (; at > step; --at) {
      std::size_t hint = 0;
      for (const DigestBefore& before : ring[at - 1]->before) {
        if (const auto rank = tiles_.rank(before.tile, hint)) digests[static_cast<std::size_t>(*rank)] = before.digest;
      }
    }
  };
  const auto root_of = [&](const Version& version, const Digest128& whole_root, std::size_t step) {
    const RootKey key{version.id, whole_root};
    if (const auto known = roots_.find(key); known != roots_.end()) return known->second;
    rewind_to(step);
    return roots_.emplace(key, xxh3_128(std::as_bytes(std::span(digests)))).first->second;
  };
  offer.served_root = root_of(whole.served, whole.served_root, ring.size());
  if (!served_former.empty()) {  // seldom
    rewind_to(ring.size());
    offer.served_former_roots = former_roots(served_former, digests);
  }
  Digest128 after = offer.served_root;
  for (std::size_t i = ring.size(); i-- > first;) {
    offer.ring[i].to_root = after;
    after = root_of(whole.ring[i].from, whole.ring[i].from_root, i);
    offer.ring[i].from_root = after;
    if (!ring[i]->from_former.empty()) {
      rewind_to(i);
      offer.ring[i].from_former_roots = former_roots(ring[i]->from_former, digests);
    }
  }
  if (first > 0) offer.ring[first - 1].to_root = after;  // which may be what is wanted
}

/// From `digests`, of the state after all of them.
std::vector<Digest128> Subset::former_roots(std::span<const FormerState> former,
                                            std::vector<std::uint64_t> digests) const {
  std::vector<Digest128> roots(former.size());
  for (std::size_t i = former.size(); i-- > 0;) {
    std::size_t hint = 0;
    for (const DigestBefore& before : former[i].before) {
      if (const auto rank = tiles_.rank(before.tile, hint)) digests[static_cast<std::size_t>(*rank)] = before.digest;
    }
    roots[i] = xxh3_128(std::as_bytes(std::span(digests)));
  }
  return roots;
}

void Subset::forget_roots_locked(const Offer& whole) {
  if (roots_.size() <= whole.ring.size() + 1) return;
  std::set<RootKey> there{{whole.served.id, whole.served_root}};
  for (const RingStep& step : whole.ring) there.insert({step.from.id, step.from_root});
  std::erase_if(roots_, [&](const auto& known) { return there.count(known.first) == 0; });
}

Subset::Part Subset::part_of(const RingEntryPtr& entry) {
  if (const auto known = known_part(entry)) return *known;
  const Part part = count(*entry);
  const std::lock_guard lock(parts_mutex_);
  std::erase_if(parts_, [](const auto& known) { return known.first.expired(); });
  parts_.emplace(entry, part);
  return part;
}

std::optional<Subset::Part> Subset::known_part(const RingEntryPtr& entry) const {
  const std::lock_guard lock(parts_mutex_);
  const auto known = parts_.find(entry);
  if (known == parts_.end()) return std::nullopt;
  return known->second;
}

/// Of frames that are cut, the tables are read; whole ones say themselves what they have. Joined as they are sent.
Subset::Part Subset::count(const RingEntry& entry) const {
  Part part;
  const std::vector<delta::Frame>& frames = entry.delta->frames;
  const auto end_frame = [&part](const delta::CutSize& size) {
    part.frames += size.tiles != 0 ? 1 : 0;
    part.frame_bytes += size.bytes;
    part.changed += size.changed;
  };
  delta::CutSize joined;
  const auto end_joined = [&] { end_frame(std::exchange(joined, {})); };
  std::vector<delta::Batch> inside;
  auto range = tiles_.ranges().begin();
  const auto end = tiles_.ranges().end();
  for (auto frame = frames.begin(); frame != frames.end();) {
    range = std::upper_bound(range, end, frame->first_tile,
                             [](std::uint64_t tile, const wire::TileRange& r) { return tile < r.end; });
    if (range == end) break;
    if (range->first > frame->last_tile) {
      frame = std::lower_bound(frame, frames.end(), range->first,
                               [](const delta::Frame& f, std::uint64_t tile) { return f.last_tile < tile; });
      continue;
    }
    inside.clear();
    for (auto r = range; r != end && r->first <= frame->last_tile; ++r) inside.push_back({r->first, r->end});
    const bool covered = inside[0].first <= frame->first_tile && inside[0].end > frame->last_tile;
    if (covered) {
      end_joined();
      end_frame({frame->tiles, frame->changed, frame->bytes.size()});
    } else {
      joined = delta::cut_size(*frame, inside, joined);
      if (joined.bytes >= delta::kJoinedBytes) end_joined();
    }
    ++frame;
  }
  end_joined();
  return part;
}

}  // namespace deltasync::agent
