// Whether what is live is what was committed; the public calls are in deltasync/receiver.hpp.
#pragma once

#include <span>
#include <vector>

#include "deltasync/receiver.hpp"
#include "receiver/targets/target.hpp"

namespace deltasync {

/// The tiles of the committed version that are not in live memory as they were committed, ascending; empty: all are.
/// All of these tiles are read, on the devices that they are on. not_found if nothing is committed; timed_out,
/// cancelled, or what kept a tile from being read.
Result<std::vector<TileMismatch>> attest(Target& target, const TileSet& tiles, const CallContext& until);
/// The same of some tiles, ascending, all of which the target keeps. If copies cannot be read (there is no memory for
/// it), `where_they_can` looks at the places that tiles are read from, and the log says so.
enum class Copies : std::uint8_t { all, where_they_can };
Result<std::vector<TileMismatch>> attest(Target& target, std::span<const std::uint64_t> tiles, const CallContext& until,
                                         Copies copies = Copies::all);

/// The same of all tiles that the target keeps.
Result<std::vector<TileMismatch>> attest(Target& target, const CallContext& until);

/// The tiles that the scrub of this number reads, ascending: `count` of them, in rounds through all. A round takes an
/// odd number of scrubs: where updates take turns between two memories, all tiles of both are read.
std::vector<std::uint64_t> scrub_list(const TileSet& tiles, std::uint64_t count, std::uint64_t scrub);

/// "tile 88 (model.layers.3.mlp.up_proj.weight) and 12 more differ from what was committed". Not of an empty list.
std::string describe(std::span<const TileMismatch> wrong);

/// What an attestation right after a commit says.
struct CommitVerdict {
  Status status;           ///< not ok: the commit is rolled back, or the version is lost
  bool was_wrong = false;  ///< the version before, which the target has again, is wrong too, or nobody knows
};
CommitVerdict attest_commit(Target& target, const TileSet& tiles, const CallContext& until);

}  // namespace deltasync
