// Memory that would take the process over its cgroup's limit is refused before it is mapped.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <vector>

#include "base/deadline.hpp"
#include "receiver/targets/host_memory.hpp"
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

TEST(HostMemory, PartsHavePagesAndTheRestHasNone) {
  constexpr std::uint64_t kMiB = 1u << 20;
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  ThreadPool pool(2, "test");
  const auto memory =
      HostMemory::map_parts(15 * kMiB, {{0, 1}, {7 * kMiB, 8 * kMiB + 1}, {9 * kMiB, 9 * kMiB + 1}}, pool, in_time());
  ASSERT_TRUE(memory.ok()) << memory.error().to_string();
  std::vector<unsigned char> present(15 * kMiB / page);
  ASSERT_EQ(mincore(memory->span().data(), memory->span().size(), present.data()), 0);
  for (std::uint64_t i = 0; i < present.size(); ++i) {
    const std::uint64_t mib = i * page / kMiB;
    const bool wanted = mib < 2 || (mib >= 6 && mib < 10);
    EXPECT_EQ((present[i] & 1) != 0, wanted) << "page " << i << ", MiB " << mib;
    if (HasFailure()) return;
  }
  for (const std::byte b : memory->span()) ASSERT_EQ(b, std::byte{0});
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
