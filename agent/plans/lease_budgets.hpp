// How long each peer's readers may keep a writer waiting. Who lost a lease gets half as much time at the next, and what
// it pulls is copied out of the half first, so that it needs none; who gives leases back in time gets its time back.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>

namespace deltasync::agent {

/// Not thread-safe; protected by the mutex of the LeaseRevoker.
class LeaseBudgets {
 public:
  using Time = std::chrono::milliseconds;
  static constexpr std::size_t kPeersMax = 4096;  ///< remembered; then who was heard of longest ago is forgotten
  static constexpr Time kLeast{10};               ///< less is none

  explicit LeaseBudgets(Time full) : full_(full) {}

  Time of(const std::string& peer) const {
    const auto found = peers_.find(peer);
    return found == peers_.end() ? full_ : found->second.time;
  }
  void lost(const std::string& peer) {
    Peer& p = at(peer);
    p.time /= 2;
    if (p.time < kLeast) p.time = Time(0);
  }
  void gave_back(const std::string& peer) {
    const auto found = peers_.find(peer);
    if (found == peers_.end()) return;
    found->second.time = std::max(kLeast, found->second.time * 2);
    if (found->second.time >= full_) peers_.erase(found);
  }

 private:
  struct Peer {
    Time time;
    std::uint64_t heard = 0;
  };
  Peer& at(const std::string& peer) {
    auto found = peers_.find(peer);
    if (found == peers_.end()) {
      if (peers_.size() >= kPeersMax) {
        peers_.erase(std::min_element(peers_.begin(), peers_.end(),
                                      [](const auto& a, const auto& b) { return a.second.heard < b.second.heard; }));
      }
      found = peers_.emplace(peer, Peer{full_}).first;
    }
    found->second.heard = ++clock_;
    return found->second;
  }

  const Time full_;
  std::map<std::string, Peer> peers_;  // that have less than all
  std::uint64_t clock_ = 0;
};

}  // namespace deltasync::agent
