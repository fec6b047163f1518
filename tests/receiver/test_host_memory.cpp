// Memory that would take the process over its cgroup's limit is refused before it is mapped.
#include <gtest/gtest.h>

#include <fstream>

#include "receiver/host_memory.hpp"
#include "tests/receiver/hf_fixture.hpp"
#include "tests/receiver/trainer_model.hpp"

namespace deltasync::test {
namespace {

TEST(HostMemory, TheCgroupsLimitIsNoSpace) {
  TempDir dir;
  std::ofstream(dir.path() / "self") << "0::/job\n";
  std::filesystem::create_directories(dir.path() / "root" / "job");
  std::ofstream(dir.path() / "root" / "job" / "memory.max") << (8u << 20);
  std::ofstream(dir.path() / "root" / "job" / "memory.current") << (4u << 20);
  const CgroupFiles cgroup{dir.path() / "root", dir.path() / "self"};
  ThreadPool pool(2, "test");
  EXPECT_TRUE(HostMemory::map(4u << 20, pool, in_time(), cgroup).ok());
  const auto refused = HostMemory::map((4u << 20) + 1, pool, in_time(), cgroup);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::no_space);
  EXPECT_NE(refused.error().message().find("the memory cgroup has 4.00 MiB"), std::string::npos)
      << refused.error().message();
}

TEST(HostMemory, FillingItWithPagesEndsAtTheDeadlineAndByAStop) {
  ThreadPool pool(2, "test");
  const auto late = HostMemory::map(4u << 20, pool, Deadline::after(std::chrono::seconds(0)));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  std::stop_source stop;
  stop.request_stop();
  const auto stopped = HostMemory::map(4u << 20, pool, {in_time(), stop.get_token()});
  ASSERT_FALSE(stopped.ok());
  EXPECT_EQ(stopped.error().code(), Errc::cancelled);
}

TEST(HostMemory, SoIsTheMachinesEnd) {
  TempDir dir;
  std::ofstream(dir.path() / "meminfo") << "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   64 kB\n";
  const CgroupFiles none{dir.path() / "none", dir.path() / "none"};
  EXPECT_TRUE(check_memory_room(64u << 10, none, dir.path() / "meminfo").ok());
  EXPECT_EQ(check_memory_room((64u << 10) + 1, none, dir.path() / "meminfo").error().code(), Errc::no_space);
}

}  // namespace
}  // namespace deltasync::test
