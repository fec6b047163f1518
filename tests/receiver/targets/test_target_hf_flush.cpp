// What reaches the disk before a version is committed, and what a failed write-back does. This program's own fsync()
// notes each path that it is called for, and fails where it is told to.
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "tests/receiver/hf_case.hpp"

namespace {

struct Flush {
  std::string path;
  std::string current;  ///< where out/current led at that time
};
std::vector<Flush> flushes;
std::filesystem::path link_to_watch;
std::string fail_on;  ///< paths that contain this fail with EIO; empty: none

}  // namespace

extern "C" int fsync(int fd) {
  std::error_code error;
  const std::string path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error).string();
  flushes.push_back({path, std::filesystem::read_symlink(link_to_watch, error).string()});
  if (!fail_on.empty() && path.find(fail_on) != std::string::npos) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fsync, fd));
}

namespace deltasync::test {
namespace {
namespace fs = std::filesystem;

class HfFlush : public testing::Test {
 protected:
  void SetUp() override {
    link_to_watch = hf_.out() / "current";
    flushes.clear();
    fail_on.clear();
    ASSERT_TRUE(ok(hf_.restart()));
  }
  /// Flushed while out/current still led elsewhere (`before`), or after that.
  bool flushed(const std::string& ending, bool before) const {
    const std::string now = fs::read_symlink(link_to_watch).string();
    for (const Flush& f : flushes) {
      if (f.path.ends_with(ending) && (f.current != now) == before) return true;
    }
    return false;
  }
  void expect_all_flushed() {
    const std::string name = fs::read_symlink(link_to_watch).filename().string();
    for (const auto& file : hf_.sidecar().weights) EXPECT_TRUE(flushed("/" + file.name, true)) << file.name;
    for (const auto& file : hf_.sidecar().others) EXPECT_TRUE(flushed("/" + file.name, true)) << file.name;
    EXPECT_TRUE(flushed("/part two", true));
    EXPECT_TRUE(flushed("/" + name + ".json", true));
    EXPECT_TRUE(flushed("/versions", true));
    EXPECT_TRUE(flushed("/out", false));
    flushes.clear();
  }

  TempDir dir_;
  HfCase hf_{dir_.path() / "out"};
};

TEST_F(HfFlush, EverythingBeforeTheLinkAndThenTheLink) {
  ASSERT_TRUE(ok(hf_.full()));
  expect_all_flushed();
  for (int i = 0; i < 3; ++i) {  // written again, then patched
    ASSERT_TRUE(ok(hf_.delta()));
    expect_all_flushed();
  }
}

TEST_F(HfFlush, AFailedWriteBackFailsTheCommit) {
  ASSERT_TRUE(ok(hf_.full()));
  for (const char* where : {"model-00001", "vocab.txt", "part two", ".json", "/versions"}) {
    SCOPED_TRACE(where);
    fail_on = where;
    EXPECT_TRUE(fails(hf_.delta(), Errc::io, where));
    EXPECT_EQ(hf_.differs(), "");
    EXPECT_EQ(hf_.target().committed()->version, hf_.held().state.version);
    EXPECT_FALSE(hf_.has_incoming());
    fail_on.clear();
    ASSERT_TRUE(ok(hf_.delta()));
    EXPECT_EQ(hf_.differs(), "");
  }
}

TEST_F(HfFlush, NoneIfNotWanted) {
  hf_.close();
  flushes.clear();
  const auto target = make_hf_target(hf_.trainer().layout(), hf_.sidecar(), hf_.out(), {.flush = false});
  ASSERT_TRUE(target.ok());
  ThreadPool pool(2, "test");
  ASSERT_TRUE(ok((*target)->open(pool, in_time())));
  ASSERT_TRUE(ok(commit_whole(**target, hf_.trainer().now())));
  EXPECT_TRUE(flushes.empty());
}

}  // namespace
}  // namespace deltasync::test
