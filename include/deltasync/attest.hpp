// Whether live memory is what was committed, and what to do where it is not.
#pragma once

#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "deltasync/deadline.hpp"
#include "deltasync/placement.hpp"
#include "deltasync/receiver.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

/// A tile of live memory that is not the committed version's.
struct WrongTile {
  std::uint64_t tile = 0;  ///< its number in the layout, for repair()
  std::string tensor;
  /// Empty: it is wrong where it is read. Else that is right, and this live memory has a copy (a tied weight, a
  /// replica) with something else in it: the first of them.
  std::string copy_in;

  bool operator==(const WrongTile&) const = default;
};
/// "tile 88 (model.layers.3.mlp.up_proj.weight)", or "tile 7 (lm_head.weight), the copy in embed_tokens".
std::string to_string(const WrongTile& wrong);

/// The target's tiles whose elements in live memory are not those of its committed version, in order; empty: all are
/// as they were committed. All of live memory is read, on a device by the device; first the places that elements are
/// read from, then their copies where those are right. No call of a receiver that has the target may be under way.
/// ReceiverOptions::attest_commits does the same after each commit.
///
/// What differs was written by somebody else, or the memory is broken. repair() brings these tiles anew; a pull brings
/// all of them (with FullOverLive::in_place or a staged full update), once the receiver has found it too
/// (ReceiverOptions::scrub_tiles) or is bound anew.
/// Errors: not_found if nothing is committed; timed_out, cancelled; io, a device's; no_space: to look at copies on
/// devices takes some staging memory, once.
Result<std::vector<WrongTile>> attest(Target& target, Deadline deadline, std::stop_token stop = {});
/// Of the tiles of a placement, which must be the target's. layout_mismatch, invalid_argument.
Result<std::vector<WrongTile>> attest(Target& target, const Placement& placement, Deadline deadline,
                                      std::stop_token stop = {});

/// What a repair did.
struct RepairReport {
  Version version;                   ///< of the tiles: the committed one
  std::uint64_t tiles = 0;           ///< written anew
  std::uint64_t fetched = 0;         ///< of these, from the agent; the others came from the target's shadow
  std::uint64_t wire_bytes = 0;      ///< received, headers and handshakes counted
  std::uint64_t metadata_bytes = 0;  ///< of wire_bytes: everything that is not tile data
  double repair_s = 0;               ///< all of it, looking at the tiles again included
};

/// Writes these tiles of the committed version anew into all of their places, verified: those that the target has a
/// sound copy of (a shadow) from there, all others from the agent, which sends these tiles and no others. Then they are
/// attested. The version stays what it is; a commit can be taken back after it as before it. Live memory is written:
/// the engine may not compute with it meanwhile. By whoever calls the receiver, between its calls.
///
/// A receiver that had found its live memory wrong (so that the next pull would be a full one) attests all of it
/// afterwards, and trusts it again if nothing is wrong any more. One whose repair failed distrusts it likewise, until a
/// later repair or a full update: who asks for tiles knows them to be wrong.
/// Errors:
///   - not_found: nothing is committed.
///   - out_of_range, invalid_argument: there is no such tile, or the target does not keep it.
///   - gone: the agent serves another version by now. Tiles from a shadow are mended all the same; for the others the
///     next pull is a full one.
///   - corrupt: a tile is wrong again right after it was written (the memory is broken, or somebody writes there), or
///     the agent's bytes are; it is named.
///   - unsupported: a directory target, whose files nobody else may write.
///   - timed_out, cancelled, connection: some tiles may be mended, none has become worse.
///   - io: a device's, while it was written: there is no version any more, and nothing that was staged or pulled in
///     part; pull anew.
Result<RepairReport> repair(Receiver& receiver, std::span<const std::uint64_t> tiles, Deadline deadline,
                            std::stop_token stop = {});
/// All that attest() finds.
Result<RepairReport> repair(Receiver& receiver, std::span<const WrongTile> wrong, Deadline deadline,
                            std::stop_token stop = {});

}  // namespace deltasync
