// Processes that read a version while others are committed: other processes that map a file, that only open it, that
// hold its directory, that come back to it by a handle.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>

#include "base/hash.hpp"
#include "receiver/targets/directory/file_lease.hpp"
#include "tests/receiver/hf_case.hpp"

namespace deltasync::test {
namespace {
namespace fs = std::filesystem;

constexpr int kUpdates = 30;

std::string hash_text(ByteSpan bytes) {
  return std::to_string(xxh3_64(bytes));
}

/// True if a write lease could be had here; else the test is skipped with the reason.
bool leases_work(const fs::path& directory) {
  const fs::path file = directory / "probe";
  std::ofstream(file) << "x";
  FileLeases leases;
  const auto state = FileLeases::acquire({file}, leases);
  return state.ok() && *state == FileLeaseState::held;
}

/// Touches a file so that the parent knows that the child is where it should be.
void report_ready(const fs::path& directory) {
  std::ofstream(directory / "ready") << "ready";
}
void await_ready(const fs::path& directory) {
  while (!fs::exists(directory / "ready")) usleep(1000);
  fs::remove(directory / "ready");
}

class HfReaders : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(ok(hf_.restart()));
    ASSERT_TRUE(ok(hf_.full()));
    ASSERT_TRUE(ok(hf_.delta()));
  }
  TempDir dir_;
  HfCase hf_{dir_.path() / "out", 5, two_tensors()};
};

TEST_F(HfReaders, AMappedFileNeverChanges) {
  const fs::path file = hf_.weight_file();
  const std::string hash = hash_text(hf_.weight_bytes(hf_.held()));
  Child reader([&](int stop) -> std::string {
    const int fd = ::open(file.c_str(), O_RDONLY);
    const std::size_t size = fs::file_size(file);
    const void* const at = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);  // the mapping alone must protect it
    report_ready(dir_.path());
    std::set<std::string> seen;
    bool stopping = false;
    do {
      stopping = wants_stop(stop, 0);  // once more after the last update
      seen.insert(hash_text({static_cast<const std::byte*>(at), size}));
    } while (!stopping);
    return seen.size() == 1 ? *seen.begin() : "saw " + std::to_string(seen.size()) + " contents";
  });
  await_ready(dir_.path());
  for (int i = 0; i < kUpdates; ++i) {
    ASSERT_TRUE(ok(hf_.delta(0.1)));
    ASSERT_EQ(hf_.differs(), "");
  }
  EXPECT_TRUE(fs::exists(file)) << "the version in use was removed";
  EXPECT_EQ(hf_.version_count(), 3u);  // the current one, the one before, the one in use
  EXPECT_EQ(reader.finish(), hash);
  ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_FALSE(fs::exists(file)) << "nobody uses it any more";
  EXPECT_EQ(hf_.version_count(), 2u);
}

TEST_F(HfReaders, AnOpenFileNeverChanges) {
  const fs::path file = hf_.weight_file(1);
  const std::string hash = hash_text(hf_.weight_bytes(hf_.held(), 1));
  Child reader([&](int stop) -> std::string {
    const int fd = ::open(file.c_str(), O_RDONLY);  // opened, not read yet
    report_ready(dir_.path());
    while (!wants_stop(stop, 1000)) {
    }
    std::vector<std::byte> bytes(1 << 20);
    const ssize_t n = read(fd, bytes.data(), bytes.size());
    return n < 0 ? "read failed" : hash_text(ByteSpan(bytes).first(static_cast<std::size_t>(n)));
  });
  await_ready(dir_.path());
  for (int i = 0; i < kUpdates; ++i) ASSERT_TRUE(ok(hf_.delta(0.1)));
  EXPECT_EQ(reader.finish(), hash);
  EXPECT_EQ(hf_.differs(), "");
}

TEST_F(HfReaders, AsManyVersionsStayAsAreAskedForThoughNobodyIsSeenReadingThem) {
  hf_.options().keep_before = 3;
  ASSERT_TRUE(ok(hf_.restart()));
  const fs::path file = hf_.weight_file();
  const std::vector<std::byte> bytes = hf_.weight_bytes(hf_.held());
  const auto is_as_it_was = [&] {
    std::ifstream in(file, std::ios::binary);
    const std::string now((std::istreambuf_iterator<char>(in)), {});
    return now == std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(ok(hf_.delta()));
    EXPECT_TRUE(is_as_it_was()) << i;
    if (i != 1) continue;
    ASSERT_TRUE(ok(hf_.restart()));
  }
  EXPECT_EQ(hf_.version_count(), 4u);
  ASSERT_TRUE(ok(hf_.delta()));
  EXPECT_EQ(hf_.version_count(), 4u);
  EXPECT_FALSE(fs::exists(file));
  EXPECT_EQ(hf_.differs(), "");

  hf_.options().keep_before = 0;
  EXPECT_TRUE(fails(hf_.restart(), Errc::invalid_argument, "keep_before"));
}

TEST_F(HfReaders, AVersionInUseSurvivesFullUpdatesAndItsOwnName) {
  const fs::path file = hf_.weight_file();
  const Reference held = hf_.held();
  const int fd = ::open(file.c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  for (const FullUpdatePolicy policy : {FullUpdatePolicy::stage, FullUpdatePolicy::in_place}) {
    ASSERT_TRUE(ok(hf_.full(policy)));  // the same version again, from scratch
    EXPECT_EQ(hf_.differs(), "");
    EXPECT_EQ(hf_.target().committed()->version, held.state.version);
  }
  std::vector<std::byte> bytes(1 << 20);
  const ssize_t n = read(fd, bytes.data(), bytes.size());
  ::close(fd);
  ASSERT_GT(n, 0);
  EXPECT_EQ(hash_text(ByteSpan(bytes).first(static_cast<std::size_t>(n))), hash_text(hf_.weight_bytes(held)));
}

TEST_F(HfReaders, AHeldDirectoryNeverShowsAnotherVersion) {
  // A reader that goes from file to file by the directory must not come from one version into another.
  const int dirfd = ::open(fs::canonical(hf_.out() / "current").c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_GE(dirfd, 0);
  const std::vector<std::byte> expected = hf_.weight_bytes(hf_.held());
  std::set<std::string> outcomes;
  for (int i = 0; i < 4; ++i) {
    const int fd = openat(dirfd, hf_.sidecar().weights[0].name.c_str(), O_RDONLY);
    if (fd < 0) {
      outcomes.insert(std::strerror(errno));
    } else {
      std::vector<std::byte> bytes(expected.size());
      const bool same = read(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()) && bytes == expected;
      outcomes.insert(same ? "same" : "another version");
      ::close(fd);
    }
    ASSERT_TRUE(ok(hf_.delta(0.1)));
  }
  ::close(dirfd);
  EXPECT_EQ(outcomes.count("another version"), 0u);
  EXPECT_EQ(outcomes.count("same"), 1u);
  EXPECT_EQ(outcomes.count("No such file or directory"), 1u) << "the version was not patched: this test proves nothing";
}

TEST_F(HfReaders, HandlesThatNoLeaseSeesGetWholeFiles) {
  if (!leases_work(dir_.path())) GTEST_SKIP() << "no write leases on the filesystem of " << dir_.path();
  // An O_PATH handle is no open file; reopening it reaches the inode wherever it was renamed to, in the middle of a
  // patch as well. What such a reader gets is some version's whole file, or an empty one: never a mixture.
  const fs::path current = hf_.weight_file();
  const fs::path previous =
      fs::canonical(hf_.out() / "versions" / "1a2b3c4d5e6f7788-1") / hf_.sidecar().weights[0].name;
  Child reader([&](int stop) -> std::string {
    std::array<int, 2> handles = {::open(current.c_str(), O_PATH), ::open(previous.c_str(), O_PATH)};
    report_ready(dir_.path());
    std::set<std::string> seen;
    std::vector<std::byte> bytes(1 << 20);
    for (std::uint64_t i = 0; !wants_stop(stop, 0); ++i) {
      const int fd = ::open(("/proc/self/fd/" + std::to_string(handles[i % 2])).c_str(), O_RDONLY);
      if (fd < 0) continue;
      const ssize_t n = read(fd, bytes.data(), bytes.size());
      ::close(fd);
      seen.insert(n <= 0 ? "empty" : hash_text(ByteSpan(bytes).first(static_cast<std::size_t>(n))));
    }
    std::string text;
    for (const std::string& hash : seen) text += hash + " ";
    return text;
  });
  await_ready(dir_.path());
  std::set<std::string> known = {"empty", hash_text(hf_.weight_bytes(hf_.held()))};
  known.insert(hash_text(read_file(previous)));
  for (int i = 0; i < 150; ++i) {
    ASSERT_TRUE(ok(hf_.delta(0.2)));
    ASSERT_EQ(hf_.differs(), "") << i;
    known.insert(hash_text(hf_.weight_bytes(hf_.held())));
  }
  std::istringstream seen(reader.finish());
  for (std::string hash; seen >> hash;) EXPECT_EQ(known.count(hash), 1u) << hash;
}

TEST_F(HfReaders, WhoComesInTheMiddleOfAPatchEndsIt) {
  if (!leases_work(dir_.path())) GTEST_SKIP() << "no write leases on the filesystem of " << dir_.path();
  // The reader has a handle that no lease sees, and opens the file when it has been moved to be patched. The copy is
  // then given up: the reader gets an empty file, the receiver writes its version again.
  HfCase big(dir_.path() / "big", 3, {{"w", Dtype::bf16, {16384, 1024}, {}, {}}});
  ASSERT_TRUE(ok(big.restart()));
  ASSERT_TRUE(ok(big.full()));
  bool emptied = false;
  for (int attempt = 0; attempt < 20 && !emptied; ++attempt) {
    const fs::path file = big.weight_file(1);
    ASSERT_TRUE(ok(big.delta(0.05)));
    Child reader([&](int stop) -> std::string {
      const std::string handle = "/proc/self/fd/" + std::to_string(::open(file.c_str(), O_PATH));
      report_ready(dir_.path());
      while (fs::read_symlink(handle).string().find(".incoming-") == std::string::npos) {
        if (wants_stop(stop, 0)) return "not patched";
      }
      const int fd = ::open(handle.c_str(), O_RDONLY);
      std::vector<std::byte> bytes(40u << 20);
      std::size_t size = 0;
      for (ssize_t n; (n = read(fd, bytes.data() + size, bytes.size() - size)) > 0;)
        size += static_cast<std::size_t>(n);
      return size == 0 ? "empty" : hash_text(ByteSpan(bytes).first(size));
    });
    await_ready(dir_.path());
    ASSERT_TRUE(ok(big.delta(0.05)));
    ASSERT_EQ(big.differs(), "");
    const std::string outcome = reader.finish();
    emptied = outcome == "empty";
    // Too late for the last look at the leases: then it has the whole new version.
    if (!emptied) {
      ASSERT_EQ(outcome, hash_text(big.weight_bytes(big.held(), 1)));
    }
    EXPECT_FALSE(big.has_incoming());
  }
  EXPECT_TRUE(emptied) << "nobody came in the middle of a patch: this test proves nothing";
}

// ---- leases alone --------------------------------------------------------------------------------------------------

class Leases : public testing::Test {
 protected:
  void SetUp() override {
    if (!leases_work(dir_.path())) GTEST_SKIP() << "no write leases on the filesystem of " << dir_.path();
    for (const fs::path& path : paths_) std::ofstream(path) << std::string(10000, 'x');
  }
  FileLeaseState acquire() {
    FileLeases leases;
    const auto state = FileLeases::acquire(paths_, leases);
    EXPECT_TRUE(state.ok());
    return state.ok() ? *state : FileLeaseState::unsupported;
  }
  TempDir dir_;
  std::vector<fs::path> paths_ = {dir_.path() / "a", dir_.path() / "b"};
};

TEST_F(Leases, AreRefusedWhileAFileIsOpenOrMapped) {
  EXPECT_EQ(acquire(), FileLeaseState::held);
  const int fd = ::open(paths_[1].c_str(), O_RDONLY);
  EXPECT_EQ(acquire(), FileLeaseState::in_use);
  void* const shared = mmap(nullptr, 10000, PROT_READ, MAP_SHARED, fd, 0);
  void* const own = mmap(nullptr, 10000, PROT_READ, MAP_PRIVATE, fd, 0);
  ::close(fd);
  EXPECT_EQ(acquire(), FileLeaseState::in_use);
  munmap(shared, 10000);
  EXPECT_EQ(acquire(), FileLeaseState::in_use);
  munmap(own, 10000);
  EXPECT_EQ(acquire(), FileLeaseState::held);
  Child child([&](int stop) -> std::string {
    const int file = ::open(paths_[0].c_str(), O_RDONLY);
    report_ready(dir_.path());
    while (!wants_stop(stop, 1000)) {
    }
    return file < 0 ? "not opened" : "";
  });
  await_ready(dir_.path());
  EXPECT_EQ(acquire(), FileLeaseState::in_use);
  EXPECT_EQ(child.finish(), "");
  EXPECT_EQ(acquire(), FileLeaseState::held);
}

TEST_F(Leases, TellWhoComesAndKeepHimWaiting) {
  FileLeases leases;
  ASSERT_EQ(*FileLeases::acquire(paths_, leases), FileLeaseState::held);
  EXPECT_TRUE(leases.unbroken());
  const fs::path opened = dir_.path() / "opened";
  Child child([&](int) -> std::string {
    const int fd = ::open(paths_[1].c_str(), O_RDONLY);
    std::ofstream(opened) << "x";
    char c = 0;
    return fd >= 0 && read(fd, &c, 1) == 1 ? std::string(1, c) : "failed";
  });
  while (leases.unbroken()) usleep(1000);  // the signal of the break would have ended this process
  EXPECT_FALSE(fs::exists(opened));
  ASSERT_EQ(pwrite(leases.fd(1), "y", 1, 0), 1);
  EXPECT_FALSE(fs::exists(opened));
  leases.release();
  EXPECT_EQ(child.finish(), "y");
}

TEST_F(Leases, AreNotForOverlaysAndLinks) {
  fs::create_symlink(paths_[0], dir_.path() / "link");
  FileLeases leases;
  EXPECT_FALSE(FileLeases::acquire({dir_.path() / "link"}, leases).ok());
  EXPECT_FALSE(FileLeases::acquire({dir_.path() / "missing"}, leases).ok());
  fs::create_hard_link(paths_[0], dir_.path() / "second name");
  EXPECT_EQ(acquire(), FileLeaseState::in_use);
  EXPECT_EQ(*FileLeases::acquire({"/proc/self/comm"}, leases), FileLeaseState::unsupported);
}

}  // namespace
}  // namespace deltasync::test
