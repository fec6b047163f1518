// A target that writes versions where a running engine keeps its weights.
#pragma once

#include "deltasync/placement.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// Keeps one version in the placement's live memories, which must all be the host's (unsupported), and the rest of
/// tiles that its slices cut through in memory of its own (no_space). Bind it with placement->subscription().
///
/// Live memory is written by the first pull, by commits and by rollbacks, and never otherwise; while the engine
/// computes with it, it must not be. The first full update goes straight to its places. Over a live version a full one
/// is staged in host memory, as large as the subscribed tiles, until the commit exchanges the two.
Result<TargetPtr> make_placed_target(PlacementPtr placement);

}  // namespace deltasync
