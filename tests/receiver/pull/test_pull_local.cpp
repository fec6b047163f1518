// Whether an agent is asked for its memory at all, and what follows when it has none to give; a whole agent's memory is
// tests/integration/test_local_pull.cpp's.
#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

class PullLocal : public PullTest {
 protected:
  /// This pull is a full one over the connection.
  void expect_full() {
    const PullReport report = pull_and_commit();
    EXPECT_EQ(report.mode, PullMode::full);
    EXPECT_EQ(report.local_bytes, 0u);
  }
  void expect_refused(const std::string& why) {
    const auto staged = pull();
    ASSERT_FALSE(staged);
    EXPECT_EQ(staged.error().code(), Errc::unsupported);
    EXPECT_NE(staged.error().message().find(why), std::string::npos) << staged.error().to_string();
  }
};

TEST_F(PullLocal, AnAgentOnAnotherHostIsNotAsked) {
  start();
  expect_full();
  EXPECT_EQ(agent_->requests(wire::Type::get_local), 0u);
}

TEST_F(PullLocal, OneOnThisHostIsAskedOnceAPull) {
  FakeAgent::Setup setup;
  setup.same_host = true;
  start(setup);
  expect_full();
  EXPECT_EQ(agent_->requests(wire::Type::get_local), 1u);
}

TEST_F(PullLocal, NeverMeansThatItIsNotAsked) {
  FakeAgent::Setup setup;
  setup.same_host = true;
  options_.local = false;
  start(setup);
  expect_full();
  EXPECT_EQ(agent_->requests(wire::Type::get_local), 0u);
}

TEST_F(PullLocal, AlwaysFailsWhereItsMemoryCannotBeHad) {
  options_.local = true;
  start();
  expect_refused("unknown request");
}

TEST_F(PullLocal, AnAgentOfProtocol4IsNotAsked) {
  FakeAgent::Setup setup;
  setup.same_host = true;
  setup.protocols = {4, 4};
  start(setup);
  expect_full();
  EXPECT_EQ(agent_->requests(wire::Type::get_local), 0u);
  options_.local = true;
  connect();
  expect_refused("protocol 4");
}

}  // namespace
}  // namespace deltasync::test
