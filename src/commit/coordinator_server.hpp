// The coordinator's TCP side: a thread for each rank that is connected, which may block.
#pragma once

#include <atomic>
#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "commit/coordinator.hpp"
#include "net/blocking.hpp"
#include "net/listener.hpp"
#include "net/tls.hpp"

namespace deltasync::commit {

class CoordinatorServer final : public Coordinator {
 public:
  /// How long a peer may take; tests on a busy machine give more.
  struct Limits {
    std::chrono::nanoseconds join = std::chrono::seconds(5);      ///< TLS, hello, join and welcome
    std::chrono::nanoseconds silence = std::chrono::seconds(10);  ///< without a report
  };
  static Result<std::unique_ptr<CoordinatorServer>> start(CoordinatorOptions options, Points points, Limits limits);
  static Result<std::unique_ptr<CoordinatorServer>> start(CoordinatorOptions options, Points points = {}) {
    return start(std::move(options), std::move(points), Limits());
  }
  ~CoordinatorServer() override;

  std::uint16_t port() const override { return listener_.port(); }
  Result<Version> update(const Want& want, Deadline deadline) override { return core_->update(want, deadline); }
  std::optional<Version> served() const override { return core_->served(); }
  std::vector<RankStatus> ranks() const override;
  Result<Order> exchange(const Report& report, Deadline hold, std::stop_token stop) override {
    return core_->exchange(report, hold, stop);
  }

 private:
  struct Peer {
    std::jthread thread;
    std::atomic<bool> joined{false};
    std::atomic<bool> done{false};
  };
  /// Who speaks for a rank.
  struct Seat {
    std::uint64_t connection = 0;  ///< 0: nobody
    std::uint64_t incarnation = 0;
    UniqueFd fd;  ///< of its own, so that no other file is shut down in its place
  };
  /// What a peer has proved to be.
  struct Joined {
    std::uint32_t rank = 0;
    std::uint64_t incarnation = 0;
    std::uint64_t connection = 0;
  };

  CoordinatorServer(CoordinatorOptions options, Limits limits, std::unique_ptr<CoordinatorCore> core,
                    net::Listener listener, std::shared_ptr<net::Tls> tls)
      : options_(std::move(options)),
        limits_(limits),
        core_(std::move(core)),
        tls_(std::move(tls)),
        listener_(std::move(listener)) {}

  void accept_all(const std::stop_token& stop);
  void reap();
  bool make_room();
  void converse(Peer& peer, UniqueFd fd, std::uint64_t connection, const std::stop_token& stop);
  Status secure(net::MessageSocket& socket, Deadline deadline);
  Result<Joined> join(net::MessageSocket& socket, std::uint64_t connection, Deadline deadline);
  Status take_seat(const Joined& who, int fd);
  void leave_seat(const Joined& who);
  Status serve(net::MessageSocket& socket, const Joined& who, const std::stop_token& stop);

  const CoordinatorOptions options_;
  const Limits limits_;
  const std::unique_ptr<CoordinatorCore> core_;
  const std::shared_ptr<net::Tls> tls_;  // null: none
  net::Listener listener_;               // used by acceptor_ once that runs

  mutable std::mutex mutex_;
  std::vector<Seat> seats_;  // protected by mutex_

  std::list<Peer> peers_;                     // used by acceptor_, and by the destructor after it; the oldest first
  std::uint64_t closed_for_room_ = 0;         // used by acceptor_, as the next
  Deadline say_closed_{Deadline::after({})};  // not before
  std::jthread acceptor_;
};

}  // namespace deltasync::commit
