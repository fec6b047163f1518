// Decides how a plan request is answered: a pure function of the request and of what the agent has. No clock, no lock,
// no socket.
#pragma once

#include <cstdint>
#include <string>

#include "agent/versions/offer.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"
#include "format/wire.hpp"

namespace deltasync::agent {

struct Decision {
  enum class Kind : std::uint8_t {
    up_to_date,
    delta,  ///< steps [first_step, first_step + steps) of the ring
    full,   ///< the served half; with steps for PlanRequest::partial
    wait,   ///< not yet: ask again when the offer changes, until the caller's deadline
    error,  ///< `code` and `message`
  };
  Kind kind = Kind::wait;
  Version target;
  Digest128 target_root;
  std::size_t first_step = 0;
  std::size_t steps = 0;
  /// How many steps from first_step on could be answered by one derived delta. It takes the place of a delta's steps if
  /// it is smaller than they are, and of a full update if it is smaller than a half. 0: nothing to derive.
  std::size_t merge_steps = 0;
  /// The derived delta may be compact, even that of a single step: the request allows it, and the target is served.
  bool compact = false;
  Errc code = Errc::internal;
  std::string message;  ///< of an error; for wait: what is waited for
};

/// What WantKind::number means: of the epoch that the plan names, or of the newest.
inline VersionId numbered(const wire::PlanRequest& plan, const Offer& offer) {
  return {plan.epoch != 0 ? plan.epoch : offer.served.id.epoch, plan.number};
}

/// The rules, in order (wire_protocol.md "Planning"): another layout is layout_mismatch; then the wanted version
/// is found (served, in the ring, still to come, gone); then the way to it: up to date, or the ring's chain from
/// exactly the named base if that is smaller than a half, or full. A past version can be reached by a chain only.
Decision decide(const wire::PlanRequest& plan, const Offer& offer);

/// "the newest, e…:9, label (e…:8), and the oldest, e…:7": for errors and logs; long lists are shortened.
std::string list_versions(const Offer& offer);

}  // namespace deltasync::agent
