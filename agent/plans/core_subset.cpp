// Plans for receivers that subscribed to some of the tiles.
#include <utility>

#include "agent/core.hpp"

namespace deltasync::agent {

Result<SubsetPtr> AgentCore::share_subset(TileSet tiles) {
  const std::lock_guard lock(mutex_);
  for (auto known = subsets_.begin(); known != subsets_.end();) {
    const SubsetPtr subset = known->second.lock();
    if (subset && known->first == tiles.digest()) return subset;
    known = subset ? std::next(known) : subsets_.erase(known);
  }
  const std::uint64_t bytes = Subset::range_bytes(tiles);
  auto share = peer_room_.take_first(bytes);  // its holder will wait for answers
  if (!share) {
    return Error(Errc::no_space, "this subscription takes " + std::to_string(bytes) + " bytes, and of the " +
                                     std::to_string(peer_room_.bytes_max()) +
                                     " that the agent holds for its peers (--peer-memory-mib) " +
                                     std::to_string(peer_room_.bytes_taken()) + " are taken");
  }
  const Digest128 digest = tiles.digest();
  auto made = std::make_shared<Subset>(std::move(tiles), *std::move(share));
  subsets_[digest] = made;
  return made;
}

/// Roots and sizes are computed outside of the mutex, for a moment that must still be the present one when the plan is
/// opened: else once more.
Result<std::optional<wire::PlanReply>> AgentCore::plan_subset(const wire::PlanRequest& plan, const Asker& asker,
                                                              std::string* waiting_for, PendingPlan& pending,
                                                              const SubsetPtr& subset) {
  for (;;) {
    SnapshotPtr now = snapshot();
    std::vector<RingEntryPtr> unknown;
    std::optional<Result<std::optional<wire::PlanReply>>> reply;
    if (now->offer.has_layout && now->offer.layout == plan.layout && plan.layout != subset->tiles().layout()) {
      reclaimer_->retire(std::move(now));
      return Error(Errc::layout_mismatch, "the subscription is of layout " + to_string(subset->tiles().layout()) +
                                              ", the plan of " + to_string(plan.layout) + "; subscribe again");
    }
    {
      // Of another layout: the plan will be told so.
      const bool same = now->served && now->offer.layout == subset->tiles().layout();
      const Offer offer =
          same ? subset->offer(now->offer, now->ring, *now->served->digests, now->served->former, plan) : now->offer;
      const std::lock_guard lock(mutex_);
      if (snapshot_ == now) reply = plan_locked(plan, asker, waiting_for, pending, {subset, offer, unknown});
    }
    reclaimer_->retire(std::move(now));  // it may be the last to hold deltas
    const bool again = !reply || !unknown.empty();
    for (RingEntryPtr& entry : unknown) {
      subset->part_of(entry);
      reclaimer_->retire(std::move(entry));
    }
    if (!again) return *std::move(reply);
  }
}

/// False if some have to be computed first: merged deltas, which the offer does not list.
bool AgentCore::compute_subset_roots(const Share& share, const std::vector<RingEntryPtr>& steps) {
  if (!share.subset) return true;
  for (const RingEntryPtr& entry : steps) {
    if (!share.subset->known_part(entry)) share.unknown.push_back(entry);
  }
  return share.unknown.empty();
}

Subset::Part AgentCore::part_of(const Share& share, const RingEntryPtr& entry) {
  const delta::Delta& d = *entry->delta;
  if (!share.subset) return {d.frames.size(), d.frame_bytes, d.changed};
  return share.subset->part_of(entry);
}

}  // namespace deltasync::agent
