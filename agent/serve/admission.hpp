// Which connections the pull server admits. A connection is a stranger until it has authenticated. Strangers have a few
// places of their own, so they never take the places of known peers, however many come. When these places are full, the
// oldest stranger of the address with the most of them has to leave: a peer that authenticates soon gets through. Pure:
// no socket, no clock.
#pragma once

#include <boost/asio/ip/address.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "agent/options.hpp"

namespace deltasync::agent {

/// Not thread-safe.
class Admission {
 public:
  enum class Kind : std::uint8_t { stranger, receiver, data };
  enum class Verdict : std::uint8_t {
    admitted,
    busy,  ///< all places of its kind are taken
    left,  ///< it had to leave meanwhile
  };

  explicit Admission(const AdmissionLimits& limits) : limits_(limits) {}

  /// A new connection, a stranger; ids ascend. Returns the one that has to leave for it, if any.
  std::optional<std::uint64_t> come(std::uint64_t id, const boost::asio::ip::address& from);
  /// A stranger has authenticated. If there is no place of its kind it remains a stranger.
  Verdict settle(std::uint64_t id, Kind kind);
  void leave(std::uint64_t id);

  std::size_t count(Kind kind) const noexcept;
  std::size_t most(Kind kind) const noexcept;

 private:
  struct Place {
    Kind kind = Kind::stranger;
    std::string origin;
  };
  using Origin = std::map<std::string, std::set<std::uint64_t>>::iterator;

  std::optional<std::uint64_t> make_room(Origin origin, bool loopback);
  void forget_stranger(std::uint64_t id, const std::string& origin);

  const AdmissionLimits limits_;
  std::map<std::uint64_t, Place> places_;
  std::map<std::string, std::set<std::uint64_t>> strangers_;  ///< by origin
  std::size_t stranger_count_ = 0;
  std::size_t receiver_count_ = 0;
  std::size_t data_count_ = 0;
};

}  // namespace deltasync::agent
