// One generation of the segment: the mapping, the agent's role in it, and its layout as receivers get it. Shared by
// every plan that reads from it, so that a mapping outlives the file's removal until its last reader has left.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/home_nodes.hpp"
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
  std::vector<std::uint32_t> batch_homes;     ///< where the memory of each is; empty: there are no home nodes
  /// wire::LayoutMessage, encoded once; shared by those who send it, so that a slow peer pins no mapping.
  std::shared_ptr<const std::vector<std::byte>> layout_payload;
  std::unique_ptr<shm::Segment> segment;
  std::unique_ptr<shm::AgentRole> role;  ///< may be called from any thread

  /// A whole version's bytes.
  ByteSpan half(unsigned index) const {
    return ByteSpan(segment->half(index)).first(static_cast<std::size_t>(layout->half_bytes()));
  }

  static Result<std::unique_ptr<Generation>> create(const shm::SegmentPath& path, std::uint64_t number,
                                                    LayoutPtr layout, ByteSpan layout_encoded, ByteSpan sidecar_encoded,
                                                    const HomeNodesPtr& home_nodes = nullptr);
  /// Takes over a segment that an agent before this one left. Its layout must decode to the digest that it claims.
  static Result<std::unique_ptr<Generation>> adopt(const shm::SegmentPath& path, std::uint64_t number,
                                                   const HomeNodesPtr& home_nodes = nullptr);
};
using GenerationPtr = std::shared_ptr<Generation>;

/// Where what is large ends. Unmapping and freeing gigabytes takes long, and the last to hold a generation or a delta
/// may be a thread that serves connections, or one that holds the core's mutex: so they stay here until the yard's own
/// thread, the one in work(), clears it. Any thread may call any method.
class GenerationYard : public std::enable_shared_from_this<GenerationYard> {
 public:
  /// `before_unmap`: for tests, on the thread that unmaps.
  explicit GenerationYard(std::function<void()> before_unmap = {}) : before_unmap_(std::move(before_unmap)) {}
  /// From now on this yard's; numbers are unique.
  GenerationPtr keep(std::unique_ptr<Generation> generation);
  /// Takes a share of something large, which may be the last. Cheap; only for want of memory it ends at once.
  void bury(std::shared_ptr<const void> thing) noexcept;
  /// Unmaps what nobody holds any more, and lets go of what was buried.
  void clear();
  /// clear() whenever there is something, until close().
  void work();
  /// Nobody will clear it any more: clears it, and from then on who lets go last unmaps.
  void close();
  /// Somebody may still use it.
  bool held(std::uint64_t number) const;
  /// All that somebody may still use.
  std::vector<GenerationPtr> all_held() const;
  /// Not unmapped yet, which takes its time after the last has let go.
  bool has(std::uint64_t number) const;

 private:
  void take(std::unique_ptr<Generation> generation) noexcept;

  const std::function<void()> before_unmap_;
  mutable std::mutex mutex_;
  std::set<std::uint64_t> mapped_;                           // protected by mutex_, as all below
  std::map<std::uint64_t, std::weak_ptr<Generation>> held_;  // of these, by somebody
  std::vector<std::unique_ptr<Generation>> left_;            // held by nobody
  std::vector<std::shared_ptr<const void>> buried_;
  std::condition_variable came_;
  bool closed_ = false;
};

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
