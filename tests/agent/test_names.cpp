// The names of an agent's files: those that it removes are its own.
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/xattr.h>

#include <filesystem>

#include "shm/side_files.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

namespace fs = std::filesystem;

class Names : public AgentTest {
 protected:
  bool there(const std::string& name) const { return fs::exists(dir_.path() / name); }
  std::size_t kept_deltas() const { return shm::find_side_files({dir_.path(), "test.g1"}).size(); }
};

TEST_F(Names, AnEndThatIsNotWaitedForRemovesThem) {
  start_agent();
  for (int i = 0; i < 2; ++i) next_version();
  EXPECT_TRUE(eventually([&] { return kept_deltas() == 1; }));
  Agent::abandon(options_, agent_->core().files().names());
  EXPECT_TRUE(there("test.g1")) << "only where that is asked for";
  options_.remove_segment_on_exit = true;
  Agent::abandon(options_, agent_->core().files().names());
  EXPECT_FALSE(there("test.g1") || there("test.lock"));
  EXPECT_EQ(kept_deltas(), 0u);
}

/// A cleaner took the names away, and another agent of the name has started.
TEST_F(Names, ItLeavesThoseThatAreAnothers) {
  options_.remove_segment_on_exit = true;
  start_agent();
  next_version();
  for (const char* name : {"test.g1", "test.lock"}) fs::remove(dir_.path() / name);
  for (const char* name : {"test.g1", "test.lock", "test.g1.d1", "test.g2"}) dir_.write(name, "another's");
  Agent::abandon(options_, agent_->core().files().names());
  for (const char* name : {"test.g1", "test.lock", "test.g1.d1", "test.g2"}) EXPECT_TRUE(there(name)) << name;
}

/// The process that removed the segment ended before it came to them.
TEST_F(Names, AStartRemovesKeptDeltasWithoutASegment) {
  for (const char* name : {"test.g7.d1", "test.g7.d22", "test.g7.dx", "other.g7.d1"}) dir_.write(name, "left");
  start_agent();
  EXPECT_FALSE(there("test.g7.d1") || there("test.g7.d22"));
  EXPECT_TRUE(there("test.g7.dx") && there("other.g7.d1"));
}

// ---- after a boot of the machine: on a disk, pages of the served version may never have been written back ----------

class Boots : public Names {
 protected:
  bool in_memory(const fs::path& dir) const {
    struct statfs kind {};
    return ::statfs(dir.c_str(), &kind) == 0 && kind.f_type == TMPFS_MAGIC;
  }
  /// Segments there bear the boot that made them, and it counts.
  bool is_marked() const {
    return !in_memory(dir_.path()) && ::setxattr(dir_.path().c_str(), "user.deltasync.test", "1", 1, 0) == 0;
  }
  /// An agent serves a version and ends; `then` happens to the segment, and the next agent starts.
  template <class F>
  void restart(const F& then) {
    start_agent();
    next_version();
    writer_.reset();
    stop_agent();
    then((options_.core.shm_dir / "test.g1").string());
    start_agent();
  }
  void expect_served() {
    EXPECT_TRUE(eventually([&] { return served() != nullptr; }));
  }
  void expect_not_served() {
    EXPECT_TRUE(agent_->core().versions().generations().empty());
    EXPECT_FALSE(there("test.g1"));
    next_version();
    EXPECT_TRUE(there("test.g2"));
    EXPECT_EQ(served()->version.id.number, 2u);
  }
  static void mark(const std::string& file, const std::string& boot) {
    ASSERT_EQ(::setxattr(file.c_str(), "user.deltasync.boot_id", boot.data(), boot.size(), 0), 0);
  }
};

TEST_F(Boots, ASegmentOfThisBootIsServedAgain) {
  if (!in_memory(dir_.path()) && !is_marked()) GTEST_SKIP() << dir_.path() << ": its file system keeps no attributes";
  restart([](const std::string&) {});
  expect_served();
}

TEST_F(Boots, ASegmentOfAnotherBootIsNot) {
  if (!is_marked()) GTEST_SKIP() << dir_.path() << " is in memory, or its file system keeps no attributes";
  restart([](const std::string& file) { mark(file, "0e8ac3f0-5b0b-4b4b-9f0e-000000000000\n"); });
  expect_not_served();
}

/// Of an earlier release, or where the file system keeps no attributes.
TEST_F(Boots, ASegmentOfWhoKnowsWhichBootIsNot) {
  if (!is_marked()) GTEST_SKIP() << dir_.path() << " is in memory, or its file system keeps no attributes";
  restart([](const std::string& file) { ASSERT_EQ(::removexattr(file.c_str(), "user.deltasync.boot_id"), 0); });
  expect_not_served();
}

TEST_F(Boots, WhatLivesInMemoryIsOfThisBootWhateverItSays) {
  if (!in_memory("/dev/shm")) GTEST_SKIP() << "/dev/shm is not in memory";
  const test::TempDir memory("/dev/shm");
  options_.core.shm_dir = memory.path();
  restart([](const std::string& file) { ::removexattr(file.c_str(), "user.deltasync.boot_id"); });
  expect_served();
  stop_agent();
}

}  // namespace
}  // namespace deltasync::agent
