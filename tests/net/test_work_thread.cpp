// Work beside the threads that serve connections: where it runs, where its coroutine goes on, and how it fails.
#include "base/deadline.hpp"
#include "net/work_thread.hpp"

#include <gtest/gtest.h>
#include <pthread.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/strand.hpp>

#include <future>
#include <stdexcept>
#include <thread>

namespace deltasync::net {
namespace {

namespace asio = boost::asio;

std::string thread_name() {
  char name[16] = {};
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  return name;
}

TEST(WorkThread, RunsThereAndGoesOnHere) {
  asio::io_context io;
  WorkThread worker("long-work");
  const auto strand = asio::make_strand(io);
  bool done = false;
  asio::co_spawn(
      strand,
      [&]() -> asio::awaitable<void> {
        const auto work = []() -> Result<std::string> { return thread_name(); };
        const auto name = co_await worker.run(work);
        EXPECT_TRUE(name);
        EXPECT_EQ(*name, "long-work");
        EXPECT_TRUE(strand.running_in_this_thread());
        done = true;
      },
      asio::detached);
  io.run();
  EXPECT_TRUE(done);
}

TEST(WorkThread, WhatIsThrownIsAnError) {
  asio::io_context io;
  WorkThread worker("long-work");
  std::vector<Errc> codes;
  asio::co_spawn(
      io,
      [&]() -> asio::awaitable<void> {
        const auto broken = []() -> Status { throw std::runtime_error("broken"); };
        const Status first = co_await worker.run(broken);
        codes.push_back(first.error().code());
        EXPECT_EQ(first.error().message(), "broken");
        const auto large = []() -> Status { throw std::bad_alloc(); };
        const Status second = co_await worker.run(large);
        codes.push_back(second.error().code());
        const auto odd = []() -> Status { throw 42; };
        const Status third = co_await worker.run(odd);
        codes.push_back(third.error().code());
      },
      asio::detached);
  io.run();
  EXPECT_EQ(codes, (std::vector{Errc::internal, Errc::no_space, Errc::internal}));
}

TEST(WorkThread, StopRefusesWhatHasNotBegun) {
  asio::io_context io;
  WorkThread worker("long-work");
  std::promise<void> begun;
  std::promise<void> go_on;
  Status first = Error(Errc::aborted, "not run");
  Status second = Error(Errc::aborted, "not run");
  const auto slow = [&]() -> Status {
    begun.set_value();
    go_on.get_future().wait();
    return {};
  };
  const auto quick = []() -> Status { return {}; };
  asio::co_spawn(
      io, [&]() -> asio::awaitable<void> { first = co_await worker.run(slow); }, asio::detached);
  asio::co_spawn(
      io, [&]() -> asio::awaitable<void> { second = co_await worker.run(quick); }, asio::detached);
  std::thread net([&] { io.run(); });
  begun.get_future().wait();
  worker.stop();
  go_on.set_value();
  worker.join();
  net.join();
  EXPECT_TRUE(first);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::connection);
}

TEST(WorkThread, WhatHasNotBegunAtItsDeadlineNeverDoes) {
  asio::io_context io;
  WorkThread worker("long-work");
  std::promise<void> begun;
  std::promise<void> go_on;
  Status first = Error(Errc::aborted, "not run");
  Status second = Error(Errc::aborted, "not run");
  bool ran = false;
  const auto slow = [&]() -> Status {
    begun.set_value();
    go_on.get_future().wait();
    return {};
  };
  const auto late = [&]() -> Status {
    ran = true;
    return {};
  };
  const auto strand = asio::make_strand(io);
  asio::co_spawn(
      strand,
      [&]() -> asio::awaitable<void> { first = co_await worker.run(slow, Deadline::after(std::chrono::hours(1))); },
      asio::detached);
  asio::co_spawn(
      strand,
      [&]() -> asio::awaitable<void> {
        second = co_await worker.run(late, Deadline::after(std::chrono::milliseconds(1)));
        EXPECT_TRUE(strand.running_in_this_thread());
        go_on.set_value();  // not before: the thread was busy all the time
      },
      asio::detached);
  io.run();
  worker.join();
  EXPECT_TRUE(first);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::timed_out);
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace deltasync::net
