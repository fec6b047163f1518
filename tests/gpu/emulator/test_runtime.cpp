// The emulated runtime keeps what NVIDIA's "CUDA Runtime API" (RT) and "CUDA C++ Programming Guide" (PG) promise, as
// far as this project depends on it.
#include "tests/gpu/emulator/runtime.hpp"

#include <gmock/gmock-matchers.h>
#include <sys/mman.h>

#include <cstring>

#include "gpu/cuda_launch.hpp"
#include "tests/gpu/emulator/gate.hpp"

namespace deltasync::emulator {
namespace {

using testing::HasSubstr;

constexpr std::size_t kBytes = 64 << 10;

class EmulatedRuntime : public testing::Test {
 protected:
  EmulatedRuntime() {
    keep_faults(true);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&device_), kBytes), cudaSuccess);
    EXPECT_EQ(cudaHostAlloc(reinterpret_cast<void**>(&host_), kBytes, cudaHostAllocPortable), cudaSuccess);
    stream_ = stream();
    event_ = event();
  }
  ~EmulatedRuntime() override {
    keep_faults(false);
    EXPECT_EQ(cudaFree(device_), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(host_), cudaSuccess);
    for (const cudaStream_t each : streams_) EXPECT_EQ(cudaStreamDestroy(each), cudaSuccess);
    for (const cudaEvent_t each : events_) EXPECT_EQ(cudaEventDestroy(each), cudaSuccess);
    static_cast<void>(cudaGetLastError());
    this_thread() = {};
  }

  cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
    streams_.push_back(nullptr);
    EXPECT_EQ(cudaStreamCreateWithFlags(&streams_.back(), flags), cudaSuccess);
    return streams_.back();
  }
  cudaEvent_t event() {
    events_.push_back(nullptr);
    EXPECT_EQ(cudaEventCreateWithFlags(&events_.back(), cudaEventDisableTiming), cudaSuccess);
    return events_.back();
  }
  /// A launch of one block that sums up memory.
  cudaError_t launch(const std::byte* memory, std::byte* sums, cudaStream_t on) {
    return gpu::launch(gpu::SumMemory{memory, 4096, reinterpret_cast<std::uint64_t*>(sums)}, on);
  }

  std::byte* device_ = nullptr;
  std::byte* host_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
};

// PG "Asynchronous Concurrent Execution": copies and kernels return before they are done; a stream is in order.
TEST_F(EmulatedRuntime, WorkIsDoneInOrderAndLater) {
  std::memset(host_, 1, kBytes);
  Gate gate(stream_);
  ASSERT_EQ(cudaMemcpyAsync(device_, host_, kBytes, cudaMemcpyHostToDevice, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(device_ + 8192, 0, 8, stream_), cudaSuccess);
  ASSERT_EQ(launch(device_, device_ + 8192, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(host_, device_ + 8192, 8, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
  EXPECT_EQ(host_[0], std::byte{1});
  gate.open();
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  std::uint64_t sum = 0;
  std::memcpy(&sum, host_, sizeof sum);
  EXPECT_EQ(sum, 4096 / 8 * 0x0101010101010101u);
}

// PG "Events" and RT cudaStreamWaitEvent: only events order streams; one that was never recorded orders nothing.
TEST_F(EmulatedRuntime, EventsOrderStreams) {
  const cudaStream_t other = stream();
  ASSERT_EQ(cudaStreamWaitEvent(other, event_, 0), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  Gate gate(stream_);
  ASSERT_EQ(cudaMemsetAsync(device_, 5, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  const cudaStream_t third = stream();
  ASSERT_EQ(cudaMemsetAsync(device_, 3, kBytes, third), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(third), cudaSuccess);  // does not wait for the others
  ASSERT_EQ(cudaStreamWaitEvent(other, event_, 0), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(host_, device_, 1, cudaMemcpyDeviceToHost, other), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, third), cudaSuccess);  // the wait is for what was recorded before it
  gate.open();
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_EQ(host_[0], std::byte{5});
}

// PG "Default Stream": work of the legacy default stream and that of blocking streams wait for each other.
TEST_F(EmulatedRuntime, TheDefaultStreamIsOrderedWithBlockingOnes) {
  const cudaStream_t blocking = stream(cudaStreamDefault);
  {
    Gate gate(blocking);
    ASSERT_EQ(cudaMemsetAsync(device_, 1, 1, blocking), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(device_, 2, 1, nullptr), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event_, nullptr), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event_), cudaErrorNotReady);
    ASSERT_EQ(cudaMemcpyAsync(host_, device_, 1, cudaMemcpyDeviceToHost, blocking), cudaSuccess);
    gate.open();
    ASSERT_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
    EXPECT_EQ(host_[0], std::byte{2});
  }
  Gate gate(stream_);
  ASSERT_EQ(cudaMemsetAsync(device_, 3, 1, nullptr), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // not behind a non-blocking stream
}

// RT cudaMemcpy2DAsync: pitches of at least the width, and of 2^31-1 at most; bytes between rows stay.
TEST_F(EmulatedRuntime, RowsAreCopied) {
  for (std::size_t i = 0; i < kBytes; ++i) host_[i] = static_cast<std::byte>(i * 7);
  ASSERT_EQ(cudaMemcpyAsync(device_, host_, kBytes, cudaMemcpyHostToDevice, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  std::memset(host_, 0xEE, kBytes);
  ASSERT_EQ(cudaMemcpy2DAsync(host_, 10, device_ + 3, 100, 6, 4, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  for (std::size_t i = 0; i < 40; ++i) {
    const bool is_copied = i % 10 < 6;
    EXPECT_EQ(host_[i], is_copied ? static_cast<std::byte>((i / 10 * 100 + i % 10 + 3) * 7) : std::byte{0xEE}) << i;
  }
  EXPECT_EQ(cudaMemcpy2DAsync(host_, 5, device_, 100, 6, 4, cudaMemcpyDeviceToHost, stream_),
            cudaErrorInvalidPitchValue);
  EXPECT_EQ(cudaMemcpy2DAsync(host_, 10, device_, std::size_t{1} << 31, 6, 1, cudaMemcpyDeviceToHost, stream_),
            cudaErrorInvalidPitchValue);
  EXPECT_EQ(cudaMemcpy2DAsync(host_, 10, device_, kBytes, 6, 2, cudaMemcpyDeviceToHost, stream_),
            cudaErrorInvalidValue);
}

// RT cudaHostRegister: once; cudaFree and cudaHostUnregister wait for work; memory that is partly pinned is refused.
TEST_F(EmulatedRuntime, HostMemoryIsRegistered) {
  auto* const pages =
      static_cast<std::byte*>(::mmap(nullptr, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_EQ(cudaHostRegister(pages, 8192, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(pages + 4096, 8192, cudaHostRegisterPortable), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaMemcpyAsync(device_, pages + 4096, 8192, cudaMemcpyHostToDevice, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(pages), cudaErrorInvalidValue);
  EXPECT_EQ(cudaHostUnregister(host_), cudaErrorHostMemoryNotRegistered);
  Gate gate(stream_);
  ASSERT_EQ(cudaMemcpyAsync(pages, device_, 8192, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  std::thread opens([&] { gate.open(); });
  ASSERT_EQ(cudaHostUnregister(pages), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaSuccess);
  opens.join();
  EXPECT_EQ(cudaHostUnregister(pages), cudaErrorHostMemoryNotRegistered);
  ::munmap(pages, 3 * 4096);
}

TEST_F(EmulatedRuntime, MemoryEnds) {
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, kDeviceBytes), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaMalloc(&data, kDeviceBytes / 2), cudaSuccess);
  ASSERT_EQ(cudaFree(data), cudaSuccess);
  EXPECT_EQ(cudaFree(data), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(data, host_, 1, cudaMemcpyHostToDevice, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(device_ + 1, 0, kBytes, stream_), cudaErrorInvalidValue);
}

// RT "Stream Ordered Memory Allocator": memory is there from its place in the stream on, and to its end there; nothing
// waits for other streams; what was freed is held until somebody synchronizes.
TEST_F(EmulatedRuntime, MemoryIsOrderedInAStream) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = 0;
  cudaMemPool_t pool = nullptr;
  ASSERT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
  Gate others(stream_);
  const cudaStream_t own = stream();
  void* data = nullptr;
  {
    Gate gate(own);
    ASSERT_EQ(cudaMallocFromPoolAsync(&data, kDeviceBytes / 2 + 1, pool, own), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(data, 0, 1, stream()), cudaErrorInvalidValue) << "too soon";
  }
  ASSERT_EQ(cudaStreamSynchronize(own), cudaSuccess);
  const cudaStream_t other = stream();
  EXPECT_EQ(cudaMemsetAsync(data, 0, 1, other), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  void* more = nullptr;
  ASSERT_EQ(cudaFreeAsync(data, own), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&more, kDeviceBytes / 2), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaStreamSynchronize(own), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(data, 0, 1, own), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMalloc(&more, kDeviceBytes / 2), cudaSuccess);
  EXPECT_EQ(cudaMallocFromPoolAsync(&data, 8, pool, own), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(own), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(host_, data, 8, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaFreeAsync(data, own), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(own), cudaSuccess);
  others.open();
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorIllegalAddress) << "too late";
  EXPECT_THAT(last_fault(), HasSubstr("cudaMemcpyAsync of memory that was given back before its turn"));
  keep_faults(true);
  EXPECT_EQ(cudaFree(more), cudaSuccess);
  EXPECT_EQ(cudaMemPoolDestroy(pool), cudaSuccess);
}

// PG "Stream and Event Behavior": a launch wants a stream of the current device, a record an event of the stream's;
// copies and waits do not care.
TEST_F(EmulatedRuntime, SeveralDevices) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(launch(device_, device_ + 8192, stream_), cudaErrorInvalidResourceHandle);
  const cudaStream_t of_one = stream();
  const cudaEvent_t event_of_one = event();
  EXPECT_EQ(cudaEventRecord(event_, of_one), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event_of_one, of_one), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event_of_one, 0), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(host_, device_, 1, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  // A kernel of device 1 finds nothing at an address of device 0.
  EXPECT_EQ(launch(device_, device_ + 8192, of_one), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(of_one), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);  // which has no error
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
}

// RT cudaErrorIllegalAddress and its like: "this leaves the process in an inconsistent state and any further CUDA work
// will return the same error".
TEST_F(EmulatedRuntime, ErrorsOfKernelsStay) {
  struct Wrong {
    const std::byte* memory;
    cudaError_t error;
    const char* words;
  };
  for (const Wrong& wrong : {Wrong{device_ + kBytes - 2048, cudaErrorIllegalAddress, "out of bounds"},
                             Wrong{device_ + 8, cudaErrorMisalignedAddress, "misaligned address"}}) {
    keep_faults(true);
    EXPECT_EQ(launch(wrong.memory, device_ + 8192, stream_), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event_, stream_) == cudaSuccess ? cudaStreamSynchronize(stream_) : wrong.error,
              wrong.error);
    EXPECT_THAT(last_fault(), HasSubstr(wrong.words));
    EXPECT_THAT(last_fault(), HasSubstr("SumMemory"));
    EXPECT_EQ(cudaEventQuery(event_), wrong.error);
    EXPECT_EQ(cudaMemsetAsync(device_, 0, 1, stream_), wrong.error);
    EXPECT_EQ(launch(device_, device_ + 8192, stream_), wrong.error);
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, 1), wrong.error);
    EXPECT_EQ(cudaGetLastError(), wrong.error);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
}

TEST_F(EmulatedRuntime, WhatIsNotEmulatedEndsTheProcess) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  std::byte pageable[16] = {};
  EXPECT_DEATH(static_cast<void>(cudaMemcpyAsync(device_, pageable, 16, cudaMemcpyHostToDevice, stream_)),
               "emulator: cudaMemcpyAsync of host memory that is neither pinned nor registered");
  EXPECT_DEATH(static_cast<void>(cudaMemcpyAsync(device_, device_, 16, cudaMemcpyDeviceToDevice, stream_)),
               "emulator: cudaMemcpyAsync other than between host and device");
  cudaEvent_t timing = nullptr;
  EXPECT_DEATH(static_cast<void>(cudaEventCreateWithFlags(&timing, 0)), "emulator: an event that takes the time");
  EXPECT_DEATH(
      {
        keep_faults(false);
        static_cast<void>(launch(device_ + 8, device_, stream_));
        static_cast<void>(cudaStreamSynchronize(stream_));
      },
      "emulator: misaligned address: 16 bytes .* thread .*SumMemory.*, PTX line .*ld.*device 0");
}

// PG "Creating a Graph Using Stream Capture".
class EmulatedCapture : public EmulatedRuntime {
 protected:
  cudaStreamCaptureStatus status(cudaStream_t of) {
    cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
    EXPECT_EQ(cudaStreamIsCapturing(of, &found), cudaSuccess);
    return found;
  }
  cudaError_t end_capture(cudaStream_t of) {
    cudaGraph_t graph = nullptr;
    return cudaStreamEndCapture(of, &graph);
  }
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, mode), cudaSuccess);
    ASSERT_EQ(status(stream_), cudaStreamCaptureStatusActive);
  }
};

TEST_F(EmulatedCapture, WhatIsCapturedIsNotRun) {
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusNone);
  ASSERT_EQ(cudaMemsetAsync(device_, 1, 1, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  begin();
  EXPECT_EQ(cudaMemsetAsync(device_, 2, 1, stream_), cudaSuccess);
  EXPECT_EQ(end_capture(stream_), cudaSuccess);
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusNone);
  ASSERT_EQ(cudaMemcpyAsync(host_, device_, 1, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(host_[0], std::byte{1});
}

TEST_F(EmulatedCapture, AnEventOfOutsideBreaksIt) {
  const cudaStream_t other = stream();
  ASSERT_EQ(cudaEventRecord(event_, other), cudaSuccess);
  begin();
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event_, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusInvalidated);
  EXPECT_EQ(cudaMemsetAsync(device_, 0, 1, stream_), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end_capture(stream_), cudaErrorStreamCaptureInvalidated);
}

TEST_F(EmulatedCapture, AnEventOfInsideTakesAStreamIn) {
  const cudaStream_t other = stream();
  const cudaEvent_t back = event();
  begin();
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other, event_, 0), cudaSuccess);
  EXPECT_EQ(status(other), cudaStreamCaptureStatusActive);
  ASSERT_EQ(cudaEventRecord(back, other), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(stream_, back, 0), cudaSuccess);
  EXPECT_EQ(end_capture(stream_), cudaSuccess);
  EXPECT_EQ(status(other), cudaStreamCaptureStatusNone);
  begin();
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other, event_, 0), cudaSuccess);
  EXPECT_EQ(end_capture(stream_), cudaErrorStreamCaptureUnjoined);
}

TEST_F(EmulatedCapture, ToAskOrToWaitBreaksIt) {
  begin();
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorCapturedEvent);
  EXPECT_EQ(end_capture(stream_), cudaErrorStreamCaptureInvalidated);
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  begin();
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end_capture(stream_), cudaErrorStreamCaptureInvalidated);
}

// RT cudaThreadExchangeStreamCaptureMode: calls that may be unsafe are forbidden to all threads during a global
// capture, but to those of relaxed mode.
TEST_F(EmulatedCapture, AGlobalOneForbidsCallsOfOtherThreads) {
  const auto allocates = [](cudaStreamCaptureMode mode) {
    cudaError_t error = cudaSuccess;
    std::thread([&] {
      EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
      void* data = nullptr;
      error = cudaMalloc(&data, 1);
      if (error == cudaSuccess) error = cudaFree(data);
    }).join();
    return error;
  };
  begin(cudaStreamCaptureModeGlobal);
  EXPECT_EQ(allocates(cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(allocates(cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(status(stream_), cudaStreamCaptureStatusActive);
  EXPECT_EQ(allocates(cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(end_capture(stream_), cudaErrorStreamCaptureInvalidated);
}

// RT cudaStreamIsCapturing: of the legacy stream, an error while a blocking stream is captured.
TEST_F(EmulatedCapture, TheDefaultStreamBreaksABlockingOnes) {
  const cudaStream_t blocking = stream(cudaStreamDefault);
  begin();
  EXPECT_EQ(status(nullptr), cudaStreamCaptureStatusNone);
  EXPECT_EQ(end_capture(stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
  cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &found), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(status(blocking), cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaMemsetAsync(device_, 0, 1, nullptr), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(end_capture(blocking), cudaErrorStreamCaptureInvalidated);
}

}  // namespace
}  // namespace deltasync::emulator
