// Published formats for weight deltas, written from their descriptions, as yardsticks for ours: what they take on
// the wire and how fast they go over the same data. Bf16 only, no hashes, no headers: that favours them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/result.hpp"

namespace deltasync::bench {

using Bf16Span = std::span<const std::uint16_t>;  ///< bit patterns

/// One way to code the change of a piece of a tensor (fewer than 2^32 elements).
struct BaselineFormat {
  const char* name;    ///< in the results
  const char* system;  ///< who published it
  /// Appends the piece's delta to `out`. internal: zstd failed.
  Status (*encode)(Bf16Span before, Bf16Span after, std::vector<std::byte>& out);
  /// Turns `live` from before into after. corrupt if `bytes` is no such delta.
  Status (*decode)(ByteSpan bytes, std::span<std::uint16_t> live);
};

/// In the order in which a table shows them.
std::span<const BaselineFormat> baseline_formats();

}  // namespace deltasync::bench
