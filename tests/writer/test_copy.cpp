// Copies of every awkward alignment, size and stride against the obvious loop.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/support/model.hpp"
#include "writer/copy.hpp"

namespace deltasync {
namespace {

std::vector<std::byte> random_bytes(std::size_t n, std::uint64_t seed) {
  test::Random random(seed);
  std::vector<std::byte> out(n);
  for (auto& b : out) b = static_cast<std::byte>(random.next());
  return out;
}

TEST(CopyBytes, EveryAlignmentAndSizeAroundTheLimits) {
  const auto from = random_bytes(kStreamBytesMin + 40'000, 1);
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{63}, kStreamBytesMin - 1, kStreamBytesMin,
                                 kStreamBytesMin + 1, kStreamBytesMin + 16'384 + 65}) {
    for (const std::size_t to_at : {0u, 1u, 16u, 63u, 64u}) {
      for (const std::size_t from_at : {0u, 3u, 64u}) {
        std::vector<std::byte> to(size + 200, std::byte{0xee});
        copy_bytes(to.data() + to_at, from.data() + from_at, size);
        copy_fence();
        ASSERT_EQ(std::memcmp(to.data() + to_at, from.data() + from_at, size), 0) << size << " " << to_at;
        for (std::size_t i = 0; i < to_at; ++i) ASSERT_EQ(to[i], std::byte{0xee});
        for (std::size_t i = to_at + size; i < to.size(); ++i) ASSERT_EQ(to[i], std::byte{0xee}) << size << " " << i;
      }
    }
  }
}

struct Case {
  std::uint64_t rows;
  std::size_t row_bytes;
  std::size_t to_stride;
  std::size_t from_stride;
};

TEST(Copy, ShapesOnOneAndThreeThreads) {
  const Case cases[] = {
      {1, 1, 1, 1},
      {7, 5, 9, 11},
      {1, 5u << 20, 5u << 20, 5u << 20},               // one long row
      {3, (3u << 20) + 5, (3u << 20) + 64, 4u << 20},  // rows longer than a chunk, cut into parts
      {5000, 1000, 1000, 1000},                        // flat
      {5000, 1000, 1024, 1001},                        // strided
      {40, 200'000, 200'000, 300'000},
      {2'000'000, 2, 2, 6},
      {0, 8, 8, 8},
      {8, 0, 8, 8},
  };
  for (const unsigned threads : {1u, 3u}) {
    ThreadPool pool(threads, "copy");
    for (const Case& c : cases) {
      const auto from = random_bytes(c.rows * c.from_stride + 16, c.rows);
      std::vector<std::byte> to(c.rows * c.to_stride + 16, std::byte{0x5c});
      std::vector<std::byte> expected = to;
      for (std::uint64_t r = 0; r < c.rows; ++r) {
        std::memcpy(expected.data() + r * c.to_stride, from.data() + r * c.from_stride, c.row_bytes);
      }
      copy({to.data(), c.to_stride, from.data(), c.from_stride, c.rows, c.row_bytes}, pool);
      EXPECT_TRUE(to == expected) << c.rows << " x " << c.row_bytes << " on " << threads;
    }
  }
}

TEST(Copy, ManyJobsOfAllSizesOnOneAndThreeThreads) {
  test::Random random(5);
  const auto from = random_bytes(16u << 20, 6);
  for (const unsigned threads : {1u, 3u}) {
    ThreadPool pool(threads, "copy");
    std::vector<std::byte> to(from.size() + 64, std::byte{0x5c});
    std::vector<std::byte> expected = to;
    std::vector<CopyJob> jobs = {{nullptr, 0, nullptr, 0, 0, 0}, {to.data(), 0, nullptr, 0, 3, 0}};
    // Rows of a few bytes up to some that are split among threads, with gaps between them and between the jobs.
    for (std::size_t at = 0; at + 100 < from.size();) {
      const std::size_t row_bytes =
          random.below(40) == 0 ? 3'000'000 + random.below(1000) : 1 + random.below(random.below(4) == 0 ? 9000 : 600);
      const std::size_t stride = row_bytes + random.below(3) * 17;
      const std::uint64_t rows = row_bytes > 1'000'000 ? 1 : 1 + random.below(5);
      if (at + rows * stride > from.size()) break;
      jobs.push_back({to.data() + at, stride, from.data() + at, stride, rows, row_bytes});
      for (std::uint64_t r = 0; r < rows; ++r) {
        std::memcpy(expected.data() + at + r * stride, from.data() + at + r * stride, row_bytes);
      }
      at += rows * stride + random.below(70);
    }
    copy(jobs, pool);
    EXPECT_TRUE(to == expected) << jobs.size() << " jobs on " << threads;
    copy(std::span<const CopyJob>(), pool);
  }
}

}  // namespace
}  // namespace deltasync
