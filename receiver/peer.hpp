// Who a receiver talks to, and how often it knocks.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include "receiver/tuning.hpp"

namespace deltasync::receiver {

struct Peer {
  std::string endpoint;  ///< as the user wrote it, for messages
  std::string host;
  std::uint16_t port = 0;
  std::string token;
  std::string name;
  Tuning tuning;
};

/// Doubling pauses.
class Backoff {
 public:
  explicit Backoff(const Tuning& tuning) : tuning_(tuning), next_(tuning.backoff_first) {}

  std::chrono::milliseconds next() {
    const auto pause = next_;
    next_ = std::min(next_ * 2, tuning_.backoff_max);
    return pause;
  }
  void reset() { next_ = tuning_.backoff_first; }

 private:
  const Tuning& tuning_;
  std::chrono::milliseconds next_;
};

}  // namespace deltasync::receiver
