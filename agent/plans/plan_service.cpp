#include "agent/plans/plan_service.hpp"

#include <algorithm>
#include <utility>

#include "agent/versions/arriving_delta.hpp"

namespace deltasync::agent {
namespace {

/// Those of a delta, or those that may become one by merging.
std::vector<RingEntryPtr> ring_steps(const Snapshot& now, const Decision& decision) {
  const auto first = now.ring.begin() + static_cast<std::ptrdiff_t>(decision.first_step);
  const std::size_t steps = std::max(decision.steps, decision.merge_steps);
  return {first, first + static_cast<std::ptrdiff_t>(steps)};
}

/// What of a delta a plan is about.
Subset::Part part_of(const SubsetPtr& subset, const RingEntryPtr& entry) {
  const delta::Delta& d = *entry->delta;
  if (entry->arriving) return {entry->arriving->frames(), d.frame_bytes, d.changed};
  if (!subset) return {d.frames.size(), d.frame_bytes, d.changed};
  return subset->part_of(entry);
}

std::uint64_t bytes_of_steps(const SubsetPtr& subset, const std::vector<RingEntryPtr>& steps) {
  std::uint64_t bytes = 0;
  for (const RingEntryPtr& entry : steps) bytes += part_of(subset, entry).frame_bytes;
  return bytes;
}

std::optional<wire::PlanReply> answer_up_to_date(const Decision& decision) {
  wire::PlanReply reply;
  reply.mode = wire::PlanMode::up_to_date;
  reply.target = decision.target;
  reply.target_root = decision.target_root;
  return reply;
}

}  // namespace

Result<std::optional<wire::PlanReply>> PlanService::plan(const wire::PlanRequest& request, const Asker& asker,
                                                         std::string* waiting_for, PendingPlan& pending,
                                                         const SubsetPtr& subset) {
  if (request.base.valid()) parts_.versions.hear_of_epoch(request.base.epoch);
  for (;;) {
    const RetiredAtEnd<const Snapshot> now(*parts_.reclaimer, parts_.versions.snapshot());
    const bool arrives = now->arriving && request.arriving != 0;
    const ServedPtr& there = arrives ? now->arriving : now->served;
    const Offer& offer = arrives ? now->offer_arriving : now->offer;
    std::optional<Offer> cut;
    if (subset && now->offer.has_layout && now->offer.layout == request.layout) {
      const Digest128& layout = subset->tiles().layout();
      if (layout != request.layout) {
        return Error(Errc::layout_mismatch, "the subscription is of layout " + to_string(layout) + ", the plan of " +
                                                to_string(request.layout) + "; subscribe again");
      }
      if (there) cut = subset->offer(offer, now->ring, *there->digests, there->former, request);
    }
    Attempt a{request, asker, subset, now.share(), there, cut ? *cut : offer, waiting_for, pending};
    std::optional<Answer> ahead = attempt_ahead(a);
    Answer answer = ahead ? *std::move(ahead) : attempt(a);
    if (a.moved_on) continue;
    if (!answer || !*answer) return answer;
    Metrics& metrics = parts_.metrics;
    switch ((*answer)->mode) {
      case wire::PlanMode::up_to_date: Metrics::add(metrics.pulls_up_to_date, 1); break;
      case wire::PlanMode::full: Metrics::add(metrics.pulls_full, 1); break;
      default: Metrics::add(metrics.pulls_delta, 1); break;
    }
    if (pending.derived.hit) Metrics::add(metrics.merge_hits, 1);
    return answer;
  }
}

PlanService::Answer PlanService::attempt(Attempt& a) {
  if (plans_.closed()) return Error(Errc::connection, "the agent is shutting down");
  a.pending.derived.hit = false;
  Decision decision = decide(a.request, a.offer);
  std::optional<wire::PlanReply> chain = chain_of(a.pending);
  // What it could have had before it waited for a merge may have left the ring meanwhile.
  if (decision.kind != Decision::Kind::delta && chain) {
    a.pending.chain.reset();
    return chain;
  }
  switch (decision.kind) {
    case Decision::Kind::error: return Error(decision.code, decision.message);
    case Decision::Kind::wait: *a.waiting_for = decision.message; return std::optional<wire::PlanReply>();
    case Decision::Kind::up_to_date: return answer_up_to_date(decision);
    default: break;
  }
  auto steps = parts_.deltas.steps(
      {ring_steps(*a.now, decision), a.now->ring_revision, decision.merge_steps != 0, decision.compact},
      a.pending.derived);
  if (!steps) return wait_for_delta(a, decision);
  prefer_smaller(a, decision, *steps);
  Answer answer = open(a, decision, std::move(*steps), chain ? chain->plan : 0);
  if (!answer && chain) plans_.end(chain->plan);
  if (!a.moved_on) a.pending.chain.reset();
  return answer;
}

/// What a few tiles take of it is known once all of it is there, and so is its compact form.
std::optional<PlanService::Answer> PlanService::attempt_ahead(Attempt& a) {
  if (!a.now->ahead || a.subset || a.request.compact != 0 || plans_.closed()) return std::nullopt;
  const Offer& offer = a.now->offer_ahead;
  const Decision decision = decide(a.request, offer);
  // Who has it already hears so, and not of what is served.
  const bool has_it = decision.kind == Decision::Kind::up_to_date && decision.target.id == a.now->ahead->to.id;
  if (has_it) return answer_up_to_date(decision);
  const bool just_this =
      decision.kind == Decision::Kind::delta && decision.steps == 1 && decision.first_step + 1 == offer.ring.size();
  if (!just_this) return std::nullopt;
  Attempt ahead{a.request, a.asker, a.subset, a.now, a.served, offer, a.waiting_for, a.pending};
  const std::optional<wire::PlanReply> chain = chain_of(a.pending);
  Answer answer = open(ahead, decision, {a.now->ahead}, chain ? chain->plan : 0);
  a.moved_on = ahead.moved_on;
  if (!answer && chain) plans_.end(chain->plan);
  if (answer && !a.moved_on) a.pending.chain.reset();
  return answer;
}

PlanService::Answer PlanService::wait_for_delta(Attempt& a, const Decision& decision) {
  if (decision.kind == Decision::Kind::delta && !a.pending.chain) {
    DS_ASSIGN(a.pending.chain, open(a, decision, ring_steps(*a.now, decision), 0));
  }
  *a.waiting_for = (a.pending.derived.key->form == DeltaForm::compact ? "a compact delta of " : "the merge of ") +
                   std::to_string(decision.merge_steps) + " steps to " + to_string(decision.target);
  return std::optional<wire::PlanReply>();
}

/// The planner does not know what a derived delta takes, nor what it takes for some tiles.
void PlanService::prefer_smaller(const Attempt& a, Decision& decision, std::vector<RingEntryPtr>& steps) {
  if (a.subset && decision.kind == Decision::Kind::delta) {
    // A merged delta is smaller than its chain for the whole model, which says little of a few tiles.
    if (bytes_of_steps(a.subset, steps) >= a.offer.full_bytes) steps = ring_steps(*a.now, decision);
  }
  if (decision.kind == Decision::Kind::full && decision.merge_steps != 0) {
    // The chain itself is larger than a full transfer.
    if (bytes_of_steps(a.subset, steps) < a.offer.full_bytes) {
      decision.kind = Decision::Kind::delta;
    } else {
      steps.clear();
    }
  }
}

/// The plan that was opened when the waiting began; nothing if there is none, or none any more.
std::optional<wire::PlanReply> PlanService::chain_of(const PendingPlan& pending) const {
  return pending.chain && plans_.find(pending.chain->plan) ? pending.chain : std::nullopt;
}

PlanService::Answer PlanService::open(Attempt& a, const Decision& decision, std::vector<RingEntryPtr> steps,
                                      std::uint64_t replaced) {
  const bool full = decision.kind == Decision::Kind::full;
  OpenPlan plan;
  plan.mode = full ? wire::PlanMode::full : wire::PlanMode::delta;
  plan.layout = a.now->generation->layout;
  plan.steps = std::move(steps);
  plan.subset = a.subset;

  wire::PlanReply reply;
  reply.mode = plan.mode;
  reply.target = decision.target;
  reply.target_root = decision.target_root;
  reply.full_bytes = a.offer.full_bytes;
  if (full && a.served->arriving) {
    reply.arriving = 1;
  } else if (full) {
    reply.pack_threads = parts_.pack_threads;
  }
  std::size_t at = decision.first_step;
  for (const RingEntryPtr& entry : plan.steps) {
    // A merged delta ends where one of the ring's does, whose root it is.
    while (a.offer.ring[at].to.id != entry->delta->to) ++at;
    const Subset::Part part = part_of(a.subset, entry);
    reply.steps.push_back(
        {entry->delta->from, entry->delta->to, a.offer.ring[at].to_root, part.frames, part.frame_bytes, part.changed});
  }
  DS_ASSIGN(reply.plan, plans_.open(std::move(plan), a.asker, full ? a.served : nullptr, replaced));
  // SYNC POINT plan: the lease has begun. If its half is still what is served, the publisher will see it.
  if (parts_.options.before_plan_counts) parts_.options.before_plan_counts();
  if (!parts_.versions.is_current(*a.now)) {
    plans_.end(reply.plan);
    a.moved_on = true;
    return std::optional<wire::PlanReply>();
  }
  if (full) Metrics::add(parts_.metrics.leases, 1);
  if (replaced != 0) plans_.end(replaced);
  return std::optional<wire::PlanReply>(std::move(reply));
}

}  // namespace deltasync::agent
