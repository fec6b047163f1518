#include "writer/slot_claim.hpp"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <set>
#include <utility>

namespace deltasync {
namespace {

/// The claims of one process. A forked child begins with an empty list of its own: its parent's claims are not the
/// child's, and its copy of their mutex stays locked for ever if another thread held it at the fork.
struct Claims {
  ForkGuard fork_guard;
  std::mutex mutex;
  std::set<std::string> keys;  // protected by mutex
};

std::atomic<Claims*> g_claims{nullptr};

/// Never destroyed: a Writer may be a global of the user's, destroyed after any of ours.
Claims& claims() {
  Claims* found = g_claims.load(std::memory_order_acquire);
  while (found == nullptr || !found->fork_guard.same_process()) {
    auto* made = new Claims;
    if (g_claims.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
    delete made;  // another thread was first; `found` is what it made
  }
  return *found;
}

}  // namespace

Result<SlotClaim> SlotClaim::take(const std::string& agent_socket, std::uint32_t slot) {
  std::error_code ignored;
  const auto path = std::filesystem::weakly_canonical(agent_socket, ignored);
  std::string key = std::to_string(slot) + " " + path.string();
  Claims& here = claims();
  const std::lock_guard lock(here.mutex);
  if (!here.keys.insert(key).second) {
    return Error(Errc::already_exists, "writer slot " + std::to_string(slot) + " has a session in this process (pid " +
                                           std::to_string(::getpid()) + ") already");
  }
  return SlotClaim(std::move(key));
}

void SlotClaim::while_locked(const std::function<void()>& work) {
  const std::lock_guard lock(claims().mutex);
  work();
}

SlotClaim::SlotClaim(SlotClaim&& other) noexcept
    : fork_guard_(other.fork_guard_), key_(std::exchange(other.key_, {})) {}

SlotClaim::~SlotClaim() {
  if (key_.empty() || !fork_guard_.same_process()) return;
  Claims& here = claims();
  const std::lock_guard lock(here.mutex);
  here.keys.erase(key_);
}

}  // namespace deltasync
