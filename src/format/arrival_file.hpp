// What a relay says of a version before it has it: a file beside the segment (shm_protocol.md "Versions that arrive"),
// from which its agent plans for receivers while the half is filled.
//
//   0        8         12      16           24          32            40
//   +--------+---------+-------+------------+-----------+-------------+------
//   | magic  | version | flags | body bytes | body hash | header hash | body
//   +--------+---------+-------+------------+-----------+-------------+------
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

struct ArrivingVersion {
  Version version;
  Digest128 root;
  std::vector<std::uint64_t> digests;  ///< of all tiles
};

/// The whole file.
std::vector<std::byte> encode_arriving(const Layout& layout, const Version& version, const Digest128& root,
                                       std::span<const std::uint64_t> digests);
/// Checks hashes and bounds: corrupt, unsupported or layout_mismatch. The caller has to check that the digests have the
/// root.
Result<ArrivingVersion> decode_arriving(ByteSpan file, const Layout& layout);

}  // namespace deltasync
