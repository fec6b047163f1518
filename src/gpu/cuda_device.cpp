#include "gpu/cuda_device.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string_view>

#include "base/log.hpp"
#include "gpu/cuda_guards.hpp"
#include "gpu/cuda_launch.hpp"
#include "gpu/ends_later.hpp"
#include "gpu/kept_pinned.hpp"
#include "gpu/registrations.hpp"

namespace deltasync::gpu {
namespace {

/// In CUDA's own words.
std::string words_of(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

/// `advice` is what a driver of this major version wants else than a newer one.
std::string words_of_old_driver(std::string_view advice) {
  int driver = 0;
  int runtime = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  if (driver == 0) return "there is no driver";
  const auto words = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  return "the driver is for CUDA " + words(driver) + " at most, and this build for " + words(runtime) +
         ": install a newer driver, or a build " + std::string(advice) + " CUDA " + std::to_string(driver / 1000);
}

/// On the thread for what waits for all devices: nobody's calls, and nobody to be told.
cudaError_t end_on_device(int ordinal, cudaError_t (*end)(void*), void* data) {
  const CurrentDevice current(ordinal);
  const cudaError_t error = current.error() != cudaSuccess ? current.error() : end(data);
  // The process ends, and all with it; there may be no log any more.
  return error == cudaErrorCudartUnloading ? cudaSuccess : error;
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, std::string name) : ordinal_(ordinal), name_(std::move(name)) {}
  ~CudaDevice() override {
    if (pool_ == nullptr) return;
    const CurrentDevice current(ordinal_);
    static_cast<void>(cudaStreamDestroy(memory_stream_));
    static_cast<void>(cudaMemPoolDestroy(pool_));
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  /// Before the first call. Memory comes from a pool in a stream of its own from then on, where the device has pools.
  /// Other devices, as NCCL has them, do not reach it.
  Status make_pool();

  const std::string& name() const override { return name_; }
  Result<Memory> allocate(std::uint64_t bytes) override;
  Result<Memory> pin(std::uint64_t bytes) override;
  Result<Memory> register_host(std::byte* data, std::uint64_t bytes, std::shared_ptr<const void> keeper) override;
  Result<std::unique_ptr<Stream>> make_stream() override;
  Result<std::unique_ptr<Stream>> adopt_stream(StreamHandle handle) override;
  Result<std::unique_ptr<Event>> make_event() override;

  int ordinal() const noexcept { return ordinal_; }
  /// The call's error, with its name; `bytes` too unless it is about none.
  Status check(cudaError_t error, const char* call, std::uint64_t bytes = 0) const {
    if (error == cudaSuccess) return {};
    std::string what = name_ + ": " + call;
    if (bytes != 0) what += " of " + std::to_string(bytes) + " bytes";
    return Error(error == cudaErrorMemoryAllocation ? Errc::no_space : Errc::io, what + ": " + words_of(error));
  }
  /// A copy of memory that is not pinned would wait for all that the stream has, without a deadline.
  Status check_pinned(const std::byte* host) const {
    cudaPointerAttributes found{};
    DS_TRY(check(cudaPointerGetAttributes(&found, host), "cudaPointerGetAttributes"));
    if (found.type == cudaMemoryTypeHost) return {};
    return Error(Errc::io, name_ + ": somebody else has ended the registration of host memory that is copied");
  }

 protected:
  void give_back(Memory::Kind kind, std::byte* data, std::uint64_t bytes) noexcept override {
    switch (kind) {
      case Memory::Kind::pinned: return KeptPinned::of_process().keep(data, bytes);
      case Memory::Kind::registered: return Registrations::of_process().remove(data);
      case Memory::Kind::device: return free(data);
    }
  }

 private:
  // cudaFree() waits for all that runs on the device, an engine's work among it, without a deadline.
  void free(std::byte* data) noexcept {
    const auto warn = [name = name_](cudaError_t error) {
      if (error != cudaSuccess) log::warn("gpu cannot_give_back device=\"{}\" why=\"{}\"", name, words_of(error));
    };
    if (pool_ == nullptr) {
      EndsLater::of_process().put([=, ordinal = ordinal_] { warn(end_on_device(ordinal, cudaFree, data)); });
      return;
    }
    const CurrentDevice current(ordinal_);
    cudaError_t error = current.error();
    if (error == cudaSuccess) error = cudaFreeAsync(data, memory_stream_);
    warn(error == cudaSuccess ? settle_memory() : error);
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
  ~CudaEvent() override {
    const CurrentDevice current(device_.ordinal());
    static_cast<void>(cudaEventDestroy(event_));
  }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  Result<bool> done() override {
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    const cudaError_t state = query_event(event_);
    if (state == cudaErrorNotReady) return false;
    DS_TRY(device_.check(state, "cuEventQuery"));
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
    if (!own_) return;
    // Returns at once; the driver ends the stream when its work is done.
    const CurrentDevice current(device_.ordinal());
    static_cast<void>(cudaStreamDestroy(stream_));
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
    DS_TRY(device_.check_pinned(host));
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
    // The default stream, while another is captured that waits for it.
    if (error == cudaErrorStreamCaptureImplicit) return true;
    DS_TRY(device_.check(error, "cudaStreamIsCapturing"));
    return status != cudaStreamCaptureStatusNone;
  }

  StreamHandle handle() const noexcept override { return {stream_}; }

 private:
  Status copy(std::byte* to, const std::byte* from, std::uint64_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return {};
    const CurrentDevice current(device_.ordinal());
    DS_TRY(device_.check(current.error(), "cudaSetDevice"));
    DS_TRY(device_.check_pinned(kind == cudaMemcpyHostToDevice ? from : to));
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
    static_cast<void>(cudaStreamDestroy(stream));
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

Result<Memory> CudaDevice::register_host(std::byte* data, std::uint64_t bytes, std::shared_ptr<const void> keeper) {
  const auto begin = [&]() -> Status {
    const CurrentDevice current(ordinal_);
    DS_TRY(check(current.error(), "cudaSetDevice"));
    // Portable: for all devices of the process.
    const cudaError_t error = cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
    if (error != cudaErrorHostMemoryAlreadyRegistered) return check(error, "cudaHostRegister", bytes);
    // In part, so that a copy fails in the middle; or for as long as somebody likes.
    return Error(Errc::io, name_ + ": somebody else has registered a part of these " + std::to_string(bytes) +
                               " bytes of host memory with CUDA, or all of them");
  };
  const auto end = [name = name_, ordinal = ordinal_, data]() -> Status {
    const cudaError_t error = end_on_device(ordinal, cudaHostUnregister, data);
    if (error == cudaSuccess) return {};
    if (error != cudaErrorHostMemoryNotRegistered) {
      return Error(Errc::io, name + ": cudaHostUnregister: " + words_of(error));
    }
    log::warn("gpu registration_ended_by_others device=\"{}\"", name);
    return {};
  };
  DS_TRY(Registrations::of_process().add(name_, data, bytes, std::move(keeper), begin, end));
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
  const LastError last_error;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    const std::string why = error == cudaErrorInsufficientDriver ? words_of_old_driver("for") : words_of(error);
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
  const LastError last_error;
  cudaDeviceProp properties{};
  const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error != cudaSuccess) return Error(Errc::io, name + ": cudaGetDeviceProperties: " + words_of(error));
  auto device = std::make_unique<CudaDevice>(ordinal, name + " (" + properties.name + ")");
  if (use == Use::kernels) {
    const CurrentDevice current(ordinal);
    DS_TRY(device->check(current.error(), "cudaSetDevice"));
    const cudaError_t loaded = load_kernels();
    // The device is newer than this build, and the driver older: it cannot make machine code of the build's PTX.
    if (loaded == cudaErrorUnsupportedPtxVersion) {
      return Error(Errc::unsupported, device->name() + ": " + words_of_old_driver("by an older toolkit for"));
    }
    DS_TRY(device->check(loaded, "cudaFuncGetAttributes, to load the kernels"));
    DS_TRY(device->make_pool());
    DS_TRY(EndsLater::of_process().start());
  }
  return std::unique_ptr<Device>(std::move(device));
}

}  // namespace deltasync::gpu
