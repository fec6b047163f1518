#include "writer/slot_claim.hpp"

#include <unistd.h>

#include <filesystem>
#include <mutex>
#include <set>
#include <utility>

namespace deltasync {
namespace {

std::mutex g_mutex;

/// Protected by g_mutex. Never destroyed: a Writer may be a global of the user's, destroyed after any of ours.
std::set<std::string>& claims() {
  static auto& set = *new std::set<std::string>;
  return set;
}

}  // namespace

Result<SlotClaim> SlotClaim::take(const std::string& agent_socket, std::uint32_t slot) {
  std::error_code ignored;
  const auto path = std::filesystem::weakly_canonical(agent_socket, ignored);
  // The pid, since a forked child inherits its parent's claims.
  std::string key = std::to_string(::getpid()) + " " + std::to_string(slot) + " " + path.string();
  const std::lock_guard lock(g_mutex);
  if (!claims().insert(key).second) {
    return Error(Errc::already_exists, "writer slot " + std::to_string(slot) + " has a session in this process (pid " +
                                           std::to_string(::getpid()) + ") already");
  }
  return SlotClaim(std::move(key));
}

SlotClaim::SlotClaim(SlotClaim&& other) noexcept : home_(other.home_), key_(std::exchange(other.key_, {})) {}

SlotClaim::~SlotClaim() {
  if (key_.empty() || !home_.here()) return;  // a forked child's copy of the mutex may be locked for ever
  const std::lock_guard lock(g_mutex);
  claims().erase(key_);
}

}  // namespace deltasync
