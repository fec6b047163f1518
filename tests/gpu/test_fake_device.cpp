// The tests' device does what it says: it faults, delays, reorders and fails. Otherwise what passes on it proves
// little.
#include "gpu/fake_device.hpp"

#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <set>
#include <string>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "gpu/cuda_device.hpp"
#include "tests/gpu/work.hpp"

namespace deltasync::test {
namespace {

using gpu::FakeDevice;
using testing::HasSubstr;

FakeDevice::Options seeded(std::uint64_t seed) {
  FakeDevice::Options options;
  options.seed = seed;
  return options;
}

Deadline soon() {
  return Deadline::after(std::chrono::minutes(1));
}

TEST(FakeDevice, ItsMemoryIsNotTheHosts) {
  FakeDevice device(seeded(1));
  const gpu::Memory memory = *device.allocate(1000);
  EXPECT_DEATH(memory.data()[3] = std::byte{1}, "");
  EXPECT_DEATH(std::exit(static_cast<int>(*static_cast<volatile std::byte*>(memory.data()))), "");
  Work work(device);
  work.to(memory.data(), std::vector<std::byte>(1000, std::byte{7}));
  EXPECT_EQ(work.down(memory.data(), 1000), std::vector<std::byte>(1000, std::byte{7}));
  EXPECT_DEATH(memory.data()[3] = std::byte{1}, "");  // nor after it was used
}

TEST(FakeDevice, CopiesHappenLater) {
  std::set<std::byte> copied;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    FakeDevice device(seeded(seed));
    const gpu::Memory memory = *device.allocate(64);
    const gpu::Memory pinned = *device.pin(64);
    const auto stream = *device.make_stream();
    const auto event = *device.make_event();
    std::memset(pinned.data(), 1, 64);
    ASSERT_TRUE(stream->copy_in(memory.data(), pinned.data(), 64).ok());
    ASSERT_TRUE(stream->record(*event).ok());
    const bool wait_first = seed % 2 == 0;
    if (wait_first) {
      ASSERT_TRUE(gpu::wait(*event, soon(), "a copy").ok());
    }
    std::memset(pinned.data(), 2, 64);
    ASSERT_TRUE(gpu::wait(*event, soon(), "a copy").ok());
    std::byte first{};
    device.peek(memory.data(), &first, 1);
    if (wait_first) {
      EXPECT_EQ(first, std::byte{1}) << device.name();
    } else {
      copied.insert(first);
    }
  }
  EXPECT_EQ(copied, (std::set<std::byte>{std::byte{1}, std::byte{2}}));
}

TEST(FakeDevice, OnlyEventsOrderStreams) {
  std::set<std::string> orders;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    for (const bool ordered : {false, true}) {
      FakeDevice device(seeded(seed));
      const auto first = device.engine_stream();
      const auto second = device.engine_stream();
      const auto a = *device.adopt_stream(first);
      const auto b = *device.adopt_stream(second);
      const auto event = *device.make_event();
      std::string order;
      device.engine_work(first, [&] { order += '1'; });
      device.engine_work(first, [&] { order += '2'; });
      ASSERT_TRUE(a->record(*event).ok());
      if (ordered) {
        ASSERT_TRUE(b->wait_for(*event).ok());
      }
      device.engine_work(second, [&] { order += '3'; });
      EXPECT_TRUE(device.drain());
      EXPECT_LT(order.find('1'), order.find('2')) << device.name();
      if (!ordered) {
        orders.insert(order);
        continue;
      }
      EXPECT_EQ(order, "123") << device.name();
    }
  }
  EXPECT_EQ(orders, (std::set<std::string>{"123", "132", "312"}));
}

TEST(FakeDevice, WhatARealDeviceCannotReachIsRefused) {
  FakeDevice device(seeded(1));
  FakeDevice other(seeded(2));
  const gpu::Memory memory = *device.allocate(64);
  const gpu::Memory foreign = *other.allocate(64);
  const gpu::Memory pinned = *device.pin(64);
  const auto stream = *device.make_stream();
  std::array<std::byte, 64> pageable{};
  const auto refused = [](const Status& status) { return !status.ok() && status.error().code() == Errc::internal; };
  EXPECT_TRUE(refused(stream->copy_in(memory.data(), pageable.data(), 64)));
  EXPECT_TRUE(refused(stream->copy_in(memory.data(), pinned.data(), 65)));
  EXPECT_TRUE(refused(stream->copy_in(memory.data() + 1, pinned.data(), 64)));
  EXPECT_TRUE(refused(stream->copy_out(pinned.data(), foreign.data(), 64)));
  EXPECT_TRUE(refused(stream->copy_in(pinned.data(), pinned.data(), 64)));
  EXPECT_TRUE(refused(stream->zero(foreign.data(), 64)));
  auto* const words = reinterpret_cast<std::uint64_t*>(memory.data());
  gpu::DigestTiles kernel;
  kernel.table = {reinterpret_cast<const placement::WordTile*>(memory.data()),
                  reinterpret_cast<const placement::WordRegion*>(pageable.data())};
  kernel.tiles = reinterpret_cast<const gpu::StagedTile*>(memory.data());
  kernel.sums = words;
  kernel.count = kernel.blocks_per_tile = 1;
  EXPECT_TRUE(refused(stream->launch(kernel)));
}

TEST(FakeDevice, FailsWhenATestSaysSo) {
  FakeDevice device(seeded(3));
  device.fail(FakeDevice::Call::allocate, 2);
  const gpu::Memory memory = *device.allocate(64);
  const auto none = device.allocate(64);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Errc::no_space);
  EXPECT_THAT(none.error().message(), HasSubstr("cuda:0 (fake, seed 3): allocate 64 bytes"));
  EXPECT_TRUE(device.allocate(64).ok());
  EXPECT_EQ(device.allocate(std::uint64_t{1} << 40).error().code(), Errc::no_space);
  EXPECT_EQ(device.pin(std::uint64_t{1} << 40).error().code(), Errc::no_space);
  device.fail(FakeDevice::Call::copy, 1);
  const gpu::Memory pinned = *device.pin(64);
  const auto stream = *device.make_stream();
  const Status copied = stream->copy_in(memory.data(), pinned.data(), 64);
  ASSERT_FALSE(copied.ok());
  EXPECT_EQ(copied.error().code(), Errc::io);
  EXPECT_TRUE(stream->copy_in(memory.data(), pinned.data(), 64).ok());
  EXPECT_EQ(device.counts().copies, 1u);
  EXPECT_EQ(device.counts().pinned_bytes, 64u);
}

/// A page and more of the host's own memory.
struct Pages {
  Pages() : data(static_cast<std::byte*>(std::aligned_alloc(4096, kBytes))) { std::memset(data, 1, kBytes); }
  ~Pages() { std::free(data); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  static constexpr std::size_t kBytes = 8192;
  std::byte* const data;
};

TEST(FakeDevice, HostMemoryIsReachedWhileItIsRegistered) {
  FakeDevice device(seeded(5));
  const Pages pages;
  const gpu::Memory memory = *device.allocate(1000);
  Work work(device);
  work.to(memory.data(), std::vector<std::byte>(1000, std::byte{7}));
  work.finish();
  EXPECT_FALSE(work.stream().copy_out(pages.data, memory.data(), 1000).ok());
  device.fail(FakeDevice::Call::register_host, 1);
  EXPECT_EQ(device.register_host(pages.data, 4096, {}).error().code(), Errc::no_space);
  EXPECT_FALSE(device.register_host(pages.data + 8, 4096, {}).ok());
  gpu::Memory registered = *device.register_host(pages.data, 4096, {});
  EXPECT_EQ(device.counts().registered_bytes, 4096u);
  EXPECT_FALSE(work.stream().copy_out(pages.data + 4096, memory.data(), 1000).ok());
  ASSERT_TRUE(work.stream().copy_out(pages.data + 100, memory.data(), 1000).ok());
  work.finish();
  EXPECT_EQ(pages.data[99], std::byte{1});
  EXPECT_EQ(pages.data[100], std::byte{7});
  EXPECT_EQ(pages.data[1099], std::byte{7});
  EXPECT_EQ(pages.data[1100], std::byte{1});
  registered.release();
  EXPECT_EQ(device.counts().registered_bytes, 0u);
  EXPECT_FALSE(work.stream().copy_out(pages.data, memory.data(), 1000).ok());
}

TEST(FakeDevice, HostMemoryIsNotReleasedUnderACopy) {
  FakeDevice device(seeded(6));
  const Pages pages;
  const gpu::Memory memory = *device.allocate(64);
  gpu::Memory registered = *device.register_host(pages.data, Pages::kBytes, {});
  const auto stream = *device.make_stream();
  device.hang(true);
  ASSERT_TRUE(stream->copy_out(pages.data + 5000, memory.data(), 64).ok());
  EXPECT_DEATH(registered.release(), "let go while a copy");
  device.hang(false);
  EXPECT_TRUE(device.drain());
  registered.release();
}

/// Registered for all devices: the last one ends that.
TEST(FakeDevice, HostMemoryIsRegisteredOnce) {
  FakeDevice first(seeded(8));
  FakeDevice second(seeded(9));
  const Pages pages;
  const gpu::Memory memory = *second.allocate(64);
  const auto stream = *second.make_stream();
  gpu::Memory registered = *first.register_host(pages.data, Pages::kBytes, {});
  EXPECT_EQ(registered.kind(), gpu::Memory::Kind::registered);
  EXPECT_FALSE(stream->copy_out(pages.data, memory.data(), 64).ok());
  gpu::Memory too = *second.register_host(pages.data, Pages::kBytes, {});
  second.hang(true);
  registered.release();
  ASSERT_TRUE(stream->copy_out(pages.data, memory.data(), 64).ok());
  EXPECT_DEATH(too.release(), "let go while a copy");
  second.hang(false);
  EXPECT_TRUE(second.drain());
  too.release();
  EXPECT_FALSE(stream->copy_out(pages.data, memory.data(), 64).ok());
  EXPECT_EQ(second.counts().registered_bytes, 0u);
}

TEST(FakeDevice, CopiesRowsThatLieApart) {
  FakeDevice device(seeded(7));
  std::vector<std::byte> bytes(100);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  const Pages pages;
  const gpu::Memory registered = *device.register_host(pages.data, Pages::kBytes, {});
  const gpu::Memory memory = *device.allocate(bytes.size());
  Work work(device);
  work.to(memory.data(), bytes);
  ASSERT_TRUE(work.stream().copy_out_rows(pages.data + 10, 40, memory.data() + 5, 30, 20, 3).ok());
  ASSERT_TRUE(work.stream().copy_out_rows(pages.data, 40, memory.data(), 30, 0, 3).ok());
  work.finish();
  std::vector<std::byte> expected(200, std::byte{1});
  for (std::size_t row = 0; row < 3; ++row) std::memcpy(&expected[10 + row * 40], &bytes[5 + row * 30], 20);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), pages.data));
  // The last row of four ends behind the device's memory; so does the last of the host's.
  EXPECT_FALSE(work.stream().copy_out_rows(pages.data, 40, memory.data() + 5, 30, 20, 4).ok());
  EXPECT_FALSE(work.stream().copy_out_rows(pages.data + Pages::kBytes - 99, 40, memory.data(), 30, 20, 3).ok());
}

TEST(FakeDevice, AWaitForAStreamThatDoesNotEndEnds) {
  FakeDevice device(seeded(4));
  gpu::Memory memory = *device.allocate(64);
  const gpu::Memory pinned = *device.pin(64);
  const auto stream = *device.make_stream();
  const auto event = *device.make_event();
  device.hang(true);
  ASSERT_TRUE(stream->copy_in(memory.data(), pinned.data(), 64).ok());
  ASSERT_TRUE(stream->record(*event).ok());
  const Status late = gpu::wait(*event, Deadline::after(std::chrono::milliseconds(5)), "committing v12");
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Errc::timed_out);
  EXPECT_THAT(late.error().message(), HasSubstr("committing v12"));
  EXPECT_FALSE(device.drain());
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(gpu::wait(*event, CallContext(soon(), stop.get_token()), "a copy").error().code(), Errc::cancelled);
  device.hang(false);
  EXPECT_TRUE(gpu::wait(*event, soon(), "a copy").ok());
}

TEST(FakeDevice, ALazyOneWaitsUntilItIsAsked) {
  FakeDevice::Options options = seeded(5);
  options.lazy = true;
  FakeDevice device(options);
  const gpu::Memory memory = *device.allocate(64);
  const gpu::Memory pinned = *device.pin(64);
  const auto stream = *device.make_stream();
  const auto event = *device.make_event();
  std::memset(pinned.data(), 1, 64);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(stream->copy_in(memory.data(), pinned.data(), 64).ok());
  ASSERT_TRUE(stream->record(*event).ok());
  std::memset(pinned.data(), 2, 64);
  ASSERT_TRUE(gpu::wait(*event, soon(), "a copy").ok());
  std::array<std::byte, 64> there{};
  device.peek(memory.data(), there.data(), 64);
  EXPECT_EQ(there[0], std::byte{2});
}

TEST(FakeDevice, AnEngineThatIsBusyHoldsUpItsOwnStream) {
  FakeDevice device(seeded(6));
  const gpu::StreamHandle handle = device.engine_stream();
  const auto engine = *device.adopt_stream(handle);
  const auto stream = *device.make_stream();
  const auto busy = *device.make_event();
  const auto free = *device.make_event();
  bool ran = false;
  device.hold(handle, true);
  device.engine_work(handle, [&] { ran = true; });
  ASSERT_TRUE(engine->record(*busy).ok());
  const gpu::Memory memory = *device.allocate(64);
  ASSERT_TRUE(stream->zero(memory.data(), 64).ok());
  ASSERT_TRUE(stream->record(*free).ok());
  EXPECT_TRUE(gpu::wait(*free, soon(), "another stream").ok());
  EXPECT_FALSE(device.drain());
  EXPECT_FALSE(ran);
  EXPECT_FALSE(*busy->done());
  device.hold(handle, false);
  EXPECT_TRUE(gpu::wait(*busy, soon(), "the engine").ok());
  EXPECT_TRUE(ran);
}

/// As after an illegal address: the calls that put the work there succeed, all later ones fail.
TEST(FakeDevice, WhatGoesWrongShowsLaterAndStays) {
  FakeDevice::Options options = seeded(7);
  options.lazy = true;
  FakeDevice device(options);
  const gpu::Memory memory = *device.allocate(64);
  const gpu::Memory pinned = *device.pin(64);
  const auto stream = *device.make_stream();
  const auto other = *device.make_stream();
  const auto event = *device.make_event();
  std::memset(pinned.data(), 1, 64);
  device.die(2);
  ASSERT_TRUE(stream->zero(memory.data(), 64).ok());
  ASSERT_TRUE(stream->copy_in(memory.data(), pinned.data(), 64).ok());
  ASSERT_TRUE(stream->record(*event).ok());
  const Status shown = gpu::wait(*event, soon(), "a copy");
  ASSERT_FALSE(shown.ok());
  EXPECT_EQ(shown.error().code(), Errc::io);
  EXPECT_THAT(shown.error().message(), HasSubstr("an operation before it went wrong"));
  EXPECT_FALSE(event->done().ok());
  EXPECT_FALSE(other->copy_in(memory.data(), pinned.data(), 64).ok());
  EXPECT_FALSE(other->zero(memory.data(), 64).ok());
  EXPECT_FALSE(other->record(*event).ok());
  EXPECT_FALSE(device.allocate(64).ok());
  std::array<std::byte, 64> there{};
  device.peek(memory.data(), there.data(), 64);
  EXPECT_EQ(there[0], std::byte{0}) << "the copy did not happen";
}

TEST(CudaDevice, SaysWhyThereIsNone) {
  const auto count = gpu::cuda_device_count();
  if (count.ok()) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_EQ(count.error().code(), Errc::unsupported);
  const auto device = gpu::open_cuda_device(0, gpu::Use::kernels);
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.error().code(), Errc::unsupported);
  EXPECT_THAT(device.error().message(), HasSubstr("cuda:0: "));
  EXPECT_THAT(device.error().message(), HasSubstr("CUDA"));
}

}  // namespace
}  // namespace deltasync::test
