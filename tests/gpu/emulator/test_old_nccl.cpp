// A library of NCCL's name that has not all that is asked of it.
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <array>

#include "gpu/nccl.hpp"

namespace deltasync::gpu {
namespace {

TEST(OldNccl, IsNamed) {
  const std::array<std::int32_t, 2> ordinals{0, 1};
  const auto none = open_nccl_broadcast(ordinals);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Errc::unsupported);
  EXPECT_THAT(none.error().message(), testing::HasSubstr("libnccl.so.2 has no ncclCommAbort"));
}

}  // namespace
}  // namespace deltasync::gpu
