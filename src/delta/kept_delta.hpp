// A delta as a file beside a segment (shm_protocol.md "Kept deltas"): what the agent keeps of its ring for the agent
// after it, and what a relay hands over with the version that it writes.
//
//   0        8         12      16           24          32         40            48
//   +--------+---------+-------+------------+-----------+----------+-------------+
//   | magic  | version | flags | list bytes | list hash | reserved | header hash |
//   +--------+---------+-------+------------+-----------+----------+-------------+
//   | from label | to label | tiles | tile, digest before … |   container of delta_format.md
//   |<------------------ list bytes ----------------------->|
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/version.hpp"

namespace deltasync::delta {

/// A tile and the digest that it had before.
struct DigestBefore {
  std::uint64_t tile = 0;
  std::uint64_t digest = 0;
};

struct KeptDelta {
  Delta delta;
  Version from;
  Version to;
  std::vector<DigestBefore> before;  ///< of the changed tiles, ascending
};

/// Everything before the container's frames, which follow as they are in memory: nothing large is copied.
std::vector<std::byte> kept_delta_head(const Delta& delta, const Version& from, const Version& to,
                                       std::span<const DigestBefore> before);
/// Checks hashes, bounds and the container: corrupt, unsupported or layout_mismatch. The caller has to check where the
/// delta leads, and that its digests are right.
Result<KeptDelta> decode_kept_delta(ByteSpan file, const Layout& layout);

}  // namespace deltasync::delta
