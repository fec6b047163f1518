// Room is known before anything is reserved.
#include <gmock/gmock-matchers.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include "shm/space.hpp"
#include "shm/support.hpp"

namespace deltasync::shm::testing {
namespace {

using ::testing::HasSubstr;

class FakeCgroup {
 public:
  void group(const std::string& relative, const std::string& max, std::uint64_t current, std::uint64_t inactive) {
    const auto dir = dir_.path() / relative;
    std::filesystem::create_directories(dir);
    std::ofstream(dir / "memory.max") << max << "\n";
    std::ofstream(dir / "memory.current") << current << "\n";
    std::ofstream(dir / "memory.stat") << "anon 5\nfile 7\ninactive_file " << inactive << "\nactive_file 3\n";
  }
  CgroupFiles files(std::string_view self) const {
    std::ofstream(dir_.path() / "self") << self;
    return {dir_.path(), dir_.path() / "self"};
  }
  std::optional<std::uint64_t> room(std::string_view self) const { return cgroup_room_bytes(dir_.path(), self); }

 private:
  TempDir dir_;
};

TEST(CgroupRoom, TheTightestGroupAboveCounts) {
  FakeCgroup cg;
  cg.group("a", "1000", 300, 0);
  cg.group("a/b", "max", 100, 0);
  cg.group("a/c", "500", 100, 0);
  EXPECT_EQ(cg.room("0::/a/b\n"), 700u);
  EXPECT_EQ(cg.room("0::/a/c\n"), 400u);
  EXPECT_EQ(cg.room("4:memory:/v1\n0::/a/c\n"), 400u);
}

TEST(CgroupRoom, PageCacheThatCanBeDroppedIsRoom) {
  FakeCgroup cg;
  cg.group("a", "1000", 900, 250);
  EXPECT_EQ(cg.room("0::/a\n"), 350u);
  cg.group("b", "1000", 1000, 5000);
  EXPECT_EQ(cg.room("0::/b\n"), 1000u);
  cg.group("c", "1000", 1200, 0);
  EXPECT_EQ(cg.room("0::/c\n"), 0u);
}

TEST(CgroupRoom, NoLimitIsNoAnswer) {
  FakeCgroup cg;
  cg.group("a", "max", 900, 250);
  EXPECT_EQ(cg.room("0::/a\n"), std::nullopt);
  EXPECT_EQ(cg.room("0::/not/there\n"), std::nullopt);
  EXPECT_EQ(cg.room("4:memory:/v1\n"), std::nullopt);
  EXPECT_EQ(cg.room(""), std::nullopt);
}

TEST(Space, MoreThanTheFileSystemHasIsRefusedWithBothFigures) {
  TempDir dir;
  const auto refused = check_room(dir.path(), std::uint64_t{1} << 60);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::no_space);
  EXPECT_THAT(refused.error().message(), HasSubstr("1073741824.00 GiB (1152921504606846976 bytes) are needed"));
  EXPECT_THAT(refused.error().message(), HasSubstr("free"));
  EXPECT_TRUE(check_room(dir.path(), 4096).ok());
  EXPECT_EQ(check_room(dir.path() / "no", 1).error().code(), Errc::not_found);
}

TEST(Space, AFullCgroupIsNamedWithBothFigures) {
  FakeCgroup cg;
  cg.group("a", "8388608", 4194304, 0);
  const CgroupFiles files = cg.files("0::/a\n");
  // /dev/shm is in memory, where the group's limit counts.
  EXPECT_TRUE(check_room("/dev/shm", 4194304, files).ok());
  const auto refused = check_room("/dev/shm", 4194305, files);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::no_space);
  EXPECT_THAT(refused.error().message(), HasSubstr("the memory cgroup has 4.00 MiB (4194304 bytes) left"));
  EXPECT_THAT(refused.error().message(), HasSubstr("(4194305 bytes)"));
}

TEST(Space, AReservationGoesOnWhereASignalInterruptedIt) {
  constexpr std::uint64_t kBytes = 3 * kReserveBytes + 5;
  std::uint64_t reserved = 0;
  int calls = 0;
  const int error = reserve_pages(kBytes, [&](std::uint64_t offset, std::uint64_t bytes) {
    EXPECT_EQ(offset, reserved) << "nothing is reserved twice, nothing left out";
    EXPECT_LE(bytes, kReserveBytes);
    if (++calls % 3 != 0) return EINTR;
    reserved += bytes;
    return 0;
  });
  EXPECT_EQ(error, 0);
  EXPECT_EQ(reserved, kBytes);
  EXPECT_EQ(calls, 12);
  EXPECT_EQ(reserve_pages(kBytes, [](std::uint64_t offset, std::uint64_t) { return offset == 0 ? 0 : ENOSPC; }),
            ENOSPC);
}

TEST(Space, AFullTmpfsIsAnErrorThatLeavesNothingBehind) {
  TempDir dir;
  // A mount namespace of our own, so that the mount goes with this process whatever happens.
  if (::unshare(CLONE_NEWNS) != 0) GTEST_SKIP() << "no permission for a mount namespace";
  ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  if (::mount("tmpfs", dir.path().c_str(), "tmpfs", 0, "size=8m") != 0) GTEST_SKIP() << "no permission to mount tmpfs";

  // Two halves of 1 MiB take 4 MiB, metadata 2 MiB: the first fits, the second does not.
  auto first = create({dir.path(), "first"});
  ASSERT_TRUE(first.ok()) << first.error().to_string();
  auto second = create({dir.path(), "second"});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code(), Errc::no_space);
  EXPECT_THAT(second.error().message(), HasSubstr("2.00 MiB"));
  EXPECT_THAT(second.error().message(), HasSubstr("6.00 MiB"));
  EXPECT_FALSE(std::filesystem::exists(dir.path() / "second"));
  // All pages are there: every byte of what was created can be written although the file system is nearly full.
  fill_half(**first, 0, 1);
  fill_half(**first, 1, 2);
  EXPECT_TRUE(half_is(**first, 0, 1) && half_is(**first, 1, 2));
  first.value().reset();
  ::umount(dir.path().c_str());
}

TEST(Space, AReservationThatFailsHalfwayLeavesNothingBehind) {
  TempDir dir;
  Child child([&](const Child::Turns&) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1u << 20, 1u << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    const auto refused = create({dir.path(), "s"});
    if (refused.ok() || refused.error().code() != Errc::io) return 2;
    if (refused.error().message().find("reserve 6.00 MiB") == std::string::npos) return 3;
    return std::filesystem::exists(dir.path() / "s") ? 4 : 0;
  });
  child.go();
  EXPECT_EQ(child.exit_code(), 0);
}

}  // namespace
}  // namespace deltasync::shm::testing
