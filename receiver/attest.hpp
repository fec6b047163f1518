// Whether what is live is what was committed; the public call is in deltasync/attest.hpp.
#pragma once

#include <vector>

#include "receiver/target.hpp"

namespace deltasync {

/// The subscribed tiles of the committed version whose digests differ from those of live memory; empty: all are as they
/// were committed. All of live memory is read, on the devices that it is on. not_found if nothing is committed;
/// timed_out, cancelled, or what kept a tile from being read.
Result<std::vector<std::uint64_t>> attest(Target& target, const TileSet& tiles, const Until& until);

}  // namespace deltasync
