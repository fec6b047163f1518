// One session per writer slot in a process. The agent refuses other processes, but must let the same process connect
// again, and after its own restart it cannot tell a second session from the first one that comes back.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "base/fork_guard.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

class SlotClaim {
 public:
  /// already_exists if a session of this process has the slot at that agent. A forked child's claims are its own.
  static Result<SlotClaim> take(const std::string& agent_socket, std::uint32_t slot);
  /// For tests: what another thread may be in the middle of when the process forks.
  static void while_locked(const std::function<void()>& work);
  SlotClaim(SlotClaim&& other) noexcept;
  SlotClaim& operator=(SlotClaim&&) = delete;
  ~SlotClaim();

 private:
  explicit SlotClaim(std::string key) : key_(std::move(key)) {}

  ForkGuard fork_guard_;
  std::string key_;  ///< empty: moved from
};

}  // namespace deltasync
