#include "gpu/cuda_device.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "base/log.hpp"
#include "gpu/cuda_launch.hpp"
#include "gpu/kept_pinned.hpp"

namespace deltasync::gpu {
namespace {

/// A thread that never chose a device has no context, and to set it "back" to device 0 would make one there.
bool thread_has_context() {
  using GetCurrent = CUresult (*)(CUcontext*);
  static const GetCurrent get_current = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuCtxGetCurrent", &function, cudaEnableDefault, &found);
#endif
    const bool is_there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<GetCurrent>(function) : nullptr;
  }();
  CUcontext context = nullptr;
  return get_current != nullptr && get_current(&context) == CUDA_SUCCESS && context != nullptr;
}

/// Where nobody can be told: an engine that asks for its last error would take it for its own.
void forget(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
}

/// The calling thread's current device is the engine's business: it is set back. Meanwhile its calls do not end a graph
/// capture that the engine has begun on another thread.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_));
    if (thread_has_context()) {
      error_ = cudaGetDevice(&before_);
      if (error_ != cudaSuccess || before_ == ordinal) return;
      set_back_ = true;
    }
    error_ = cudaSetDevice(ordinal);
  }
  ~CurrentDevice() {
    if (set_back_) forget(cudaSetDevice(before_));
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  /// Nothing may be done on the device after one.
  cudaError_t error() const noexcept { return error_; }

 private:
  cudaStreamCaptureMode capture_ = cudaStreamCaptureModeRelaxed;
  int before_ = 0;
  bool set_back_ = false;
  cudaError_t error_ = cudaSuccess;
};

/// In CUDA's own words.
std::string words_of(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

std::string words_of_old_driver() {
  int driver = 0;
  int runtime = 0;
  forget(cudaDriverGetVersion(&driver));
  forget(cudaRuntimeGetVersion(&runtime));
  if (driver == 0) return "there is no driver";
  const auto words = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  return "the driver is for CUDA " + words(driver) + " at most, and this build for " + words(runtime) +
         ": install a newer driver, or a build for CUDA " + std::to_string(driver / 1000);
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, std::string name) : ordinal_(ordinal), name_(std::move(name)) {}
  ~CudaDevice() override {
    if (pool_ == nullptr) return;
    const CurrentDevice current(ordinal_);
    forget(cudaStreamDestroy(memory_stream_));
    forget(cudaMemPoolDestroy(pool_));
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  /// Before the first call. Memory comes from a pool in a stream of its own from then on, where the device has pools.
  /// Other devices, as NCCL has them, do not reach it.
  Status make_pool();

  const std::string& name() const override { return name_; }
  Result<Memory> allocate(std::uint64_t bytes) override;
  Result<Memory> pin(std::uint64_t bytes) override;
  Result<Memory> register_host(std::byte* data, std::uint64_t bytes) override;
  Result<std::unique_ptr<Stream>> make_stream() override;
  Result<std::unique_ptr<Stream>> adopt_stream(StreamHandle handle) override;
  Result<std::unique_ptr<Event>> make_event() override;

  int ordinal() const noexcept { return ordinal_; }
  /// The call's error, with its name; `bytes` too unless it is about none.
  Status check(cudaError_t error, const char* call, std::uint64_t bytes = 0) const {
    if (error == cudaSuccess) return {};
    static_cast<void>(cudaGetLastError());  // it is told here: an engine that asks later would take it for its own
    std::string what = name_ + ": " + call;
    if (bytes != 0) what += " of " + std::to_string(bytes) + " bytes";
    return Error(error == cudaErrorMemoryAllocation ? Errc::no_space : Errc::io, what + ": " + words_of(error));
  }

 protected:
  void give_back(Memory::Kind kind, std::byte* data, std::uint64_t bytes) noexcept override {
    if (kind == Memory::Kind::pinned) return KeptPinned::of_process().keep(data, bytes);
    const CurrentDevice current(ordinal_);
    const cudaError_t error = current.error() != cudaSuccess ? current.error() : free(kind, data);
    if (error == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());  // as in check()
    log::warn("gpu cannot_give_back device=\"{}\" why=\"{}\"", name_, words_of(error));
  }

 private:
  cudaError_t free(Memory::Kind kind, std::byte* data) noexcept {
    switch (kind) {
      case Memory::Kind::registered: return cudaHostUnregister(data);
      case Memory::Kind::pinned:  // kept
      case Memory::Kind::borrowed: return cudaSuccess;
      case Memory::Kind::device: break;
    }
    // cudaFree() would wait for all that runs on the device, an engine's work among it, without a deadline.
    if (pool_ == nullptr) return cudaFree(data);
    const cudaError_t error = cudaFreeAsync(data, memory_stream_);
    return error == cudaSuccess ? settle_memory() : error;
  }
  /// Nothing but memory's coming and going is in that stream. Gives the device what the pool has free, too.
  cudaError_t settle_memory() const noexcept { return cudaStreamSynchronize(memory_stream_); }

  const int ordinal_;
  const std::string name_;
  cudaMemPool_t pool_ = nullptr;  ///< null: the device has none
  cudaStream_t memory_stream_ = nullptr;
};

class CudaEvent final : public Event {
 public:
  CudaEvent(const CudaDevice& device, cudaEvent_t event) : device_(device), event_(event) {}
  ~CudaEvent() override { forget(cudaEventDestroy(event_)); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  Result<bool> done() override {
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    const cudaError_t state = cudaEventQuery(event_);
    if (state == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    DS_TRY(device_.check(state, "cudaEventQuery"));
    return true;
  }
  cudaEvent_t raw() const noexcept { return event_; }

 private:
  const CudaDevice& device_;
  const cudaEvent_t event_;
};

class CudaStream final : public Stream {
 public:
  CudaStream(const CudaDevice& device, cudaStream_t stream, bool own) : device_(device), stream_(stream), own_(own) {}
  ~CudaStream() override {
    // Returns at once; the driver ends the stream when its work is done.
    if (own_) forget(cudaStreamDestroy(stream_));
  }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  Status copy_in(std::byte* device, const std::byte* host, std::uint64_t bytes) override {
    return copy(device, host, bytes, cudaMemcpyHostToDevice);
  }
  Status copy_out(std::byte* host, const std::byte* device, std::uint64_t bytes) override {
    return copy(host, device, bytes, cudaMemcpyDeviceToHost);
  }
  Status copy_out_rows(std::byte* host, std::uint64_t host_stride, const std::byte* device, std::uint64_t device_stride,
                       std::uint64_t row_bytes, std::uint64_t rows) override {
    if (row_bytes == 0 || rows == 0) return {};
    if (rows == 1 || (host_stride == row_bytes && device_stride == row_bytes)) {
      return copy_out(host, device, rows * row_bytes);
    }
    // CUDA refuses longer strides.
    constexpr std::uint64_t kPitchMax = (std::uint64_t{1} << 31) - 1;
    if (host_stride > kPitchMax || device_stride > kPitchMax) {
      for (std::uint64_t row = 0; row < rows; ++row) {
        DS_TRY(copy_out(host + row * host_stride, device + row * device_stride, row_bytes));
      }
      return {};
    }
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    return device_.check(cudaMemcpy2DAsync(host, static_cast<std::size_t>(host_stride), device,
                                           static_cast<std::size_t>(device_stride), static_cast<std::size_t>(row_bytes),
                                           static_cast<std::size_t>(rows), cudaMemcpyDeviceToHost, stream_),
                         "cudaMemcpy2DAsync", rows * row_bytes);
  }
  Status zero(std::byte* device, std::uint64_t bytes) override {
    if (bytes == 0) return {};
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    return device_.check(cudaMemsetAsync(device, 0, static_cast<std::size_t>(bytes), stream_), "cudaMemsetAsync",
                         bytes);
  }
  Status launch(const Kernel& kernel) override {
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    return std::visit(
        [&](const auto& k) -> Status {
          if (k.blocks() == 0) return {};
          return device_.check(gpu::launch(k, stream_), "a kernel's launch");
        },
        kernel);
  }
  Status record(Event& event) override {
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    return device_.check(cudaEventRecord(static_cast<CudaEvent&>(event).raw(), stream_), "cudaEventRecord");
  }
  Status wait_for(Event& event) override {
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    return device_.check(cudaStreamWaitEvent(stream_, static_cast<CudaEvent&>(event).raw(), 0), "cudaStreamWaitEvent");
  }

  Result<bool> is_captured() override {
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream_, &status);
    if (error == cudaErrorStreamCaptureImplicit) {  // the default stream, while another is captured that waits for it
      static_cast<void>(cudaGetLastError());
      return true;
    }
    DS_TRY(device_.check(error, "cudaStreamIsCapturing"));
    return status != cudaStreamCaptureStatusNone;
  }

  StreamHandle handle() const noexcept override { return {stream_}; }

 private:
  Status copy(std::byte* to, const std::byte* from, std::uint64_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return {};
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    return device_.check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream_), "cudaMemcpyAsync",
                         bytes);
  }

  const CudaDevice& device_;
  const cudaStream_t stream_;
  const bool own_;
};

Status CudaDevice::make_pool() {
  const CurrentDevice current(ordinal_);
  DS_TRY(check(current.error(), "cudaSetDevice"));
  int has_pools = 0;
  DS_TRY(
      check(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, ordinal_), "cudaDeviceGetAttribute"));
  if (has_pools == 0) return {};
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = ordinal_;
  cudaStream_t stream = nullptr;
  DS_TRY(check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"));
  Status made = check(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
  if (made.ok()) {
    memory_stream_ = stream;
  } else {
    forget(cudaStreamDestroy(stream));
  }
  return made;
}

Result<Memory> CudaDevice::allocate(std::uint64_t bytes) {
  const CurrentDevice current(ordinal_);
  DS_TRY(check(current.error(), "cudaSetDevice"));
  void* data = nullptr;
  const auto size = static_cast<std::size_t>(std::max<std::uint64_t>(1, bytes));
  if (pool_ == nullptr) {
    DS_TRY(check(cudaMalloc(&data, size), "cudaMalloc", bytes));
  } else {
    DS_TRY(check(cudaMallocFromPoolAsync(&data, size, pool_, memory_stream_), "cudaMallocFromPoolAsync", bytes));
    DS_TRY(check(settle_memory(), "cudaStreamSynchronize"));
  }
  return Memory(*this, Memory::Kind::device, static_cast<std::byte*>(data), bytes);
}

Result<Memory> CudaDevice::pin(std::uint64_t bytes) {
  const CurrentDevice current(ordinal_);
  DS_TRY(check(current.error(), "cudaSetDevice"));
  if (std::byte* const kept = KeptPinned::of_process().take(bytes))
    return Memory(*this, Memory::Kind::pinned, kept, bytes);
  void* data = nullptr;
  const auto size = static_cast<std::size_t>(KeptPinned::rounded(bytes));
  DS_TRY(check(cudaHostAlloc(&data, size, cudaHostAllocPortable), "cudaHostAlloc", bytes));
  return Memory(*this, Memory::Kind::pinned, static_cast<std::byte*>(data), bytes);
}

Result<Memory> CudaDevice::register_host(std::byte* data, std::uint64_t bytes) {
  const CurrentDevice current(ordinal_);
  DS_TRY(check(current.error(), "cudaSetDevice"));
  // Portable: for all devices of the process. The second device finds it done.
  const cudaError_t error = cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
  if (error == cudaErrorHostMemoryAlreadyRegistered) {
    forget(error);  // or the next launch would report it
    for (const std::byte* const end : {data, data + bytes - 1}) {
      cudaPointerAttributes found{};
      DS_TRY(check(cudaPointerGetAttributes(&found, end), "cudaPointerGetAttributes"));
      if (found.type == cudaMemoryTypeHost) continue;
      // Copies across its edge would be refused in the middle of an update.
      return Error(Errc::io, name_ + ": somebody else has registered a part of these " + std::to_string(bytes) +
                                 " bytes of host memory with CUDA");
    }
    return Memory(*this, Memory::Kind::borrowed, data, bytes);
  }
  DS_TRY(check(error, "cudaHostRegister", bytes));
  return Memory(*this, Memory::Kind::registered, data, bytes);
}

Result<std::unique_ptr<Stream>> CudaDevice::make_stream() {
  const CurrentDevice current(ordinal_);
  DS_TRY(check(current.error(), "cudaSetDevice"));
  cudaStream_t stream = nullptr;
  // Not held up by what others put into the default stream.
  DS_TRY(check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"));
  return std::unique_ptr<Stream>(std::make_unique<CudaStream>(*this, stream, true));
}

Result<std::unique_ptr<Stream>> CudaDevice::adopt_stream(StreamHandle handle) {
  return std::unique_ptr<Stream>(std::make_unique<CudaStream>(*this, static_cast<cudaStream_t>(handle.raw), false));
}

Result<std::unique_ptr<Event>> CudaDevice::make_event() {
  const CurrentDevice current(ordinal_);
  DS_TRY(check(current.error(), "cudaSetDevice"));
  cudaEvent_t event = nullptr;
  DS_TRY(check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
  return std::unique_ptr<Event>(std::make_unique<CudaEvent>(*this, event));
}

}  // namespace

Result<std::int32_t> cuda_device_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    forget(error);
    const std::string why = error == cudaErrorInsufficientDriver ? words_of_old_driver() : words_of(error);
    return Error(Errc::unsupported, "no CUDA device: " + why);
  }
  if (count == 0) return Error(Errc::unsupported, "no CUDA device");
  return count;
}

Result<std::unique_ptr<Device>> open_cuda_device(std::int32_t ordinal, Use use) {
  const std::string name = "cuda:" + std::to_string(ordinal);
  const auto count = cuda_device_count();
  if (!count.ok()) return Error(count.error()).with_context(name);
  if (ordinal < 0 || ordinal >= *count) {
    return Error(Errc::unsupported, name + ": there are " + std::to_string(*count) + " CUDA devices");
  }
  cudaDeviceProp properties{};
  const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return Error(Errc::io, name + ": cudaGetDeviceProperties: " + words_of(error));
  }
  auto device = std::make_unique<CudaDevice>(ordinal, name + " (" + properties.name + ")");
  if (use == Use::kernels) {
    const CurrentDevice current(ordinal);
    DS_TRY(device->check(current.error(), "cudaSetDevice"));
    DS_TRY(device->check(load_kernels(), "cudaFuncGetAttributes, to load the kernels"));
    DS_TRY(device->make_pool());
  }
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace deltasync::gpu
