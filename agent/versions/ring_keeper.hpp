// Keeps the ring's deltas in files beside the segment (<segment>.d1, <segment>.d2 …), so that after a restart of the
// agent late receivers need not pull a whole model. A thread of low priority writes them after the publisher, each
// once. The next agent adopts those that lead to exactly what it serves.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "agent/versions/ring.hpp"
#include "base/deadline.hpp"
#include "shm/segment.hpp"

namespace deltasync::agent {

class RingKeeper {
 public:
  static constexpr std::chrono::milliseconds kStopLimit{2'000};  ///< of the 4.5 s that an agent's end may take

  RingKeeper() = default;
  ~RingKeeper() { stop(); }
  RingKeeper(const RingKeeper&) = delete;
  RingKeeper& operator=(const RingKeeper&) = delete;

  /// Throws std::system_error if there is no thread to be had.
  void start();
  /// Ends the thread. What it has not written yet is written by the caller, whose priority is not low, the newest
  /// first, as far as `limit` allows. Idempotent.
  void stop(std::chrono::milliseconds limit = kStopLimit);

  /// Keeps this ring from now on: of its deltas the newest that take `bytes_max` together. Returns at once. Any thread.
  /// Files of another segment are left to those who remove that segment.
  void keep(const shm::SegmentPath& segment, std::vector<RingEntryPtr> ring, std::uint64_t bytes_max);
  /// There is no ring any more. Drops it, and leaves the files to those who remove the segment.
  void forget();

  /// Takes over what an agent before this one kept: the deltas that lead to this state, oldest first. Other files of
  /// the segment are removed; what was wrong with them is logged. Call it while there is no ring: first, or after
  /// forget().
  std::vector<RingEntryPtr> adopt(const shm::SegmentPath& segment, const Layout& layout, const VersionId& version,
                                  const Digest128& root, const std::vector<std::uint64_t>& digests);

 private:
  struct Wanted {
    shm::SegmentPath segment;
    std::vector<RingEntryPtr> ring;
    std::uint64_t bytes_max = 0;
  };
  using Files = std::map<std::weak_ptr<const RingEntry>, std::filesystem::path, std::owner_less<>>;

  void work();
  void follow(const Wanted& wanted) noexcept;
  void write_chain(const Wanted& wanted);
  /// Whether an older one is worth writing too.
  bool write(const Wanted& wanted, const RingEntryPtr& entry);
  bool must_end();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Wanted> wanted_;  // protected by mutex_, as the next three
  std::optional<Deadline> end_;   // once stop() writes itself: until then
  bool busy_ = false;             // the thread is at work: what is its own is not to be touched
  bool stop_ = false;
  // The thread's own while it is busy.
  Files files_;                 // those that there are
  std::filesystem::path kept_;  // of this segment
  std::uint64_t next_ = 1;      // the number of the next file
  bool refused_ = false;        // the last attempt to write found no room, which has been said
  std::thread thread_;
};

}  // namespace deltasync::agent
