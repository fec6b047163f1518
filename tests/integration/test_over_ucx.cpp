// What an agent answers to those who want their data over UCX.
#include <gmock/gmock.h>

#include <memory>
#include <optional>
#include <utility>

#include "agent/descriptors.hpp"
#include "format/wire_ucx.hpp"
#include "net/ucx/ucx.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/support/ucx.hpp"

/// The leak sanitizer's own thread crashes where libucp is loaded.
extern "C" const char* __asan_default_options() {  // NOLINT(bugprone-reserved-identifier)
  return "detect_leaks=0";
}

namespace deltasync::agent {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OverUcx : public AgentTest {
 protected:
  void SetUp() override {
    const std::string library = test::find_ucx();
    if (library.empty()) GTEST_SKIP() << test::kNoUcx;
    options_.pull.ucx = *net::ucx::Ucx::open({library, {}, true});
    ucx_ = *net::ucx::Ucx::open({library, {}, true});
    options_.pull.limits.ucx_connections_max = 1;
    start_agent();
  }
  Result<Client> connect() const { return Client::connect(port(), wire::Role::data); }
  wire::OpenUcx question() {
    link_ = *ucx_->offer();
    return {link_->offer().id, link_->offer().version, link_->offer().address};
  }

  std::shared_ptr<net::ucx::Ucx> ucx_;
  std::shared_ptr<net::ucx::Link> link_;
};

TEST_F(OverUcx, NoMoreThanThereIsRoomFor) {
  std::optional first(*connect());
  ASSERT_TRUE(first->ask<wire::UcxOpened>(question()));
  auto second = connect();
  ASSERT_TRUE(second);
  const auto refused = second->ask<wire::UcxOpened>(question());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::no_space);
  EXPECT_THAT(refused.error().message(), HasSubstr("pull over TCP"));
  first.reset();
  EXPECT_TRUE(eventually([&] {
    auto third = connect();
    return third && third->ask<wire::UcxOpened>(question());
  })) << "the place of one that has left is free";
}

TEST_F(OverUcx, ItsDescriptorsAreCountedWhenTheAgentStarts) {
  AgentOptions without = options_;
  without.pull.ucx.reset();
  EXPECT_EQ(descriptors_needed(options_), descriptors_needed(without) + 12);
}

/// An address that libucp does not know would end the agent.
TEST_F(OverUcx, OneOfAnotherVersionIsRefusedByBothVersions) {
  auto client = connect();
  ASSERT_TRUE(client);
  wire::OpenUcx other = question();
  other.version = 1u << 16 | 99;
  const auto refused = client->ask<wire::UcxOpened>(other);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::unsupported);
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("1.99 at the other"), HasSubstr("DELTASYNC_UCX_LIBRARY")));
}

}  // namespace
}  // namespace deltasync::agent
