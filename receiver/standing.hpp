// How a receiver stands: what it has committed, and how its last attempt ended. Written by the thread that calls the
// receiver; read by any, while that one pulls.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/until.hpp"
#include "deltasync/receiver.hpp"
#include "format/wire_report.hpp"
#include "receiver/peer.hpp"

namespace deltasync::receiver {

/// Thread-safe; may outlive its receiver, and says then what was last.
class Standing {
 public:
  /// `receiver`: a random number, by which the agent knows it over its connections.
  Standing(std::uint64_t receiver, Peer agent) : agent_(std::move(agent)) { report_.receiver = receiver; }

  void set(Version committed, std::string error) {
    const std::lock_guard lock(mutex_);
    report_.committed = std::move(committed);
    report_.error = std::move(error);
  }
  wire::Report report() const {
    const std::lock_guard lock(mutex_);
    return report_;
  }
  /// See Receiver::lag.
  Lag lag(const Until& until) const;

 private:
  const Peer agent_;
  mutable std::mutex mutex_;
  wire::Report report_;  // protected by mutex_
};

/// Of a receiver that Receiver::connect made; null of any other kind.
std::shared_ptr<const Standing> standing_of(const Receiver& receiver);

}  // namespace deltasync::receiver
