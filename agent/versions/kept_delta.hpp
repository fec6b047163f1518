// A delta of the ring as a file, for the agent after this one (shm_protocol.md "Kept deltas"):
//
//   0        8         12      16           24          32         40            48
//   +--------+---------+-------+------------+-----------+----------+-------------+
//   | magic  | version | flags | list bytes | list hash | reserved | header hash |
//   +--------+---------+-------+------------+-----------+----------+-------------+
//   | from label | to label | tiles | tile, digest before … |   container of delta_format.md
//   |<------------------ list bytes ----------------------->|
#pragma once

#include <memory>
#include <vector>

#include "agent/versions/ring.hpp"
#include "base/bytes.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::agent {

/// Everything before the container's frames, which follow as they are in memory: nothing large is copied.
std::vector<std::byte> kept_delta_head(const RingEntry& entry);

/// Checks hashes, bounds and the container: corrupt, unsupported or layout_mismatch. The caller has to check where the
/// entry leads, and that its digests are right.
Result<std::shared_ptr<RingEntry>> decode_kept_delta(ByteSpan file, const Layout& layout);

/// The chain of these deltas (in any order) that ends at exactly this state, oldest first; empty if none ends there. A
/// delta is part of it only if its old digests, put in place of those after it, have the root that it starts from. That
/// proves that it belongs to these bytes.
std::vector<RingEntryPtr> chain_to(const VersionId& version, const Digest128& root, std::vector<std::uint64_t> digests,
                                   const std::vector<RingEntryPtr>& deltas);

}  // namespace deltasync::agent
