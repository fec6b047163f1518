// What CudaDevice leaves to its engine as it was: current device, errors, graph captures. Over the emulated runtime.
#include <gmock/gmock-matchers.h>

#include <functional>

#include "base/deadline.hpp"
#include "gpu/cuda_device.hpp"
#include "tests/gpu/emulator/gate.hpp"
#include "tests/gpu/emulator/runtime.hpp"
#include "tests/gpu/work.hpp"

namespace deltasync::emulator {
namespace {

using testing::HasSubstr;

class EmulatedCudaDevice : public testing::Test {
 protected:
  static CallContext soon() { return CallContext(Deadline::after(std::chrono::minutes(1))); }

  std::unique_ptr<gpu::Device> device_ = *gpu::open_cuda_device(1, gpu::Use::kernels);
};

TEST_F(EmulatedCudaDevice, IsNamedAndCounted) {
  EXPECT_EQ(device_->name(), "cuda:1 (emulated from PTX)");
  EXPECT_EQ(*gpu::cuda_device_count(), 2);
  EXPECT_THAT(gpu::open_cuda_device(2, gpu::Use::copies).error().message(), HasSubstr("there are 2 CUDA devices"));
}

TEST_F(EmulatedCudaDevice, TheCurrentDeviceStays) {
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  const auto current = [] {
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    return device;
  };
  {
    test::Work work(*device_);
    std::uint64_t* const sums = work.up(std::vector<std::uint64_t>(1));
    EXPECT_EQ(current(), 0);
    const auto* const memory = reinterpret_cast<const std::byte*>(work.up(std::vector<std::uint64_t>(64, 3)));
    work.run(gpu::SumMemory{memory, 512, sums});
    EXPECT_EQ(work.down(sums, 1)[0], 64u * 3);
    EXPECT_EQ(current(), 0);
  }
  EXPECT_EQ(current(), 0);
  EXPECT_FALSE(device_->allocate(std::uint64_t{1} << 50).ok());
  EXPECT_EQ(current(), 0);
}

/// Of a process that uses one device of many: some hundred MB on each that it has a context of.
TEST_F(EmulatedCudaDevice, ThreadsTakeNoOtherDevicesContext) {
  auto stream = *device_->make_stream();
  auto event = *device_->make_event();
  const auto contexts_of = [](const std::function<void()>& work) {
    unsigned contexts = 0;
    std::thread([&] {
      work();
      contexts = this_thread().contexts;
    }).join();
    return contexts;
  };
  const unsigned own = 1u << 1;
  EXPECT_EQ(contexts_of([&] { EXPECT_TRUE(stream->record(*event).ok()); }), own);
  EXPECT_EQ(contexts_of([&] { EXPECT_TRUE(gpu::wait(*event, soon(), "a test's work").ok()); }), own);
  EXPECT_EQ(contexts_of([&] { EXPECT_FALSE(*stream->is_captured()); }), own);
  EXPECT_EQ(contexts_of([&] {
              test::Work work(*device_);
              const auto* const up = work.up(std::vector<std::uint64_t>{5});
              EXPECT_EQ(work.down(up, 1)[0], 5u);
            }),
            own);
  EXPECT_EQ(contexts_of([&] { event.reset(); }), own);
  EXPECT_EQ(contexts_of([&] { stream.reset(); }), own);
  EXPECT_EQ(contexts_of([&] { device_.reset(); }), own);
  EXPECT_EQ(contexts_of([&] { device_ = *gpu::open_cuda_device(1, gpu::Use::kernels); }), own);
}

TEST_F(EmulatedCudaDevice, AnOldDriverIsNamed) {
  set_driver_version((CUDART_VERSION / 1000 - 1) * 1000 + 80);
  const auto none = gpu::open_cuda_device(0, gpu::Use::copies);
  set_driver_version(CUDART_VERSION);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), Errc::unsupported);
  EXPECT_THAT(none.error().message(),
              HasSubstr("the driver is for CUDA " + std::to_string(CUDART_VERSION / 1000 - 1) +
                        ".8 at most, and this build for " + std::to_string(CUDART_VERSION / 1000) + "." +
                        std::to_string(CUDART_VERSION % 1000 / 10) + ": install a newer driver, or a build for CUDA " +
                        std::to_string(CUDART_VERSION / 1000 - 1)));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

/// The same major version, and a device that is newer than this build.
TEST_F(EmulatedCudaDevice, ADriverThatIsOlderThanThePtxIsNamed) {
  keep_faults(true);
  set_driver_version(CUDART_VERSION / 1000 * 1000);
  std::string words;
  for (std::int64_t n = 1; n < 10 && words.find("this build for") == std::string::npos; ++n) {
    fail_call(n, cudaErrorUnsupportedPtxVersion);
    const auto none = gpu::open_cuda_device(0, gpu::Use::kernels);
    if (!none.ok()) words = none.error().message();
  }
  fail_call(0);
  set_driver_version(CUDART_VERSION);
  keep_faults(false);
  const std::string major = std::to_string(CUDART_VERSION / 1000);
  EXPECT_THAT(words, HasSubstr("cuda:0 (emulated from PTX): the driver is for CUDA " + major +
                               ".0 at most, and this build for " + major));
  EXPECT_THAT(words, HasSubstr(": install a newer driver, or a build by an older toolkit for CUDA " + major));
}

/// An engine that asks for its last error finds none of this device's.
TEST_F(EmulatedCudaDevice, ErrorsAreToldOnceAndHere) {
  const auto too_much = device_->allocate(std::uint64_t{1} << 50);
  EXPECT_EQ(too_much.error().code(), Errc::no_space);
  EXPECT_THAT(too_much.error().message(), HasSubstr(" of 1125899906842624 bytes: out of memory"));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const gpu::Memory pinned = *device_->pin(4096);
  EXPECT_EQ(device_->register_host(pinned.data(), 4096, {}).error().code(), Errc::io);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const auto stream = *device_->make_stream();
  const auto event = *device_->make_event();
  {
    Gate gate(static_cast<cudaStream_t>(stream->handle().raw));
    ASSERT_TRUE(stream->record(*event).ok());
    EXPECT_FALSE(*event->done());
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    gate.open();
    EXPECT_TRUE(gpu::wait(*event, soon(), "a test's work").ok());
  }
}

/// One of the engine's own, which it has not asked for yet. CUDA keeps one only: of those that are refused here
/// something is left in its place, so that the engine finds an error still.
TEST_F(EmulatedCudaDevice, AnErrorOfTheEnginesStays) {
  const auto stays = [] { return cudaPeekAtLastError() == cudaErrorInvalidDevice; };
  ASSERT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  EXPECT_EQ(*gpu::cuda_device_count(), 2);
  EXPECT_FALSE(gpu::open_cuda_device(99, gpu::Use::copies).ok());
  {
    const auto second = *gpu::open_cuda_device(0, gpu::Use::kernels);
    EXPECT_TRUE(stays());
    test::Work work(*device_);
    std::uint64_t* const sums = work.up(std::vector<std::uint64_t>(1));
    const auto* const memory = reinterpret_cast<const std::byte*>(work.up(std::vector<std::uint64_t>(64, 3)));
    work.run(gpu::SumMemory{memory, 512, sums});
    EXPECT_TRUE(stays());
    EXPECT_EQ(work.down(sums, 1)[0], 64u * 3);
    EXPECT_TRUE(stays());
    const auto stream = *device_->make_stream();
    const auto event = *device_->make_event();
    Gate gate(static_cast<cudaStream_t>(stream->handle().raw));
    ASSERT_TRUE(stream->record(*event).ok());
    EXPECT_FALSE(*event->done());
    EXPECT_FALSE(*stream->is_captured());
    EXPECT_TRUE(stays());
  }
  EXPECT_TRUE(stays());
  EXPECT_FALSE(device_->allocate(std::uint64_t{1} << 50).ok());
  EXPECT_NE(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(EmulatedCudaDevice, ACaptureIsSeenAndNotBroken) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaStream_t engine = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&engine, cudaStreamNonBlocking), cudaSuccess);
  const auto adopted = *device_->adopt_stream({engine});
  EXPECT_FALSE(*adopted->is_captured());
  ASSERT_EQ(cudaStreamBeginCapture(engine, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_TRUE(*adopted->is_captured());
  std::thread([&] {  // what pulls do meanwhile, on a thread of their own
    test::Work work(*device_);
    const auto* const up = work.up(std::vector<std::uint64_t>{5});
    EXPECT_EQ(work.down(up, 1)[0], 5u);
  })
      .join();
  std::thread ends([&] {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(engine, &graph), cudaSuccess);
  });
  EXPECT_TRUE(gpu::wait_for_capture(*adopted, soon(), "an engine's stream").ok());
  ends.join();
  EXPECT_FALSE(*adopted->is_captured());
  ASSERT_EQ(cudaStreamDestroy(engine), cudaSuccess);
}

/// A capture of another stream that the default stream would wait for.
TEST_F(EmulatedCudaDevice, TheDefaultStreamWaitsForACaptureToo) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault), cudaSuccess);
  const auto adopted = *device_->adopt_stream({nullptr});
  EXPECT_FALSE(*adopted->is_captured());
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_TRUE(*adopted->is_captured());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaSuccess);
  EXPECT_FALSE(*adopted->is_captured());
  ASSERT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(EmulatedCudaDevice, AnErrorOfTheDeviceIsNamed) {
  keep_faults(true);
  const auto stream = *device_->make_stream();
  const auto event = *device_->make_event();
  const gpu::Memory memory = *device_->allocate(4096);
  const gpu::SumMemory beyond{memory.data(), 8192, reinterpret_cast<std::uint64_t*>(memory.data())};
  ASSERT_TRUE(stream->launch(beyond).ok());
  static_cast<void>(stream->record(*event));
  const Status waited = gpu::wait(*event, soon(), "a test's work");
  ASSERT_FALSE(waited.ok());
  EXPECT_THAT(waited.error().message(), HasSubstr("cuda:1 (emulated from PTX): cu"));
  EXPECT_THAT(waited.error().message(),
              HasSubstr(": an illegal memory access was encountered (cudaErrorIllegalAddress)"));
  keep_faults(false);
}

/// Of a device that is dead all ends, and the engine, which uses another, finds that and no error of its own.
TEST_F(EmulatedCudaDevice, EndsLeaveTheDeviceAndNoError) {
  keep_faults(true);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  static std::byte page[4096];  // registered for good
  auto stream = *device_->make_stream();
  auto event = *device_->make_event();
  std::vector<gpu::Memory> memories;
  memories.push_back(*device_->allocate(4096));
  memories.push_back(*device_->pin(4096));
  memories.push_back(*device_->register_host(page, 4096, {}));
  fail_call(1, cudaErrorIllegalAddress, true);
  EXPECT_FALSE(stream->record(*event).ok());
  const std::function<void()> ends[] = {[&] { stream.reset(); }, [&] { event.reset(); }, [&] { memories.clear(); },
                                        [&] { device_.reset(); }};
  for (const auto& end : ends) {
    end();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << &end - ends;
    int device = -1;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0) << &end - ends;
  }
  revive();
  keep_faults(false);
}

}  // namespace
}  // namespace deltasync::emulator
