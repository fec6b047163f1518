// Host memory that is registered with CUDA: with others who register it, who end what they did not begin, and with an
// engine whose work has no end. Over the emulated runtime.
#include <gmock/gmock-matchers.h>

#include <future>

#include "base/deadline.hpp"
#include "gpu/cuda_device.hpp"
#include "tests/gpu/emulator/capture.hpp"
#include "tests/gpu/emulator/gate.hpp"
#include "tests/gpu/emulator/runtime.hpp"
#include "tests/gpu/work.hpp"
#include "tests/support/eventually.hpp"

namespace deltasync::emulator {
namespace {

using testing::HasSubstr;

constexpr std::size_t kPage = 4096;

/// Pages, and who still has them.
struct Pages {
  struct Bytes {
    alignas(kPage) std::byte all[4 * kPage];
  };
  std::shared_ptr<Bytes> keeper = std::make_shared<Bytes>();
  std::byte* data = keeper->all;
};

class EmulatedRegistrations : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(cudaStreamDestroy(engine_), cudaSuccess);
    this_thread() = {};
  }
  static bool is_registered(const std::byte* at) {
    cudaPointerAttributes found{};
    EXPECT_EQ(cudaPointerGetAttributes(&found, at), cudaSuccess);
    return found.type == cudaMemoryTypeHost;
  }

  const cudaStream_t engine_ = make_stream(cudaStreamNonBlocking);
  std::unique_ptr<gpu::Device> device_ = *gpu::open_cuda_device(1, gpu::Use::kernels);
};

/// Copies that begin in what somebody registered and end beyond would fail in the middle of an update; and nobody knows
/// for how long all of it stays registered.
TEST_F(EmulatedRegistrations, MemoryThatOthersRegisterIsRefused) {
  const Pages pages;
  const std::vector<std::vector<std::pair<std::size_t, std::size_t>>> others = {
      {{0, 1}}, {{1, 2}}, {{3, 1}}, {{0, 1}, {3, 1}}, {{0, 2}, {2, 2}}, {{0, 4}}};
  for (const auto& theirs : others) {
    for (const auto& [page, count] : theirs) {
      ASSERT_EQ(cudaHostRegister(pages.data + page * kPage, count * kPage, cudaHostRegisterPortable), cudaSuccess);
    }
    const auto refused = device_->register_host(pages.data, 4 * kPage, pages.keeper);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), Errc::io);
    EXPECT_THAT(
        refused.error().message(),
        HasSubstr("cuda:1 (emulated from PTX): somebody else has registered a part of these 16384 bytes of host "
                  "memory with CUDA, or all of them"));
    for (const auto& [page, count] : theirs) ASSERT_EQ(cudaHostUnregister(pages.data + page * kPage), cudaSuccess);
  }
  EXPECT_TRUE(device_->register_host(pages.data, 4 * kPage, pages.keeper).ok());
}

/// Of several devices the last one ends it.
TEST_F(EmulatedRegistrations, DevicesShareIt) {
  const Pages pages;
  const auto other = *gpu::open_cuda_device(0, gpu::Use::kernels);
  gpu::Memory first = *other->register_host(pages.data, kPage, pages.keeper);
  gpu::Memory second = *device_->register_host(pages.data, kPage, pages.keeper);
  EXPECT_THAT(device_->register_host(pages.data, 2 * kPage, {}).error().message(),
              HasSubstr("cuda:1 (emulated from PTX): registering host memory: 4096 bytes from there on"));
  first.release();
  test::Work work(*device_);
  const auto* const up = reinterpret_cast<const std::byte*>(work.up(std::vector<std::uint64_t>{5}));
  work.finish();
  test::Work::check(work.stream().copy_out(pages.data, up, 8));
  work.finish();
  EXPECT_EQ(pages.data[0], std::byte{5});
  EXPECT_TRUE(is_registered(pages.data));
  second.release();
  EXPECT_TRUE(test::eventually([&] { return !is_registered(pages.data); }));
}

/// The memory stays where it is until the driver has let go of it.
TEST_F(EmulatedRegistrations, ItsEndIsNotWaitedFor) {
  Pages first;
  Pages second;
  gpu::Memory one = *device_->register_host(first.data, kPage, first.keeper);
  gpu::Memory two = *device_->register_host(second.data, kPage, second.keeper);
  const std::weak_ptr<Pages::Bytes> kept = first.keeper;
  Gate gate(engine_);
  auto ends = std::async(std::launch::async, [&] {
    one.release();
    two.release();
  });
  EXPECT_EQ(ends.wait_for(std::chrono::minutes(1)), std::future_status::ready) << "it waits for the engine";
  Status refused;  // it is had back as long as its turn has not come
  EXPECT_TRUE(test::eventually([&] {
    auto again = device_->register_host(first.data, kPage, first.keeper);
    if (!again.ok()) refused = std::move(again).error();
    return !refused.ok();
  }));
  EXPECT_THAT(refused.error().message(),
              HasSubstr("registering host memory: that of before is being ended, which waits for a device's work"));
  two = *device_->register_host(second.data, kPage, second.keeper);  // its turn has not come
  first = {};
  EXPECT_FALSE(kept.expired());
  gate.open();
  ends.get();
  EXPECT_TRUE(test::eventually([&] { return kept.expired(); }));
  EXPECT_TRUE(is_registered(second.data));
  EXPECT_TRUE(device_->register_host(first.data, kPage, first.keeper).ok());
}

/// Nothing is copied that would wait for the engine, or be lost; and the end is no failure.
TEST_F(EmulatedRegistrations, OthersMayNotEndIt) {
  Pages pages;
  gpu::Memory registered = *device_->register_host(pages.data, kPage, pages.keeper);
  test::Work work(*device_);
  const auto* const up = reinterpret_cast<const std::byte*>(work.up(std::vector<std::uint64_t>{5}));
  ASSERT_EQ(cudaHostUnregister(pages.data), cudaSuccess);
  for (const Status& refused :
       {work.stream().copy_out(pages.data, up, 8), work.stream().copy_out_rows(pages.data, 8, up, 4, 2, 2)}) {
    ASSERT_FALSE(refused.ok());
    EXPECT_THAT(refused.error().message(), HasSubstr("cuda:1 (emulated from PTX): somebody else has ended the "
                                                     "registration of host memory that is copied"));
  }
  registered.release();
  const std::weak_ptr<Pages::Bytes> kept = pages.keeper;
  std::byte* const data = pages.data;
  pages.keeper.reset();
  EXPECT_TRUE(test::eventually([&] { return kept.expired(); }));
  EXPECT_FALSE(is_registered(data));
}

/// Of a device that is dead nobody knows what it still reads.
TEST_F(EmulatedRegistrations, WhatCannotBeEndedIsKept) {
  keep_faults(true);
  static auto* const pages = new Pages;  // for good
  gpu::Memory registered = *device_->register_host(pages->data, kPage, pages->keeper);
  fail_call(1, cudaErrorIllegalAddress, true);
  registered.release();
  EXPECT_TRUE(test::eventually([&] { return pages->keeper.use_count() == 2 && !call_is_due(); }));
  revive();
  EXPECT_THAT(device_->register_host(pages->data, kPage, {}).error().message(),
              HasSubstr("registering host memory: that of before could not be ended"));
  keep_faults(false);
}

}  // namespace
}  // namespace deltasync::emulator
