#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "bench/limits.hpp"

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

}  // namespace
}  // namespace deltasync::bench
