// Who a receiver talks to, and how often it knocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "net/endpoint.hpp"
#include "net/pulse.hpp"
#include "net/tls.hpp"
#include "net/ucx/ucx.hpp"
#include "receiver/tuning.hpp"

namespace deltasync::receiver {

struct Address {
  std::string endpoint;  ///< as the user wrote it, for messages
  std::string host;
  std::uint16_t port = 0;
  net::Transport transport = net::Transport::tcp;
};

/// Agents that serve the same versions, the preferred one first, and which of them is in use: one of these, or one that
/// an agent named (`elsewhere`). Any thread may look; one changes.
class Addresses {
 public:
  explicit Addresses(std::vector<Address> list, std::size_t at = 0) : list_(std::move(list)), at_(at) {}

  const Address& now() const noexcept {
    const Address* const named = named_;
    return named != nullptr ? *named : list_[at_];
  }
  std::size_t size() const noexcept { return list_.size(); }
  std::size_t at() const noexcept { return at_; }
  void use(std::size_t at) noexcept {
    at_ = at % list_.size();
    named_ = nullptr;
  }

  /// The one in use is none of the list.
  bool is_named() const noexcept { return named_ != nullptr; }
  /// False: more were named than are remembered.
  bool use_named(Address address) {
    const auto is_it = [&](const Address& known) { return known.endpoint == address.endpoint; };
    auto found = std::find_if(all_named_.begin(), all_named_.end(), is_it);
    if (found == all_named_.end()) {
      if (all_named_.size() == kNamedMax) return false;
      found = all_named_.insert(found, std::move(address));
    }
    named_ = &*found;
    return true;
  }

  /// For a look at another one.
  std::pair<std::size_t, const Address*> place() const noexcept { return {at_, named_}; }
  void use(const std::pair<std::size_t, const Address*>& place) noexcept {
    at_ = place.first;
    named_ = place.second;
  }

 private:
  static constexpr std::size_t kNamedMax = 1024;

  const std::vector<Address> list_;
  std::atomic<std::size_t> at_;
  std::list<Address> all_named_;  ///< who looks may still use one that is left
  std::atomic<const Address*> named_{nullptr};
};

struct Peer {
  std::shared_ptr<Addresses> addresses;  ///< shared by the connections of one receiver
  std::string token;
  std::string name;
  Tuning tuning;
  std::shared_ptr<net::Tls> tls = nullptr;       ///< null: none
  std::shared_ptr<net::ucx::Ucx> ucx = nullptr;  ///< null: no agent is reached by it
  std::shared_ptr<net::Pulse> pulse = nullptr;   ///< of the agent in use; null: there is no other

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
