// CUDA Runtime API, "Stream Ordered Memory Allocator", with pools' threshold of 0: what is freed is the device's again
// when a stream is synchronized with.
#include "tests/gpu/emulator/runtime.hpp"

using deltasync::emulator::noted;
using deltasync::emulator::runtime;
namespace emulator = deltasync::emulator;

extern "C" {

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= runtime().devices()) return noted(cudaErrorInvalidDevice);
  if (attribute != cudaDevAttrMemoryPoolsSupported) {
    emulator::end_process("device attribute " + std::to_string(attribute) + " is not emulated");
  }
  *value = runtime().has_pools ? 1 : 0;
  return noted(runtime().begin_call(device));
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  emulator::this_thread().take_context();
  const int device = properties->location.id;
  if (properties->allocType != cudaMemAllocationTypePinned || properties->location.type != cudaMemLocationTypeDevice) {
    emulator::end_process("pools of other memory than a device's are not emulated");
  }
  if (device < 0 || device >= runtime().devices()) return noted(cudaErrorInvalidDevice);
  if (const cudaError_t error = runtime().begin_call(device); error != cudaSuccess) return noted(error);
  *pool = reinterpret_cast<cudaMemPool_t>(new int(device));
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  emulator::this_thread().take_context();
  const auto* const device = reinterpret_cast<const int*>(pool);
  const cudaError_t error = runtime().begin_call(*device);
  delete device;  // what was taken from it stays
  return noted(error);
}

cudaError_t cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t pool, cudaStream_t stream) {
  emulator::this_thread().take_context();
  const int device = *reinterpret_cast<const int*>(pool);
  if (const cudaError_t error = runtime().error_of(device); error != cudaSuccess) return noted(error);
  std::byte* const at = runtime().memory().allocate(device, bytes, emulator::Memory::When::later);
  if (at == nullptr) return noted(cudaErrorMemoryAllocation);
  *data = at;
  // Other streams that come sooner find nothing there.
  return noted(runtime().submit(stream, [at] { runtime().memory().arrive(at); }));
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  emulator::this_thread().take_context();
  return noted(runtime().submit(stream, [data] {
    if (!runtime().memory().free(data, emulator::Memory::When::later)) {
      emulator::end_process("cudaFreeAsync of what is no memory of a device");
    }
  }));
}

}  // extern "C"
