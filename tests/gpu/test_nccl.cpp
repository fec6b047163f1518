// NCCL's broadcast where the machine has it and two devices; else that its absence is an error which names what is
// missing.
#include "gpu/nccl.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/deadline.hpp"
#include "gpu/cuda_device.hpp"
#include "tests/gpu/work.hpp"

namespace deltasync::gpu {
namespace {

using testing::HasSubstr;

TEST(NcclBroadcast, BringsOneDevicesBytesToTheOtherOrSaysWhyNot) {
  const std::array<std::int32_t, 2> ordinals{0, 1};
  auto broadcast = open_nccl_broadcast(ordinals);
  const auto count = cuda_device_count();
  const bool may_fail = !count.ok() || *count < 2;
  if (!broadcast.ok()) {
    if (broadcast.error().code() == Errc::unsupported) {
      EXPECT_THAT(broadcast.error().message(), HasSubstr("libnccl.so.2"));
    } else {
      EXPECT_TRUE(may_fail) << broadcast.error().to_string();
      EXPECT_EQ(broadcast.error().code(), Errc::io);
      EXPECT_THAT(broadcast.error().message(), HasSubstr("ncclCommInitAll: "));
    }
    return;
  }
  if (!count.ok()) return;  // the library found devices that this build does not use
  const auto first = open_cuda_device(0, Use::copies);
  const auto second = open_cuda_device(1, Use::copies);
  ASSERT_TRUE(first.ok() && second.ok());
  test::Work on_first(**first);
  test::Work on_second(**second);
  std::vector<std::uint32_t> sent(100'001);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::uint32_t>(i * 2654435761u);
  std::uint32_t* const from = on_first.up(sent);
  std::uint32_t* const to = on_second.up(std::vector<std::uint32_t>(sent.size()));
  const std::array<std::byte*, 2> memories{reinterpret_cast<std::byte*>(from), reinterpret_cast<std::byte*>(to)};
  const std::array<Stream*, 2> streams{&on_first.stream(), &on_second.stream()};
  const Status put = (*broadcast)->run(memories, sent.size() * sizeof(std::uint32_t), streams);
  ASSERT_TRUE(put.ok()) << put.error().to_string();
  const auto arrived = (*second)->make_event();
  ASSERT_TRUE(arrived.ok());
  test::Work::check(on_second.stream().record(**arrived));
  const Status came = wait(**arrived, Deadline::after(std::chrono::minutes(1)), "a broadcast");
  if (!came.ok()) broadcast->reset();  // before memory is given back, which would wait for it
  ASSERT_TRUE(came.ok()) << came.error().to_string();
  EXPECT_EQ(on_second.down(to, sent.size()), sent);
  EXPECT_EQ(on_first.down(from, sent.size()), sent);
}

}  // namespace
}  // namespace deltasync::gpu
