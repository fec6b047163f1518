// A coordinator over TCP, and a rank's end of a connection that is small enough to misbehave.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "base/deadline.hpp"
#include "commit/coordinator_server.hpp"
#include "format/wire_commit.hpp"
#include "net/auth.hpp"
#include "tests/support/held_port.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::commit {

inline constexpr auto kLimit = std::chrono::seconds(60);  ///< no wait of a test that passes comes near it
inline constexpr const char* kToken = "known between ranks";

inline Deadline soon() {
  return Deadline::after(kLimit);
}

template <class F>
bool eventually(const F& done) {
  const Deadline deadline = soon();
  while (!deadline.passed()) {
    if (done()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

/// A rank's end of a connection.
struct Peer {
  net::MessageSocket socket;
  wire::Hello hello;

  static Peer connect(std::uint16_t port) {
    Peer peer;
    auto fd = net::connect_tcp("127.0.0.1", port, soon());
    EXPECT_TRUE(fd) << fd.error().to_string();
    peer.socket = net::MessageSocket(*std::move(fd));
    auto hello = peer.socket.recv_as<wire::Hello>(0, soon());
    EXPECT_TRUE(hello) << hello.error().to_string();
    if (hello) peer.hello = *hello;
    return peer;
  }
  wire::RankJoin join_message(std::uint32_t rank, std::uint32_t ranks, std::uint64_t incarnation,
                              const std::string& token = kToken) const {
    wire::RankJoin join;
    join.rank = rank;
    join.ranks = ranks;
    join.incarnation = incarnation;
    join.nonce = net::make_nonce();
    join.proof = net::rank_proof(token, hello.nonce, join.nonce, rank, ranks, incarnation);
    return join;
  }
  Result<wire::RankWelcome> join(const wire::RankJoin& message) {
    DS_TRY(socket.send(0, message, soon()));
    return socket.recv_as<wire::RankWelcome>(0, soon());
  }
  Result<Order> report(const Report& report) {
    DS_TRY(socket.send(7, wire::RankReport{report}, soon()));
    DS_ASSIGN(const auto order, socket.recv_as<wire::RankOrder>(7, soon()));
    return order.order;
  }
  /// What it is told before it is dropped.
  Error last_words() {
    auto message = socket.recv(wire::kControlBytesMax, soon());
    if (!message) return std::move(message).error();
    auto said = wire::ErrorMessage::decode(message->payload);
    if (!said) return std::move(said).error();
    EXPECT_EQ(message->header.request, 0u);
    EXPECT_EQ(socket.recv(wire::kControlBytesMax, soon()).error().code(), Errc::connection);
    return {said->code, said->message};
  }
};

class CommitServer : public ::testing::Test {
 protected:
  /// Again at the same place.
  void start(std::uint32_t ranks = 2, const std::string& token = kToken, CoordinatorServer::Limits limits = {}) {
    CoordinatorOptions options;
    options.ranks = ranks;
    options.log = dir_.path() / "commit.log";
    options.token = token;
    options.listen = port_.endpoint();
    auto made = CoordinatorServer::start(options, {}, limits);
    ASSERT_TRUE(made) << made.error().to_string();
    server_ = *std::move(made);
  }
  Peer peer() const { return Peer::connect(server_->port()); }
  /// An honest rank is heard after whatever happened.
  void expect_unharmed() {
    Peer honest = peer();
    const auto welcome = honest.join(honest.join_message(1, 2, 1000));
    ASSERT_TRUE(welcome) << welcome.error().to_string();
    const auto order = honest.report(busy(1, 1000));
    ASSERT_TRUE(order) << order.error().to_string();
    EXPECT_EQ(order->kind, OrderKind::none);
    EXPECT_EQ(server_->ranks().at(1).report->incarnation, 1000u);
  }
  static Report busy(std::uint32_t rank, std::uint64_t incarnation) {
    Report report;
    report.rank = rank;
    report.incarnation = incarnation;
    report.step = 1;
    report.busy = true;
    return report;
  }

  test::TempDir dir_;
  const test::HeldPort port_;
  std::unique_ptr<CoordinatorServer> server_;
};

}  // namespace deltasync::commit
