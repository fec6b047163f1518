// A relay tells the agent that it writes for what the delta to the next version is, so that this one need not compare
// the halves: the frames that the relay has verified, in a file beside the segment.
#pragma once

#include <vector>

#include "deltasync/writer.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync::relay {

/// Before the version is sealed. Where it cannot (the delta has several steps or a form that the agent's own do not
/// have, or there is no room), nothing is handed over, and the agent compares the halves: false. `before` is what
/// is committed.
bool hand_over(const Layout& layout, const Writer& writer, const TargetState& before, const TargetState& after,
               const std::vector<StagedStep>& steps) noexcept;

}  // namespace deltasync::relay
