// Where a full update of a relay waits for its commit. Where the agent serves nothing yet, in memory that is shared
// with that agent, which hands the tiles on to others while they come (shm/arriving_memory.hpp).
//
// Invariant: what was announced is one version for ever. Before a byte of it may become another version's, the agent is
// told that it comes no more, and nothing else is announced of this memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "deltasync/layout.hpp"
#include "deltasync/version.hpp"
#include "deltasync/writer.hpp"
#include "receiver/targets/host_memory.hpp"
#include "shm/arriving_memory.hpp"

namespace deltasync::relay {

class ArrivingUpdate {
 public:
  /// Both are borrowed. The writer is used by nobody else while came() is called.
  ArrivingUpdate(const Layout& layout, Writer& writer) : layout_(layout), writer_(writer) {}
  ~ArrivingUpdate() { release(); }
  ArrivingUpdate(const ArrivingUpdate&) = delete;
  ArrivingUpdate& operator=(const ArrivingUpdate&) = delete;

  /// `shared`: others may have it. If such memory is not to be had, it is private.
  Status open(bool shared, ThreadPool& pool, const CallContext& until);
  explicit operator bool() const noexcept { return shared_ != nullptr || own_; }
  /// Room for a half; empty if it is not open.
  std::span<std::byte> span() const noexcept { return shared_ ? shared_->room() : own_.span(); }
  /// The agent hears that it comes no more, if it has not heard of the version by other means.
  void release() noexcept;
  /// Likewise, and its memory goes to the caller.
  std::shared_ptr<void> take();

  /// From now on it is this version, whose tiles with `have` are there. The first call only has an effect.
  void announce(const Version& version, const Digest128& root, std::span<const std::uint64_t> digests,
                std::span<const std::uint8_t> have);
  /// These tiles of it are there, and right. Any thread.
  void came(std::span<const std::uint64_t> tiles);
  /// It will be another one, or none.
  void give_up() noexcept;
  /// The agent has it in the segment.
  void committed() noexcept;

 private:
  const Layout& layout_;
  Writer& writer_;
  HostMemory own_;
  std::unique_ptr<shm::ArrivingMemory> shared_;
  bool over_ = false;  ///< nothing is announced any more
  std::atomic<bool> announced_{false};
  std::mutex looking_;
  std::chrono::steady_clock::time_point looked_at_;  // for an agent that was started again; protected by looking_
};

}  // namespace deltasync::relay
