// While nothing is served: the version that a relay is bringing, with its origin's digests. Receivers plan for it at
// once, and get each tile when it is in place (ServedVersion::arriving). It lies in memory of its own, so nobody's half
// waits for its readers, and each of them verifies what it gets.
//
// Invariants:
//   - It is offered only while tiles come. Once none has come for a while it is not, its leases end, and who waits is
//     told that nothing comes here (Origin): who knows another agent goes on there. When tiles come again it is offered
//     again.
//   - Its plans end with it, and so does the memory: what the relay writes there next is another version's.
//
// Its mutex protects all of it. Those of the store, of its listeners, of the leases and of Origin are taken under it.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "agent/versions/leases.hpp"
#include "agent/versions/origin.hpp"
#include "agent/versions/version_store.hpp"
#include "format/wire_report.hpp"

namespace deltasync::agent {

/// Thread-safe.
class Arrival {
 public:
  /// All outlive it.
  Arrival(VersionStore& versions, LeaseTable& leases, Origin& origin)
      : versions_(versions), leases_(leases), origin_(origin) {}

  /// The relay of this connection brings this version. `half` of it is set here. Does nothing where a version is
  /// served.
  void begin(std::uint64_t connection, ServedVersion version);
  /// It does not any more; or the connection has ended.
  void end(std::uint64_t connection);
  /// To be called often: whether tiles come, and whether the version is served by now.
  void look();
  /// Whether these tiles of a version that arrives have their digests, as far as they are in place. If not, it is not
  /// offered any more: its receivers wait for the seal.
  bool check(const ServedVersion& version, std::span<const wire::TileRange> tiles, const std::string& who);

 private:
  using Clock = std::chrono::steady_clock;

  std::chrono::nanoseconds patience() const;
  void end_locked(const char* why);
  void stop_offering_locked();

  VersionStore& versions_;
  LeaseTable& leases_;
  Origin& origin_;
  std::mutex mutex_;
  ServedPtr now_;  // null: none. Protected by mutex_, as all below
  std::uint64_t connection_ = 0;
  std::uint64_t count_ = 0;  // of arrivals: names their leases
  std::uint64_t tiles_ = 0;  // in place at the last look
  Clock::time_point moved_at_;
  std::chrono::nanoseconds longest_{0};  // between two looks that saw new tiles
  bool stands_ = false;
};

}  // namespace deltasync::agent
