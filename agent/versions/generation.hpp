// One generation of the segment: the mapping, the agent's role in it, and its layout as receivers get it. Shared by
// every plan that reads from it, so that a mapping outlives the file's removal until its last reader has left.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "delta/delta.hpp"
#include "deltasync/layout.hpp"
#include "shm/roles.hpp"
#include "shm/segment.hpp"

namespace deltasync::agent {

struct Generation {
  std::uint64_t number = 0;
  LayoutPtr layout;
  std::vector<delta::Batch> batches;          ///< the layout's
  std::vector<std::uint32_t> batch_elements;  ///< of each
  /// wire::LayoutMessage, encoded once; shared by those who send it, so that a slow peer pins no mapping.
  std::shared_ptr<const std::vector<std::byte>> layout_payload;
  std::unique_ptr<shm::Segment> segment;
  std::unique_ptr<shm::AgentRole> role;  ///< may be called from any thread

  /// A whole version's bytes.
  ByteSpan half(unsigned index) const {
    return ByteSpan(segment->half(index)).first(static_cast<std::size_t>(layout->half_bytes()));
  }

  static Result<std::unique_ptr<Generation>> create(const shm::SegmentPath& path, std::uint64_t number,
                                                    LayoutPtr layout, ByteSpan layout_encoded,
                                                    ByteSpan sidecar_encoded);
  /// Takes over a segment that an agent before this one left. Its layout must decode to the digest that it claims.
  static Result<std::unique_ptr<Generation>> adopt(const shm::SegmentPath& path, std::uint64_t number);
};
using GenerationPtr = std::shared_ptr<Generation>;

/// "<name>.g<number>"
std::string segment_name(const std::string& agent_name, std::uint64_t number);

/// A file in the segment directory that bears this agent's name.
struct FoundSegment {
  std::uint64_t number = 0;
  shm::SegmentPath path;
};
/// Newest first.
Result<std::vector<FoundSegment>> find_segments(const std::filesystem::path& dir, const std::string& agent_name);

}  // namespace deltasync::agent
