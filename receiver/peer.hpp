// Who a receiver talks to, and how often it knocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "net/pulse.hpp"
#include "net/tls.hpp"
#include "receiver/tuning.hpp"

namespace deltasync::receiver {

struct Address {
  std::string endpoint;  ///< as the user wrote it, for messages
  std::string host;
  std::uint16_t port = 0;
};

/// Agents that serve the same versions, the preferred one first, and which of them is in use. Any thread may look.
class Addresses {
 public:
  explicit Addresses(std::vector<Address> list, std::size_t at = 0) : list_(std::move(list)), at_(at) {}

  const Address& now() const noexcept { return list_[at_]; }
  std::size_t size() const noexcept { return list_.size(); }
  std::size_t at() const noexcept { return at_; }
  void use(std::size_t at) noexcept { at_ = at % list_.size(); }

 private:
  const std::vector<Address> list_;
  std::atomic<std::size_t> at_;
};

struct Peer {
  std::shared_ptr<Addresses> addresses;  ///< shared by the connections of one receiver
  std::string token;
  std::string name;
  Tuning tuning;
  std::shared_ptr<net::Tls> tls = nullptr;      ///< null: none
  std::shared_ptr<net::Pulse> pulse = nullptr;  ///< of the agent in use; null: there is no other

  const Address& address() const noexcept { return addresses->now(); }
  const std::string& endpoint() const noexcept { return address().endpoint; }
  /// For a connection to be made where another agent may be had.
  std::chrono::milliseconds handshake() const { return pulse ? pulse->patience() : tuning.handshake; }
};

/// Doubling pauses, each cut short by up to a half of it at random: receivers that were sent away together do not come
/// back together.
class Backoff {
 public:
  Backoff(std::chrono::milliseconds first, std::chrono::milliseconds max) : first_(first), max_(max), next_(first) {}
  explicit Backoff(const Tuning& tuning) : Backoff(tuning.backoff_first, tuning.backoff_max) {}
  /// After an agent said that it is busy.
  static Backoff from_busy(const Tuning& tuning) { return {tuning.busy_first, tuning.busy_max}; }

  std::chrono::milliseconds next() {
    const auto pause = next_;
    next_ = std::min(next_ * 2, max_);
    return pause - std::chrono::milliseconds(std::uniform_int_distribution<long>(0, pause.count() / 2)(random_));
  }
  void reset() { next_ = first_; }

 private:
  std::chrono::milliseconds first_;
  std::chrono::milliseconds max_;
  std::chrono::milliseconds next_;
  std::minstd_rand random_{std::random_device{}()};
};

}  // namespace deltasync::receiver
