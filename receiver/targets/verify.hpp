// The last look at a delta before anything is published (invariant 4): each record decoded over live memory, which is
// only read, and the digest after it compared.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "receiver/targets/target.hpp"

namespace deltasync {

/// Records of one tile, oldest step first.
using RecordChain = std::span<const delta::TileRecord* const>;

/// The digest of a tile after all of its records. `digest` is that of live memory; `scratch` is working memory.
/// `corrupt` names the tile; io is the target's.
Result<std::uint64_t> verify_chain(const Target& target, RecordChain chain, std::uint64_t digest,
                                   std::vector<std::byte>& scratch);

/// Bytes of decoded changes of all records, or of those in rice_class only: what undoing these takes.
std::uint64_t resolved_bytes(const Layout& layout, const StagedFrame& frame);
std::uint64_t class_bytes(const Layout& layout, const StagedFrame& frame);

/// How many more bytes of decoded changes an update may keep. Shared by the threads that verify it.
class ResolvedBudget {
 public:
  explicit ResolvedBudget(std::uint64_t bytes) : left_(bytes) {}
  bool take(std::uint64_t bytes) noexcept;
  /// take(), and `protocol` if there is no room: the plan was accepted because there is.
  Status take_for_classes(std::uint64_t bytes);
  /// What was taken before, by a frame that is not kept.
  void give_back(std::uint64_t bytes) noexcept { left_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> left_;
};

/// Verifies each record of a frame that is the only step to its tiles: `before` are the digests of live memory; those
/// of the frame's tiles are set in `after`. If the target takes decoded changes and the budget allows it, the decoded
/// changes stay in frame.resolved, or with the target in frame.kept; without that, tiles in rice_class are refused
/// (`protocol`), since undoing those takes as much again. On error (else `corrupt`, naming the tile) both are empty,
/// the budget is what it was, and digests of tiles before that one are set.
Status verify_frame(Target& target, StagedFrame& frame, std::span<const std::uint64_t> before,
                    std::span<std::uint64_t> after, ResolvedBudget& budget);

}  // namespace deltasync
