// One session a slot and process; a fork in the middle of a claim.
#include "writer/slot_claim.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <optional>
#include <thread>

#include "base/deadline.hpp"
#include "deltasync/writer.hpp"
#include "tests/support/model.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync {
namespace {

TEST(SlotClaim, OneSessionASlotAndSocket) {
  const test::TempDir dir;
  const std::string path = dir.path() / "agent.sock";
  {
    const auto first = SlotClaim::take(path, 0);
    ASSERT_TRUE(first);
    const auto second = SlotClaim::take((dir.path() / "." / "agent.sock").string(), 0);
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code(), Errc::already_exists);
    EXPECT_TRUE(SlotClaim::take(path, 1));
    EXPECT_TRUE(SlotClaim::take(path + "2", 0));
  }
  EXPECT_TRUE(SlotClaim::take(path, 0));
}

/// A trainer forks (a data loader, say) while one of its threads is inside a claim: the child has no such thread.
TEST(SlotClaim, AForkInTheMiddleOfAClaimLeavesTheChildAble) {
  const test::TempDir dir;
  const test::TestModel model = test::make_model(1);
  WriterOptions options;
  options.agent_socket = dir.path() / "agent.sock";
  options.threads = 1;
  std::optional<Result<SlotClaim>> parents = SlotClaim::take(options.agent_socket, 0);
  ASSERT_TRUE(*parents);
  std::promise<void> held;
  std::promise<void> forked;
  std::thread holder([&] {
    SlotClaim::while_locked([&] {
      held.set_value();
      forked.get_future().wait();
    });
  });
  held.get_future().wait();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    {
      const auto own = SlotClaim::take(options.agent_socket, 0);
      if (!own) ::_exit(1);
      if (SlotClaim::take(options.agent_socket, 0)) ::_exit(2);
      parents.reset();
      if (SlotClaim::take(options.agent_socket, 0)) ::_exit(3);
    }
    const auto writer = Writer::attach(model.layout, Sidecar{}, options, Deadline::after(std::chrono::seconds(0)));
    if (writer || writer.error().code() != Errc::connection) ::_exit(4);
    ::_exit(0);
  }
  forked.set_value();
  holder.join();
  ASSERT_GT(child, 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << (WIFSIGNALED(status) ? "it hung" : "");
  EXPECT_FALSE(SlotClaim::take(options.agent_socket, 0)) << "the parent's is still its own";
}

}  // namespace
}  // namespace deltasync
