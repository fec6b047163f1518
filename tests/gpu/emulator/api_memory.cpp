// CUDA Runtime API, "Memory Management".
#include <cstdlib>
#include <cstring>

#include "tests/gpu/emulator/runtime.hpp"

namespace deltasync::emulator {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kPitchMax = (std::size_t{1} << 31) - 1;

/// Frees are not ordered in a stream: they wait for all work of all devices that may use the memory.
void drain_all() {
  for (int device = 0; device < runtime().devices(); ++device) runtime().drain(device);
}

/// All of it in one allocation of a device.
bool is_on_device(const void* at, std::uint64_t bytes) {
  const auto range = runtime().memory().find(at);
  return range && range->device != Memory::kHost && range->has(reinterpret_cast<std::uintptr_t>(at), bytes);
}

/// A copy of memory that is not pinned is none of this project's: it would wait where nobody expects it to.
cudaError_t check_host(const void* at, std::uint64_t bytes, const char* call) {
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  const auto first = runtime().memory().find(at);
  if (first && first->device == Memory::kHost && first->has(begin, bytes)) return cudaSuccess;
  const auto last = runtime().memory().find(reinterpret_cast<const void*>(begin + bytes - 1));
  const bool partly = (first && first->end > begin) || (last && last->end > begin + bytes - 1);
  if (partly) return cudaErrorInvalidValue;  // "partially pinned" memory: so does the driver
  end_process(std::string(call) + " of host memory that is neither pinned nor registered");
}

cudaError_t check_copy(const void* to, std::uint64_t to_bytes, const void* from, std::uint64_t from_bytes,
                       cudaMemcpyKind kind, const char* call) {
  if (kind != cudaMemcpyHostToDevice && kind != cudaMemcpyDeviceToHost) {
    end_process(std::string(call) + " other than between host and device");
  }
  const bool in = kind == cudaMemcpyHostToDevice;
  if (!is_on_device(in ? to : from, in ? to_bytes : from_bytes)) return cudaErrorInvalidValue;
  return check_host(in ? from : to, in ? from_bytes : to_bytes, call);
}

/// The bytes that an operation uses, in the order of its call.
struct Used {
  const void* at;
  std::uint64_t bytes;
};

/// When it is its turn, which may be later than somebody gave the memory back.
cudaError_t submit_use(cudaStream_t stream, const char* call, std::vector<Used> all, std::function<void()> work) {
  const int device = runtime().find(stream)->device;
  return runtime().submit(stream, [=, all = std::move(all), work = std::move(work)] {
    for (const Used& used : all) {
      const auto range = runtime().memory().find(used.at);
      if (range && range->has(reinterpret_cast<std::uintptr_t>(used.at), used.bytes)) continue;
      return runtime().fail(
          device, {Fault::Kind::out_of_bounds, std::string(call) + " of memory that was given back before its turn"});
    }
    work();
  });
}

}  // namespace
}  // namespace deltasync::emulator

using deltasync::emulator::noted;
using deltasync::emulator::runtime;
namespace emulator = deltasync::emulator;

extern "C" {

cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  *data = runtime().memory().allocate(emulator::this_thread().device, bytes);
  return noted(*data == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

cudaError_t cudaFree(void* data) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  if (data == nullptr) return cudaSuccess;
  emulator::drain_all();
  return noted(runtime().memory().free(data) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned /*flags: all of it is portable and mapped*/) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  const std::size_t pages = (bytes + emulator::kPageBytes - 1) / emulator::kPageBytes * emulator::kPageBytes;
  if (pages < bytes) return noted(cudaErrorMemoryAllocation);
  *data = std::aligned_alloc(emulator::kPageBytes, pages);
  if (*data == nullptr) return noted(cudaErrorMemoryAllocation);
  runtime().memory().add_host(*data, bytes, true);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* data) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  if (data == nullptr) return cudaSuccess;
  emulator::drain_all();
  if (!runtime().memory().remove_host(data, true)) return noted(cudaErrorInvalidValue);
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned /*flags*/) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  if (data == nullptr || bytes == 0) return noted(cudaErrorInvalidValue);
  const bool is_new = runtime().memory().add_host(data, bytes, false);
  return noted(is_new ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* data) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  emulator::drain_all();
  return noted(runtime().memory().remove_host(data, false) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  emulator::this_thread().take_context();
  if (const cudaError_t error = runtime().begin_call(emulator::this_thread().device); error != cudaSuccess) {
    return noted(error);
  }
  *attributes = {};
  const auto range = runtime().memory().find(data);
  if (!range || !range->has(reinterpret_cast<std::uintptr_t>(data), 1)) return cudaSuccess;  // of memory unknown to it
  const bool is_host = range->device == emulator::Memory::kHost;
  attributes->type = is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = is_host ? emulator::this_thread().device : range->device;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  emulator::this_thread().take_context();
  const cudaError_t error = emulator::check_copy(to, bytes, from, bytes, kind, "cudaMemcpyAsync");
  if (error != cudaSuccess) return noted(error);
  return noted(emulator::submit_use(stream, "cudaMemcpyAsync", {{to, bytes}, {from, bytes}}, [=] {
    std::memcpy(runtime().memory().real(to), runtime().memory().real(from), bytes);
  }));
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  emulator::this_thread().take_context();
  if (width > to_pitch || width > from_pitch || to_pitch > emulator::kPitchMax || from_pitch > emulator::kPitchMax) {
    return noted(cudaErrorInvalidPitchValue);
  }
  if (width == 0 || height == 0) return cudaSuccess;
  const std::uint64_t to_bytes = (height - 1) * to_pitch + width;
  const std::uint64_t from_bytes = (height - 1) * from_pitch + width;
  const cudaError_t error = emulator::check_copy(to, to_bytes, from, from_bytes, kind, "cudaMemcpy2DAsync");
  if (error != cudaSuccess) return noted(error);
  return noted(emulator::submit_use(stream, "cudaMemcpy2DAsync", {{to, to_bytes}, {from, from_bytes}}, [=] {
    std::byte* const target = runtime().memory().real(to);
    const std::byte* const source = runtime().memory().real(from);
    for (std::size_t row = 0; row < height; ++row) {
      std::memcpy(target + row * to_pitch, source + row * from_pitch, width);
    }
  }));
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  emulator::this_thread().take_context();
  if (!emulator::is_on_device(data, bytes)) return noted(cudaErrorInvalidValue);
  return noted(emulator::submit_use(stream, "cudaMemsetAsync", {{data, bytes}},
                                    [=] { std::memset(runtime().memory().real(data), value, bytes); }));
}

}  // extern "C"
