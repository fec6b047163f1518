// Copies of every awkward alignment, size and stride against the obvious loop.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
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

TEST(CopyForms, EveryAlignmentAndSizeInEachForm) {
  const auto from = random_bytes(100'000, 1);
  for (const CopyForm& form : copy_forms()) {
    for (const std::size_t size : {0u, 1u, 63u, 64u, 4095u, 16'384u, 16'385u, 65'536u + 65, 81'920u}) {
      for (const std::size_t to_at : {0u, 1u, 16u, 63u, 64u}) {
        for (const std::size_t from_at : {0u, 3u, 64u}) {
          std::vector<std::byte> to(size + 200, std::byte{0xee});
          copy_in_form(form, to.data() + to_at, from.data() + from_at, size);
          ASSERT_EQ(std::memcmp(to.data() + to_at, from.data() + from_at, size), 0) << form.name << " " << size;
          for (std::size_t i = 0; i < to_at; ++i) ASSERT_EQ(to[i], std::byte{0xee}) << form.name;
          for (std::size_t i = to_at + size; i < to.size(); ++i) ASSERT_EQ(to[i], std::byte{0xee}) << form.name;
        }
      }
    }
  }
}

TEST(CopyForms, TheFirstIsMemcpyAndNamesDiffer) {
  EXPECT_STREQ(copy_forms()[kMemcpyForm].name, "memcpy");
  std::set<std::string> names;
  for (const CopyForm& form : copy_forms()) names.insert(form.name);
  EXPECT_EQ(names.size(), copy_forms().size());
}

/// Pieces are copied in all forms meanwhile, by all threads, and are right. `jobs` have the bytes of `to`.
void expect_choice_once_steady(const std::vector<std::byte>& from, std::vector<std::byte>& to,
                               const std::vector<CopyJob>& jobs) {
  Copier copier(2, "copy");
  const auto copy_all = [&] {
    std::fill(to.begin(), to.end(), std::byte{0});
    copier.copy(jobs);
    return to == from;
  };
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(copy_all());
  EXPECT_FALSE(copier.form().chosen);
  EXPECT_STREQ(copier.form().name, copy_forms()[kUsualForm].name);
  copier.set_steady(true);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(copy_all());  // 8 pieces each
  EXPECT_TRUE(copier.form().chosen);
  ASSERT_TRUE(copy_all());
}

TEST(Copier, ChoosesOnceItsCopiesAreSteady) {
  const auto from = random_bytes(8u << 20, 2);
  std::vector<std::byte> to(from.size());
  expect_choice_once_steady(from, to, {{to.data(), to.size(), from.data(), from.size(), 1, from.size()}});
}

TEST(Copier, ChoosesForManySmallJobsToo) {
  constexpr std::size_t kBytes = 1024;
  const auto from = random_bytes(8u << 20, 2);
  std::vector<std::byte> to(from.size());
  std::vector<CopyJob> jobs;
  for (std::size_t at = 0; at < from.size(); at += kBytes) {
    jobs.push_back({to.data() + at, kBytes, from.data() + at, kBytes, 1, kBytes});
  }
  expect_choice_once_steady(from, to, jobs);
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
    Copier copier(threads, "copy");
    for (const Case& c : cases) {
      const auto from = random_bytes(c.rows * c.from_stride + 16, c.rows);
      std::vector<std::byte> to(c.rows * c.to_stride + 16, std::byte{0x5c});
      std::vector<std::byte> expected = to;
      for (std::uint64_t r = 0; r < c.rows; ++r) {
        std::memcpy(expected.data() + r * c.to_stride, from.data() + r * c.from_stride, c.row_bytes);
      }
      const CopyJob job{to.data(), c.to_stride, from.data(), c.from_stride, c.rows, c.row_bytes};
      copier.copy({&job, 1});
      EXPECT_TRUE(to == expected) << c.rows << " x " << c.row_bytes << " on " << threads;
    }
  }
}

TEST(Copy, ManyJobsOfAllSizesOnOneAndThreeThreads) {
  test::Random random(5);
  const auto from = random_bytes(16u << 20, 6);
  for (const unsigned threads : {1u, 3u}) {
    Copier copier(threads, "copy");
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
    copier.copy(jobs);
    EXPECT_TRUE(to == expected) << jobs.size() << " jobs on " << threads;
    copier.copy(std::span<const CopyJob>());
  }
}

TEST(Copy, TransposedSourcesOnOneAndThreeThreads) {
  struct Shape {
    std::uint64_t rows;
    std::size_t cols;
  };
  // One element, edges of tiles, what several threads share: in bands of rows, and in parts of them.
  const Shape shapes[] = {{1, 1}, {3, 200}, {64, 64}, {65, 129}, {700, 900}, {3, 300'000}, {300'000, 3}};
  for (const unsigned threads : {1u, 3u}) {
    Copier copier(threads, "copy");
    for (const std::size_t width : {1u, 2u, 4u, 8u}) {
      for (const auto& [rows, cols] : shapes) {
        if (width < 4 && rows * cols > 500'000) continue;  // as fast, and no other code
        for (const bool by_columns : {true, false}) {
          // Elements with gaps between them, columns first or rows first.
          const std::size_t near = width + 1;
          const std::size_t far = (by_columns ? static_cast<std::size_t>(rows) : cols) * near + 3;
          const std::size_t from_stride = by_columns ? near : far;
          const std::size_t from_col_stride = by_columns ? far : near;
          const std::size_t to_stride = cols * width + 5;
          const auto from = random_bytes(rows * from_stride + cols * from_col_stride + 16, rows);
          std::vector<std::byte> to(rows * to_stride + 16, std::byte{0x5c});
          std::vector<std::byte> expected = to;
          for (std::uint64_t r = 0; r < rows; ++r) {
            for (std::size_t c = 0; c < cols; ++c) {
              std::memcpy(expected.data() + r * to_stride + c * width,
                          from.data() + r * from_stride + c * from_col_stride, width);
            }
          }
          const CopyJob job{to.data(), to_stride, from.data(), from_stride, rows, cols * width, from_col_stride, width};
          copier.copy({&job, 1});
          ASSERT_TRUE(to == expected) << rows << " x " << cols << " of " << width << " on " << threads;
        }
      }
    }
  }
}

}  // namespace
}  // namespace deltasync
