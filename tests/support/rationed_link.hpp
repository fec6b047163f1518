// A link between two processes, or two parts of one, of which a test decides how far a transfer gets.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.hpp"

namespace deltasync::test {

/// Forwards connections to a port; of what comes back, only as many bytes as it was granted. Not a clock but the test
/// decides how far a transfer gets.
class RationedLink {
 public:
  explicit RationedLink(std::uint16_t to) : to_(to) {
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof(address);
    listener_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener_.get(), 64), 0);
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { forward(); });
  }
  ~RationedLink() {
    stop_ = true;
    thread_.join();
  }
  RationedLink(const RationedLink&) = delete;
  RationedLink& operator=(const RationedLink&) = delete;

  std::uint16_t port() const noexcept { return port_; }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(port_); }
  /// Over all connections, on top of what is left.
  void grant(std::size_t bytes) { left_ += bytes; }
  /// What is left of that.
  void withdraw() { left_ = 0; }

 private:
  struct Pair {
    UniqueFd near;
    UniqueFd far;
    std::vector<std::byte> to_far;   ///< taken from near, not yet sent
    std::vector<std::byte> to_near;  ///< taken from far
  };

  static sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  /// One thread for all connections.
  void forward() {
    while (!stop_) {
      pollfd p{listener_.get(), POLLIN, 0};
      if (::poll(&p, 1, 1) == 1) accept_one();
      std::erase_if(pairs_, [&](Pair& pair) {
        const std::size_t share = std::min(kTurn, left_.load() / pairs_.size());
        std::size_t taken = 0;
        const bool open = move(pair.near.get(), pair.far.get(), pair.to_far, kTurn, taken);
        taken = 0;
        const bool back = move(pair.far.get(), pair.near.get(), pair.to_near, share, taken);
        std::size_t left = left_;
        while (!left_.compare_exchange_weak(left, left - std::min(left, taken))) continue;
        return !open || !back;
      });
    }
  }

  void accept_one() {
    Pair pair{UniqueFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)),
              UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
              {},
              {}};
    const int small = 64 << 10;  // else the kernel's buffers hold more than a step's worth
    ::setsockopt(pair.far.get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    const sockaddr_in address = loopback(to_);
    if (::connect(pair.far.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      pairs_.push_back(std::move(pair));
    }
  }

  /// Up to `bytes` more, once what was taken before has gone out: a peer that does not read holds up only itself. False
  /// at the end of the stream.
  static bool move(int from, int to, std::vector<std::byte>& pending, std::size_t bytes, std::size_t& taken) {
    if (pending.empty()) {
      if (bytes == 0) return true;
      pending.resize(bytes);
      const ssize_t n = ::recv(from, pending.data(), bytes, MSG_DONTWAIT);
      pending.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
      if (n <= 0) return n < 0 && errno == EAGAIN;
      taken = pending.size();
    }
    const ssize_t n = ::send(to, pending.data(), pending.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0) return errno == EAGAIN;
    pending.erase(pending.begin(), pending.begin() + n);
    return true;
  }

  static constexpr std::size_t kTurn = 256u << 10;  ///< bytes of one connection before the next has its turn

  const std::uint16_t to_;
  std::atomic<std::size_t> left_{0};
  UniqueFd listener_;
  std::uint16_t port_ = 0;
  std::vector<Pair> pairs_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace deltasync::test
