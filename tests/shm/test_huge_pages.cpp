// Segments in memory are of huge pages from the start, where the system has any.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "shm/huge_pages.hpp"
#include "shm/support.hpp"

namespace deltasync::shm::testing {
namespace {

/// How many kB of the mapping around `address` are mapped by huge pages, as smaps says.
std::uint64_t huge_kib_at(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool here = false;
  while (std::getline(smaps, line)) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) here = begin <= at && at < end;
    if (here && line.rfind("ShmemPmdMapped:", 0) == 0) return std::stoull(line.substr(line.find(':') + 1));
  }
  return 0;
}

bool can_collapse() {
  constexpr std::size_t kBytes = std::size_t{2} << 20;
  void* const at = ::mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return false;
  auto* const first = static_cast<std::byte*>(at);
  auto* const aligned = first + (kBytes - reinterpret_cast<std::uintptr_t>(first) % kBytes) % kBytes;
  *aligned = std::byte{1};
  const bool can = ::madvise(aligned, kBytes, 25 /* MADV_COLLAPSE */) == 0;
  ::munmap(at, 2 * kBytes);
  return can;
}

TEST(HugePages, OneIsTriedWhereSegmentsWillBe) {
  EXPECT_EQ(try_huge_page("/dev/shm/no-such-directory").error().code(), Errc::not_found);
  EXPECT_EQ(try_huge_page("/proc").ok(), false);
  const Status tried = try_huge_page("/dev/shm");
  if (!can_collapse()) GTEST_SKIP() << "the system makes no huge pages by MADV_COLLAPSE";
  EXPECT_TRUE(tried.ok()) << tried.error().to_string();
}

TEST(SegmentInShm, LargeSegmentsAreOfHugePagesFromTheStart) {
  constexpr int kTries = 5;  // the system may be short of huge pages for a moment
  std::uint64_t huge_kib = 0;
  for (int i = 0; i < kTries && huge_kib < std::uint64_t{90} << 10; ++i) {
    const SegmentPath path{"/dev/shm", "deltasync-huge-" + std::to_string(::getpid())};
    (void)Segment::unlink(path);
    auto made = create(path, std::uint64_t{48} << 20);  // both halves together are above the least size
    if (!made.ok() && made.error().code() == Errc::no_space) GTEST_SKIP() << made.error().to_string();
    ASSERT_TRUE(made.ok()) << made.error().to_string();
    ASSERT_TRUE(Segment::unlink(path).ok());
    for (const unsigned half : {0U, 1U}) EXPECT_TRUE(half_is(**made, half, 0));
    fill_half(**made, 0, 7);
    EXPECT_TRUE(half_is(**made, 0, 7));
    EXPECT_TRUE(half_is(**made, 1, 0));
    huge_kib = huge_kib_at(&(*made)->control());
  }
  if (!can_collapse()) GTEST_SKIP() << "the system makes no huge pages by MADV_COLLAPSE";
  EXPECT_GE(huge_kib, std::uint64_t{90} << 10) << "of 98 MiB";
}

}  // namespace
}  // namespace deltasync::shm::testing
