// The delta that a relay is receiving: receivers that hold the served version get its frames as they come, so that a
// chain of relays takes the time of one, and not each the time of the one above it as well.
//
// Invariants:
//   - Only who holds exactly the served version plans for it, and only while frames come. Everybody else gets what is
//     served.
//   - Its epoch is the served one's: nobody goes on to another trainer's version before the agent serves that.
//   - Once no more of it comes it is over for good, and its plans with it, unless all of it is there.
//
// Its mutex protects all of it. Those of the store, of its listeners and of the delta are taken under it.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "agent/versions/arriving_delta.hpp"
#include "agent/versions/ring.hpp"
#include "agent/versions/version_store.hpp"
#include "format/wire_report.hpp"

namespace deltasync::agent {

/// Thread-safe.
class DeltaArrival {
 public:
  /// `versions` outlives it.
  explicit DeltaArrival(VersionStore& versions) : versions_(versions) {}

  /// The relay of this connection brings this delta, or, with `said.to` of epoch 0, none any more. layout_mismatch,
  /// invalid_argument: it is not taken.
  Status begin(std::uint64_t connection, const LayoutPtr& layout, wire::TrainerDelta said);
  /// A part of it. An error ends it. Does nothing if it is over already.
  Status take(std::uint64_t connection, wire::TrainerFrames part);
  /// The connection has ended.
  void end(std::uint64_t connection);
  /// A receiver could not verify tiles of it: either these, or what it holds, are wrong. It is over: the served version
  /// says which.
  void doubted(const RingEntryPtr& delta, const std::string& who);
  /// To be called often: whether frames come, and whether the version is served by now.
  void look();

 private:
  using Clock = std::chrono::steady_clock;
  void end_locked(const char* why);

  VersionStore& versions_;
  std::mutex mutex_;
  RingEntryPtr now_;  // null: none. Protected by mutex_, as all below
  std::uint64_t connection_ = 0;
  std::uint64_t tiles_ = 0;  // settled at the last look
  Clock::time_point moved_at_;
};

}  // namespace deltasync::agent
