// The delta that a relay hands over with the version that it fills (shm_protocol.md "Kept deltas"): a file beside the
// segment, so that the agent need not find out what it has been told.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "agent/versions/snapshot.hpp"
#include "delta/delta.hpp"
#include "shm/roles.hpp"

namespace deltasync::agent {

/// Takes the file away, whatever it has. Its delta, if it leads from exactly the state that is served to the sealed
/// version, and `digests` are those of the latter then. Nothing if there is no such file, or, with a warning, if it has
/// something else: the halves are diffed then. That the sealed half has these bytes is the writer's word.
std::optional<delta::Delta> take_handed_delta(const ServedVersion& before, const shm::HalfView& sealed,
                                              std::vector<std::uint64_t>& digests);

}  // namespace deltasync::agent
