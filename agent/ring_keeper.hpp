// The ring's deltas as files beside the segment, so that a restart of the agent does not cost each late receiver a
// whole model: <segment>.d1, <segment>.d2 … The files follow the ring, behind the publisher and at low priority; the
// agent after this one takes those that lead to exactly what it serves. Each is written once and never changed.
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

#include "agent/ring.hpp"
#include "deltasync/deadline.hpp"
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
  /// Ends the thread, which leaves what it is at: the caller, whose priority is not low, writes what is still to be
  /// written, the newest first, as far as it gets within `limit`. Idempotent.
  void stop(std::chrono::milliseconds limit = kStopLimit);

  /// This is the ring now; any thread, at once. One of another segment takes the place of the one before, whose files
  /// go with that segment. Of it, the newest that together have `bytes_max` are kept.
  void keep(const shm::SegmentPath& segment, std::vector<RingEntryPtr> ring, std::uint64_t bytes_max);
  /// There is no ring any more: holds none, and leaves the files to who removes the segment.
  void forget();

  /// What an agent before this one kept of the ring that leads to this state, oldest first; from here on this keeper's.
  /// Its other files of the segment are removed, and what was wrong with them is logged. While there is no ring: after
  /// forget(), or before anything else.
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
