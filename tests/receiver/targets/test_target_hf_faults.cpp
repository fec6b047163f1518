// The directory target on a full disk, on filesystems without leases, and killed at any moment.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstring>

#include "base/deadline.hpp"
#include "receiver/targets/directory/disk_room.hpp"
#include "tests/receiver/hf_case.hpp"

namespace deltasync::test {
namespace {
namespace fs = std::filesystem;

/// Runs in a process of its own; an empty string is success, "skip: …" a reason to skip.
void expect_in_child(const std::function<std::string()>& body) {
  Child child([&](int) { return body(); });
  const std::string result = child.finish();
  if (result.rfind("skip: ", 0) == 0) GTEST_SKIP() << result.substr(6);
  EXPECT_EQ(result, "");
}

#define CHECK_OK(expr)                                                            \
  do {                                                                            \
    const Status check_status = (expr);                                           \
    if (!check_status.ok()) return #expr ": " + check_status.error().to_string(); \
  } while (false)
#define CHECK_FAILS(expr, expected)                                                                      \
  do {                                                                                                   \
    const Status check_status = (expr);                                                                  \
    if (check_status.ok()) return #expr " succeeded";                                                    \
    if (check_status.error().code() != (expected)) return #expr ": " + check_status.error().to_string(); \
  } while (false)
#define CHECK_SAME(hf)                                                                           \
  do {                                                                                           \
    if (const std::string check_text = (hf).differs(); !check_text.empty()) return check_text;   \
    if (read_live((hf).target()) != (hf).held().half) return std::string("live memory differs"); \
    if ((hf).has_incoming()) return std::string("an incoming directory is left");                \
  } while (false)

std::uint64_t model_file_bytes(HfCase& hf) {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < 2; ++i) bytes += hf.weight_bytes(hf.trainer().now(), i).size();
  return bytes;
}

/// A private mount of `type` at `at`, in this process's own mount namespace. Empty if it worked.
std::string mount_here(const char* type, const fs::path& at, const std::string& options) {
  if (unshare(CLONE_NEWNS) != 0) return std::string("skip: no mount namespace: ") + std::strerror(errno);
  if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return "skip: mounts cannot be made private";
  if (mount(type, at.c_str(), type, 0, options.c_str()) != 0) {
    return std::string("skip: cannot mount ") + type + ": " + std::strerror(errno);
  }
  return {};
}

TEST(HfFaults, AFileSizeLimitIsNoSpace) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    std::signal(SIGXFSZ, SIG_IGN);
    HfCase hf(dir.path() / "out", 1, two_tensors());
    CHECK_OK(hf.restart());
    const rlimit small{100'000, RLIM_INFINITY};
    const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK_FAILS(hf.full(), Errc::no_space);
    if (hf.target().committed() != nullptr || hf.has_incoming()) return "something is left of the failed update";
    setrlimit(RLIMIT_FSIZE, &none);
    CHECK_OK(hf.full());
    CHECK_OK(hf.delta());
    CHECK_SAME(hf);
    setrlimit(RLIMIT_FSIZE, &small);
    CHECK_FAILS(hf.full(), Errc::no_space);
    CHECK_SAME(hf);
    CHECK_FAILS(hf.delta(), Errc::no_space);
    CHECK_SAME(hf);
    setrlimit(RLIMIT_FSIZE, &none);
    CHECK_OK(hf.delta());
    CHECK_SAME(hf);
    return {};
  });
}

constexpr std::uint64_t kMiB = 1u << 20;

TEST(DiskRoom, TheReserveStaysFree) {
  const DiskSpace space{100 * kMiB, 40 * kMiB};
  EXPECT_TRUE(ok(check_disk_room("/out", space, 30 * kMiB, 10 * kMiB)));
  EXPECT_TRUE(fails(check_disk_room("/out", space, 30 * kMiB + 1, 10 * kMiB), Errc::no_space));
  EXPECT_TRUE(fails(check_disk_room("/out", space, 1, 41 * kMiB), Errc::no_space));
  EXPECT_TRUE(fails(check_disk_room("/out", space, ~std::uint64_t{0}, 1), Errc::no_space));
  EXPECT_TRUE(ok(check_disk_room("/out", space, 35 * kMiB, std::nullopt))) << "5 % of it stay free";
  const Status refused = check_disk_room("/out", space, 36 * kMiB, std::nullopt);
  for (const char* part : {"/out: ", "36.0", "5.00", "40.0", "--disk-reserve-mib"}) {
    EXPECT_TRUE(fails(refused, Errc::no_space, part));
  }
  EXPECT_EQ(default_disk_reserve({kModelBytesMax, 0}), 1024 * kMiB) << "1 GiB at most";
}

TEST(HfFaults, AVersionThatWouldTakeOfTheReserveIsNotBegun) {
  TempDir dir;
  HfCase hf(dir.path() / "out", 1, two_tensors());
  ASSERT_TRUE(ok(hf.restart()));
  ASSERT_TRUE(ok(hf.full()));
  hf.options().disk_reserve_bytes = ~std::uint64_t{0};
  ASSERT_TRUE(ok(hf.restart()));
  EXPECT_TRUE(fails(hf.full(), Errc::no_space, "to stay free"));
  EXPECT_TRUE(fails(hf.delta(), Errc::no_space, "to stay free"));
  EXPECT_EQ(hf.differs(), "");
  EXPECT_FALSE(hf.has_incoming());
}

/// A stranger's layout says that it has 8 TiB: the disk, 64 MiB here, stays as it is.
TEST(HfFaults, AHugeLayoutTakesNothing) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    const std::string error = mount_here("tmpfs", dir.path(), "size=64m");
    if (!error.empty()) return error;
    const LayoutPtr layout = Layout::build({{"huge", Dtype::u8, {1u << 20, 8u << 20}, {}, {}}}).value();
    ThreadPool pool(1, "test");
    const auto target = make_hf_target(layout, make_sidecar(*layout), dir.path() / "out");
    if (!target.ok()) return target.error().to_string();
    CHECK_OK((*target)->open(pool, in_time()));
    const std::uint64_t before = disk_space(dir.path()).value().free_bytes;
    const Status begun = (*target)->begin_full(FullUpdatePolicy::stage, in_time());
    CHECK_FAILS(begun, Errc::no_space);
    if (begun.error().message().find("8192.00 GiB") == std::string::npos) return begun.error().to_string();
    if (disk_space(dir.path()).value().free_bytes != before) return "the disk has less room than before";
    return {};
  });
}

TEST(HfFaults, AFullDisk) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    HfCase hf(dir.path() / "out", 1, two_tensors());
    const std::uint64_t bytes = model_file_bytes(hf);
    // Room for one version and a half.
    const std::string error = mount_here("tmpfs", dir.path(), "size=" + std::to_string(bytes * 3 / 2));
    if (!error.empty()) return error;
    CHECK_OK(hf.restart());
    CHECK_OK(hf.full());
    CHECK_FAILS(hf.full(), Errc::no_space);
    CHECK_SAME(hf);
    CHECK_FAILS(hf.delta(), Errc::no_space);
    CHECK_SAME(hf);
    hf.trainer().step(0.5);
    CHECK_OK(hf.full(FullUpdatePolicy::in_place));
    CHECK_SAME(hf);
    CHECK_OK(hf.restart());
    CHECK_SAME(hf);
    return {};
  });
}

TEST(HfFaults, TwoVersionsAreEnoughRoom) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    HfCase hf(dir.path() / "out", 1, two_tensors());
    const std::string error =
        mount_here("tmpfs", dir.path(), "size=" + std::to_string(model_file_bytes(hf) * 5 / 2 + 64 * 4096));
    if (!error.empty()) return error;
    CHECK_OK(hf.restart());
    for (int i = 0; i < 3; ++i) {
      hf.trainer().step(0.5);
      CHECK_OK(hf.full());  // the version before the last is given up for it
      CHECK_SAME(hf);
      for (int k = 0; k < 3; ++k) CHECK_OK(hf.delta());
      CHECK_SAME(hf);
    }
    return {};
  });
}

TEST(HfFaults, RoomIsMadeAfterARestart) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    HfCase hf(dir.path() / "out", 1, two_tensors());
    const std::string error =
        mount_here("tmpfs", dir.path(), "size=" + std::to_string(model_file_bytes(hf) * 5 / 2 + 64 * 4096));
    if (!error.empty()) return error;
    CHECK_OK(hf.restart());
    CHECK_OK(hf.full());
    CHECK_OK(hf.delta());
    CHECK_OK(hf.restart());
    CHECK_OK(hf.delta());  // the version before the current one is of another process
    CHECK_SAME(hf);
    CHECK_OK(hf.restart());
    hf.trainer().step(0.5);
    CHECK_OK(hf.full());
    CHECK_SAME(hf);
    return {};
  });
}

TEST(HfFaults, AFullDiskKeepsTheServedVersionOfAnotherLayout) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    HfCase hf(dir.path() / "out", 1, two_tensors());
    HfCase other(dir.path() / "out", 2, {{"all.weight", Dtype::bf16, {1024, 278}, {}, {}}});
    const std::string error = mount_here("tmpfs", dir.path(), "size=" + std::to_string(model_file_bytes(hf) * 3 / 2));
    if (!error.empty()) return error;
    CHECK_OK(hf.restart());
    CHECK_OK(hf.full());
    hf.close();
    CHECK_OK(other.restart());
    CHECK_FAILS(other.full(), Errc::no_space);
    return hf.differs();
  });
}

TEST(HfFaults, RoomIsMadeOnceAReaderHasGone) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    HfCase hf(dir.path() / "out", 1, two_tensors());
    const std::string error =
        mount_here("tmpfs", dir.path(), "size=" + std::to_string(model_file_bytes(hf) * 5 / 2 + 64 * 4096));
    if (!error.empty()) return error;
    CHECK_OK(hf.restart());
    CHECK_OK(hf.full());
    UniqueFd reader(::open(hf.weight_file().c_str(), O_RDONLY));
    if (!reader) return "cannot open a weight file";
    CHECK_OK(hf.delta());
    CHECK_FAILS(hf.delta(), Errc::no_space);
    CHECK_SAME(hf);
    reader.reset();
    CHECK_OK(hf.delta());
    CHECK_SAME(hf);
    return {};
  });
}

TEST(HfFaults, AFilesystemThatCannotTell) {
  TempDir dir;
  expect_in_child([&]() -> std::string {
    for (const char* name : {"lower", "rest", "merged"}) fs::create_directories(dir.path() / name);
    // overlayfs wants an upper directory that is no overlay itself: a tmpfs serves everywhere.
    std::string error = mount_here("tmpfs", dir.path() / "rest", "size=64m");
    if (!error.empty()) return error;
    fs::create_directories(dir.path() / "rest" / "upper");
    fs::create_directories(dir.path() / "rest" / "work");
    error = mount_here("overlay", dir.path() / "merged",
                       "lowerdir=" + (dir.path() / "lower").string() +
                           ",upperdir=" + (dir.path() / "rest" / "upper").string() +
                           ",workdir=" + (dir.path() / "rest" / "work").string());
    if (!error.empty()) return error;
    HfCase hf(dir.path() / "merged" / "out", 1, two_tensors());
    CHECK_OK(hf.restart());
    CHECK_OK(hf.full());
    const std::vector<std::byte> expected = hf.weight_bytes(hf.held());
    const int fd = ::open(hf.weight_file().c_str(), O_RDONLY);
    void* const at = mmap(nullptr, expected.size(), PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    for (int i = 0; i < 5; ++i) {
      CHECK_OK(hf.delta());
      CHECK_SAME(hf);
      if (std::memcmp(at, expected.data(), expected.size()) != 0) return "a mapped file changed";
      if (hf.version_count() > 2) return "old versions pile up";
    }
    CHECK_OK(roll_back(hf.target()));
    return {};
  });
}

/// One process after another commits versions and is killed at a random moment; the next one finds a whole version, the
/// last that was committed or one later.
TEST(HfFaults, KilledAtAnyMoment) {
  TempDir dir;
  const fs::path out = dir.path() / "out";
  Random random(11);
  std::uint64_t resumed = 0;
  std::uint64_t killed_at_work = 0;
  for (int round = 0; round < 40; ++round) {
    std::array<int, 2> progress{};
    ASSERT_EQ(pipe2(progress.data(), O_CLOEXEC), 0);
    Child victim([&](int) -> std::string {
      HfCase hf(out, 3, two_tensors());
      CHECK_OK(hf.restart());
      if (const TargetState* state = hf.target().committed()) {
        while (hf.trainer().now().state.version.id < state->version.id) hf.trainer().step(0.1);
        hf.holds(hf.trainer().now());
        CHECK_SAME(hf);
        if (state->root != hf.held().state.root) return "resumed another content";
      } else {
        CHECK_OK(hf.full());
      }
      for (;;) {
        const std::uint64_t number = hf.held().state.version.id.number;
        if (write(progress[1], &number, sizeof number) != sizeof number) return "pipe";
        if (number % 7 == 0) {
          hf.trainer().step(0.1);
          CHECK_OK(hf.full());
        } else {
          CHECK_OK(hf.delta(0.1));
        }
      }
    });
    ::close(progress[1]);
    std::uint64_t committed = 0;
    if (read(progress[0], &committed, sizeof committed) != sizeof committed) {
      ::close(progress[0]);
      FAIL() << "round " << round << ": " << victim.finish();
    }
    // Every other one while it writes, however slow this build and machine are; the others at any moment.
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    while (round % 2 == 1 && !HfCase::has_incoming(out) && !deadline.passed()) usleep(100);
    usleep(static_cast<useconds_t>(random.below(round % 2 == 1 ? 1'000 : 30'000)));
    victim.kill_and_wait();
    for (std::uint64_t next; read(progress[0], &next, sizeof next) == sizeof next;) committed = next;
    ::close(progress[0]);

    HfCase hf(out, 3, two_tensors());
    killed_at_work += hf.has_incoming() ? 1 : 0;
    ASSERT_TRUE(ok(hf.restart()));
    const TargetState* state = hf.target().committed();
    ASSERT_NE(state, nullptr);
    EXPECT_GE(state->version.id.number, committed);
    EXPECT_LE(state->version.id.number, committed + 1);
    while (hf.trainer().now().state.version.id < state->version.id) hf.trainer().step(0.1);
    EXPECT_EQ(hf.differs(hf.trainer().now()), "");
    EXPECT_EQ(state->digests, hf.trainer().now().state.digests);
    EXPECT_FALSE(hf.has_incoming());
    ++resumed;
  }
  EXPECT_EQ(resumed, 40u);
  EXPECT_GT(killed_at_work, 0u) << "no process was killed while it wrote: this test proves nothing";
}

}  // namespace
}  // namespace deltasync::test
