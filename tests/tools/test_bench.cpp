#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <vector>

#include "bench/limits.hpp"
#include "bench/whole_file.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::bench {
namespace {

// With the pages shared, the parent's next write to each would copy it: a limit measured so would be none.
TEST(Buffer, IsNotInAForkedChild) {
  ThreadPool pool(2, "test");
  auto buffer = Buffer::allocate(8u << 20, pool);
  ASSERT_TRUE(buffer.ok());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool there = ::msync(buffer->span().data(), 4096, MS_ASYNC) == 0 || errno != ENOMEM;
    ::_exit(there ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(CopyOnce, CopiesEveryByteWhateverTheSize) {
  ThreadPool pool(3, "test");
  for (const std::uint64_t bytes : {1u, 4095u, 12'289u, (4u << 20) + 1u, (12u << 20) + 77u}) {
    std::vector<std::byte> from(bytes);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 31 + i / 256);
    std::vector<std::byte> to(bytes);
    EXPECT_GT(copy_once(to, from, pool), 0);
    EXPECT_EQ(to, from) << bytes;
  }
}

TEST(WholeFile, IsReadAsItWasWrittenAndByItsLayoutOnly) {
  ThreadPool pool(2, "test");
  const test::TempDir directory;
  // Larger than a piece, smaller, and of a size that no half packs tightly.
  const auto layout = Layout::build({{.name = "a", .shape = {3000, 2000}}, {.name = "b", .shape = {7}}});
  const auto other = Layout::build({{.name = "a", .shape = {3000, 2000}}, {.name = "c", .shape = {7}}});
  ASSERT_TRUE(layout.ok() && other.ok());
  const Layout& ours = **layout;
  std::vector<std::byte> half(ours.half_bytes());
  for (const Tensor& tensor : ours.tensors()) {
    for (std::size_t i = 0; i < tensor.bytes; ++i) half[tensor.offset + i] = static_cast<std::byte>(i * 31 + i / 256);
  }
  const auto file = WholeFile::save(ours, half, directory.path(), pool);
  ASSERT_TRUE(file.ok()) << file.error().message();
  EXPECT_TRUE(std::filesystem::is_empty(directory.path()));
  EXPECT_GT(file->bytes(), ours.model_bytes());
  std::vector<std::byte> read(half.size());
  ASSERT_TRUE(file->load(ours, read, pool).ok());
  EXPECT_EQ(read, half);
  const Status refused = file->load(**other, read, pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Errc::corrupt);
}

}  // namespace
}  // namespace deltasync::bench
