// Host memory that is registered in parts.
#include "gpu/registered_host.hpp"

#include <gmock/gmock-matchers.h>
#include <sys/mman.h>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "gpu/fake_device.hpp"

namespace deltasync::test {
namespace {

using gpu::FakeDevice;
using gpu::RegisteredHost;
using testing::ElementsAre;
using testing::Pair;

class Registered : public testing::Test {
 protected:
  static constexpr std::uint64_t kPart = 8192;
  static constexpr std::uint64_t kBytes = 3 * kPart - 100;

  Registered()
      : data_(static_cast<std::byte*>(
            ::mmap(nullptr, 3 * kPart, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Registered() override { ::munmap(data_, 3 * kPart); }
  Result<RegisteredHost> make(const std::optional<CallContext>& until = {}) {
    return RegisteredHost::make(device_, data_, kBytes, {}, kPart, until);
  }

  FakeDevice device_{{}};
  std::byte* const data_;
};

TEST_F(Registered, NoPieceCrossesFromOnePartToTheNext) {
  const auto made = make();
  ASSERT_TRUE(made.ok()) << made.error().to_string();
  EXPECT_EQ(device_.counts().registered_bytes, kBytes);
  std::vector<std::pair<std::int64_t, std::uint64_t>> pieces;
  const auto take = [&](const std::byte* at, std::uint64_t bytes) {
    pieces.emplace_back(at - data_, bytes);
    return Status();
  };
  ASSERT_TRUE(made->each_piece(data_ + 100, 0, take).ok());
  EXPECT_TRUE(pieces.empty());
  ASSERT_TRUE(made->each_piece(data_ + 100, kPart - 100, take).ok());
  EXPECT_THAT(pieces, ElementsAre(Pair(100, kPart - 100)));
  pieces.clear();
  ASSERT_TRUE(made->each_piece(data_ + kPart - 1, kPart + 2, take).ok());
  EXPECT_THAT(pieces, ElementsAre(Pair(kPart - 1, 1), Pair(kPart, kPart), Pair(2 * kPart, 1)));
  EXPECT_TRUE(made->in_one_part(data_ + kPart, kPart));
  EXPECT_FALSE(made->in_one_part(data_ + kPart - 1, 2));
  EXPECT_TRUE(made->in_one_part(data_ + kPart - 1, 0));
}

TEST_F(Registered, APieceThatFailsIsTheLast) {
  const auto made = make();
  int calls = 0;
  const Status status = made->each_piece(data_, kBytes, [&](std::byte*, std::uint64_t) -> Status {
    if (++calls == 2) return Error(Errc::io, "as a test wants it");
    return {};
  });
  EXPECT_EQ(status.error().code(), Errc::io);
  EXPECT_EQ(calls, 2);
}

TEST_F(Registered, AllOfItOrNothing) {
  for (const std::uint64_t n : {1, 2, 3}) {
    device_.fail(FakeDevice::Call::register_host, n);
    EXPECT_EQ(make().error().code(), Errc::no_space);
    EXPECT_EQ(device_.counts().registered_bytes, 0u);
  }
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(make(CallContext(Deadline::after(std::chrono::minutes(1)), stop.get_token())).error().code(),
            Errc::cancelled);
  EXPECT_EQ(device_.counts().registered_bytes, 0u);
}

}  // namespace
}  // namespace deltasync::test
