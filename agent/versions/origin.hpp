// Where the versions of an agent come from that a relay writes to: so that relays which would pull in a circle are
// told.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "format/wire_report.hpp"

namespace deltasync::agent {

/// Known as long as the relay that said it is connected. Thread-safe.
class Origin {
 public:
  void set(std::uint64_t connection, std::vector<wire::Parent> parents) {
    const std::lock_guard lock(mutex_);
    said_by_ = connection;
    parents_ = std::move(parents);
  }
  void forget(std::uint64_t connection) {
    const std::lock_guard lock(mutex_);
    if (said_by_ == connection) parents_.clear();
  }
  /// The nearest first; none: a trainer's, or nobody's.
  std::vector<wire::Parent> parents() const {
    const std::lock_guard lock(mutex_);
    return parents_;
  }

 private:
  mutable std::mutex mutex_;
  std::uint64_t said_by_ = 0;  // protected by mutex_, as the next one
  std::vector<wire::Parent> parents_;
};

}  // namespace deltasync::agent
