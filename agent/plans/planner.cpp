#include "agent/plans/planner.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

namespace deltasync::agent {
namespace {

using Kind = Decision::Kind;
constexpr std::size_t kListedVersionsMax = 16;

/// A run of ring steps.
struct Chain {
  std::size_t first = 0;
  std::size_t steps = 0;
  std::uint64_t frame_bytes = 0;
};

/// A version that the agent knows, and how many ring steps end at or before it: steps [0, upto) lead to it.
struct Known {
  Version version;
  Digest128 root;
  std::size_t upto = 0;
  bool served = false;
  std::span<const Digest128> former_roots;  ///< of its further states
};

bool contains(std::span<const Digest128> roots, const Digest128& root) {
  return std::find(roots.begin(), roots.end(), root) != roots.end();
}

Decision fail(Errc code, std::string message) {
  Decision d;
  d.kind = Kind::error;
  d.code = code;
  d.message = std::move(message);
  return d;
}

Decision wait_for(std::string what) {
  Decision d;
  d.kind = Kind::wait;
  d.message = std::move(what);
  return d;
}

Decision answer(Kind kind, const Known& target, const Chain& chain = {}) {
  Decision d;
  d.kind = kind;
  d.target = target.version;
  d.target_root = target.root;
  d.first_step = chain.first;
  d.steps = chain.steps;
  return d;
}

/// The steps of a delta, which may be merged. Old elements, which exponent classes go by, are to be had of the served
/// version only.
Decision answer_delta(const wire::PlanRequest& plan, const Known& target, const Chain& chain) {
  Decision d = answer(Kind::delta, target, chain);
  d.compact = plan.compact != 0 && target.served;
  if (chain.steps >= 2 || d.compact) d.merge_steps = chain.steps;
  return d;
}

Known served_of(const Offer& offer) {
  return {offer.served, offer.served_root, offer.ring.size(), true, offer.served_former_roots};
}

/// The version that the ring's step i leads to, or, for i = 0 - 1, where the ring begins.
template <class Matches>
std::optional<Known> find_past(const Offer& offer, const Matches& matches) {
  for (std::size_t i = offer.ring.size(); i-- > 0;) {
    const RingStep& step = offer.ring[i];
    if (i + 1 < offer.ring.size() && matches(step.to) && !step.partial) {
      return Known{step.to, step.to_root, i + 1, false, offer.ring[i + 1].from_former_roots};
    }
  }
  if (!offer.ring.empty() && matches(offer.ring.front().from)) {
    const RingStep& first = offer.ring.front();
    return Known{first.from, first.from_root, 0, false, first.from_former_roots};
  }
  return std::nullopt;
}

/// The ring's steps from exactly the named base to `target`: same version and a root that it was published with, else
/// none.
std::optional<Chain> find_chain(const wire::PlanRequest& plan, const Offer& offer, const Known& target) {
  if (!plan.base.valid()) return std::nullopt;
  Chain chain;
  for (std::size_t i = target.upto; i-- > 0;) {
    chain.first = i;
    ++chain.steps;
    chain.frame_bytes += offer.ring[i].frame_bytes;
    if (offer.ring[i].from.id != plan.base) continue;
    const RingStep& step = offer.ring[i];
    const bool known = step.from_root == plan.base_root || contains(step.from_former_roots, plan.base_root);
    if (!known || chain.steps > wire::kDeltaStepsMax) return std::nullopt;
    return chain;
  }
  return std::nullopt;
}

bool holds_exactly(const wire::PlanRequest& plan, const Known& version) {
  if (plan.partial != 0 || plan.base != version.version.id) return false;
  return plan.base_root == version.root || contains(version.former_roots, plan.base_root);
}

/// Which version is meant; an error or a wait comes back as the Decision.
struct Wanted {
  std::optional<Known> target;
  Decision otherwise;
};

Wanted find_number(const wire::PlanRequest& plan, const Offer& offer) {
  const VersionId id = numbered(plan, offer);
  if (id == offer.served.id) return {served_of(offer), {}};
  auto past = find_past(offer, [&](const Version& v) { return v.id == id; });  // of whatever epoch
  if (past) return {past, {}};
  if (id > offer.served.id) {
    return {std::nullopt, wait_for("version " + to_string(id) + "; there is " + list_versions(offer))};
  }
  return {std::nullopt, fail(Errc::gone, "version " + to_string(id) + " is gone; there is " + list_versions(offer))};
}

Wanted find_label(const wire::PlanRequest& plan, const Offer& offer) {
  if (plan.label.empty()) return {std::nullopt, fail(Errc::invalid_argument, "a version was asked for by no label")};
  const auto matches = [&](const Version& v) { return v.label == plan.label; };
  if (matches(offer.served)) return {served_of(offer), {}};
  if (auto past = find_past(offer, matches)) return {past, {}};
  return {std::nullopt, wait_for("a version labelled \"" + plan.label + "\"; there is " + list_versions(offer))};
}

Wanted find_wanted(const wire::PlanRequest& plan, const Offer& offer) {
  switch (plan.want) {
    case wire::WantKind::newest: return {served_of(offer), {}};
    case wire::WantKind::newer: {
      const Known served = served_of(offer);
      // Only within an epoch it is known that what is held is still to come here. A version of another epoch, even of a
      // later one, is another trainer's: the receiver hears what there is.
      const bool same_epoch = plan.base.epoch == offer.served.id.epoch;
      const bool later = same_epoch && plan.base.number > offer.served.id.number;
      const bool ahead = plan.partial == 0 && plan.full_only == 0 && later;
      if (ahead || (plan.full_only == 0 && holds_exactly(plan, served))) {
        return {std::nullopt, wait_for("a version after " + to_string(plan.base))};
      }
      return {served, {}};
    }
    case wire::WantKind::number: return find_number(plan, offer);
    case wire::WantKind::label: return find_label(plan, offer);
  }
  return {std::nullopt, fail(Errc::protocol, "unknown kind of version request")};
}

}  // namespace

std::string list_versions(const Offer& offer) {
  if (!offer.has_version) return "no version";
  std::string text = "the newest, " + to_string(offer.served);
  std::size_t listed = 1;
  for (std::size_t i = offer.ring.size(); i-- > 1; ++listed) {
    if (listed == kListedVersionsMax) {
      text += " and " + std::to_string(i) + " more";
      break;
    }
    text += ", " + to_string(offer.ring[i].from);
  }
  if (!offer.ring.empty()) text += ", and the oldest, " + to_string(offer.ring.front().from);
  return text;
}

Decision decide(const wire::PlanRequest& plan, const Offer& offer) {
  if (!offer.has_layout) return wait_for("a trainer to bring a layout");
  if (plan.layout != offer.layout) {
    return fail(Errc::layout_mismatch, "the agent serves layout " + to_string(offer.layout) +
                                           ", the receiver is bound to " + to_string(plan.layout));
  }
  if (!offer.has_version) return wait_for("the first version");

  const Wanted wanted = find_wanted(plan, offer);
  if (!wanted.target) return wanted.otherwise;
  const Known& target = *wanted.target;
  if (plan.full_only == 0 && holds_exactly(plan, target)) {
    Decision there = answer(Kind::up_to_date, target);
    there.target_root = plan.base_root;  // what it holds is valid, be it of a former state
    return there;
  }

  const auto chain = find_chain(plan, offer, target);
  if (!target.served) {
    // Its half is another version's by now: only deltas lead there, whatever their size.
    if (chain && plan.full_only == 0 && plan.partial == 0) return answer_delta(plan, target, *chain);
    return fail(Errc::gone, "version " + to_string(target.version) +
                                " can be reached only by deltas from a version in the ring; there is " +
                                list_versions(offer));
  }
  const bool pays = chain && chain->frame_bytes < offer.full_bytes;
  if (offer.withdrawn && (!pays || plan.partial != 0 || plan.full_only != 0)) {
    return wait_for("the relay to bring a version after " + to_string(target.version) + ", which is damaged here");
  }
  if (plan.partial != 0) return answer(Kind::full, target, pays ? *chain : Chain{});
  if (pays && plan.full_only == 0) return answer_delta(plan, target, *chain);
  Decision full = answer(Kind::full, target);
  if (chain && chain->steps >= 2 && plan.full_only == 0) {
    full.first_step = chain->first;
    full.merge_steps = chain->steps;
    full.compact = plan.compact != 0;
  }
  return full;
}

}  // namespace deltasync::agent
