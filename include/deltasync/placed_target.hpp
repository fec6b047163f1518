// A target that writes versions where a running engine keeps its weights.
#pragma once

#include "deltasync/placement.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

struct PlacedTargetOptions {
  /// The engine computes with what is in live memory already (weights that it loaded itself, or that an earlier
  /// receiver left there): the first full update goes by FullOverLive too, as any later one does. Staged, its rollback
  /// brings back what was there.
  bool live = false;
};

/// Keeps one version in the placement's live memories, which must all be the host's (unsupported), and the rest of
/// tiles that its slices cut through in memory of its own, which binding takes (no_space). Bind it with
/// placement->subscription().
///
/// Live memory is written by these and by nothing else, and the engine may not compute with it meanwhile:
///   - pulls while Receiver::current() is empty, unless the target was made with `live`, and pulls of a full update
///   that
///     is in_place (FullOverLive), which empties it: tiles go straight to their places. From the beginning of the first
///     such pull to the commit the memory has no version, failed pulls included, and nobody else may write it; what was
///     overwritten between two pulls comes again, what is during one may be published.
///   - commits.
///   - rollbacks.
/// Other full updates are staged in host memory, as large as the subscribed tiles, until the commit exchanges the two.
Result<TargetPtr> make_placed_target(PlacementPtr placement, const PlacedTargetOptions& options = {});

}  // namespace deltasync
