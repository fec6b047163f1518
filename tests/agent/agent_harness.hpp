// A whole agent in this process, a trainer on the real writer library, and a receiver's end small enough to misbehave.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/agent.hpp"
#include "base/deadline.hpp"
#include "deltasync/writer.hpp"
#include "net/auth.hpp"
#include "net/blocking.hpp"
#include "tests/support/eventually.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::agent {

inline constexpr auto kTestLimit = std::chrono::seconds(60);  ///< no wait of a test that passes comes near it
inline Deadline test_deadline() {
  return Deadline::after(kTestLimit);
}

/// A receiver's connection. Every method fails the test on an unexpected answer, unless it returns a Result.
class Client {
 public:
  /// Connects and authenticates; the error that the agent answered, if any.
  static Result<Client> connect(std::uint16_t port, wire::Role role, const std::string& token = {},
                                std::uint16_t protocol = wire::kProtocolVersion);
  /// Connects and reads the hello, no more.
  static Result<Client> connect_raw(std::uint16_t port);

  template <class Reply, class M>
  Result<Reply> ask(const M& message) {
    DS_TRY(socket.send(++request_, message, test_deadline()));
    return socket.recv_as<Reply>(request_, test_deadline());
  }
  Result<wire::PlanReply> plan(const wire::PlanRequest& plan) { return ask<wire::PlanReply>(plan); }
  Status release(std::uint64_t plan);
  Result<LayoutPtr> layout();
  Result<std::vector<std::uint64_t>> digests(std::uint64_t plan);
  /// Bytes of all extents of an answer, in order; the error that ended it.
  Result<std::vector<std::byte>> extent(std::uint64_t plan, wire::TileRange tiles);
  Result<std::vector<std::vector<std::byte>>> frames(const wire::GetFrames& message);
  Result<std::vector<std::vector<std::byte>>> frames(const wire::GetRawTiles& message);

  net::MessageSocket socket;
  wire::Hello hello;
  wire::Welcome welcome;

 private:
  Result<std::vector<std::vector<std::byte>>> collect_frames();
  std::uint64_t request_ = 0;
};

class AgentTest : public ::testing::Test {
 protected:
  AgentTest();
  ~AgentTest() override;

  void start_agent();
  void stop_agent() { agent_.reset(); }
  std::uint16_t port() const { return agent_->port(); }

  std::unique_ptr<Writer> attach(const LayoutPtr& layout);
  /// Offloads `half` as the next version of the epoch; waits until it is served unless told otherwise.
  Result<OffloadReport> offload(Writer& writer, const std::vector<std::byte>& half, std::uint64_t number,
                                Deadline deadline = test_deadline(), bool wait_served = true);
  /// Makes the next version of model_ and offloads it.
  void next_version(double density = 0.01);

  Client client(wire::Role role = wire::Role::control);
  wire::PlanRequest ask(wire::WantKind want = wire::WantKind::newest) const;
  /// As if the receiver held what is served now.
  wire::PlanRequest ask_from_served() const;
  /// So many leases have been revoked. They are counted a moment after the writer goes on.
  bool revoked(std::uint64_t leases) const {
    return test::eventually([&] { return agent_->core().metrics().leases_revoked >= leases; }) &&
           agent_->core().metrics().leases_revoked == leases;
  }
  ServedPtr served() const { return agent_->core().versions().snapshot()->served; }

  test::TempDir dir_;
  AgentOptions options_;
  test::TestModel model_ = test::make_model(1);
  std::uint64_t epoch_ = make_epoch();
  std::uint64_t number_ = 0;
  std::unique_ptr<Agent> agent_;
  std::unique_ptr<Writer> writer_;
};

/// Waits until `done()`; false at the test's limit.
template <class F>
bool eventually(const F& done) {
  const Deadline deadline = test_deadline();
  while (!done()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace deltasync::agent
