// CUDA Runtime API, "Device Management", "Error Handling" and "Driver Entry Point Access".
#include <cuda.h>

#include <cstring>

#include "tests/gpu/emulator/runtime.hpp"

using deltasync::emulator::noted;
using deltasync::emulator::runtime;
namespace emulator = deltasync::emulator;

namespace {

CUresult get_current_context(CUcontext* context) {
  const emulator::ThreadState& thread = emulator::this_thread();
  *context = thread.has_context ? reinterpret_cast<CUcontext>(&runtime()) : nullptr;
  return CUDA_SUCCESS;
}

/// The driver's errors have the runtime's numbers, and are no thread's last one.
CUresult query_event(CUevent event) {
  return static_cast<CUresult>(emulator::query(event));
}

struct ErrorWords {
  cudaError_t error;
  const char* name;
  const char* words;
};
#define DELTASYNC_EMULATED_ERROR(error, words) \
  { error, #error, words }
constexpr ErrorWords kErrors[] = {
    DELTASYNC_EMULATED_ERROR(cudaSuccess, "no error"),
    DELTASYNC_EMULATED_ERROR(cudaErrorInvalidValue, "invalid argument"),
    DELTASYNC_EMULATED_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    DELTASYNC_EMULATED_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    DELTASYNC_EMULATED_ERROR(cudaErrorInvalidPitchValue, "invalid pitch argument"),
    DELTASYNC_EMULATED_ERROR(cudaErrorInsufficientDriver,
                             "CUDA driver version is insufficient for CUDA runtime version"),
    DELTASYNC_EMULATED_ERROR(cudaErrorUnsupportedPtxVersion,
                             "the provided PTX was compiled with an unsupported toolchain."),
    DELTASYNC_EMULATED_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    DELTASYNC_EMULATED_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    DELTASYNC_EMULATED_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    DELTASYNC_EMULATED_ERROR(cudaErrorIllegalState, "operation not supported in this state"),
    DELTASYNC_EMULATED_ERROR(cudaErrorNotReady, "device not ready"),
    DELTASYNC_EMULATED_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    DELTASYNC_EMULATED_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    DELTASYNC_EMULATED_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    DELTASYNC_EMULATED_ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the memory is registered already"),
    DELTASYNC_EMULATED_ERROR(cudaErrorHostMemoryNotRegistered, "the memory is not registered"),
    DELTASYNC_EMULATED_ERROR(cudaErrorStreamCaptureUnsupported, "not permitted when a stream is capturing"),
    DELTASYNC_EMULATED_ERROR(cudaErrorStreamCaptureInvalidated, "failed due to a previous error during capture"),
    DELTASYNC_EMULATED_ERROR(cudaErrorStreamCaptureMerge, "would merge two capture sequences"),
    DELTASYNC_EMULATED_ERROR(cudaErrorStreamCaptureUnjoined, "capture has unjoined work"),
    DELTASYNC_EMULATED_ERROR(cudaErrorStreamCaptureIsolation, "depends on uncaptured work in another stream"),
    DELTASYNC_EMULATED_ERROR(cudaErrorStreamCaptureImplicit, "would make the legacy stream depend on a capture"),
    DELTASYNC_EMULATED_ERROR(cudaErrorCapturedEvent, "not permitted on an event last recorded in a capture"),
};
#undef DELTASYNC_EMULATED_ERROR

const ErrorWords& words_of(cudaError_t error) {
  for (const ErrorWords& known : kErrors) {
    if (known.error == error) return known;
  }
  emulator::end_process("no name for CUDA error " + std::to_string(error));
}

}  // namespace

extern "C" {

// "Since CUDA 11.0", a runtime runs with drivers of its major version.
cudaError_t cudaGetDeviceCount(int* count) {
  if (runtime().driver_version / 1000 < CUDART_VERSION / 1000) {
    *count = 0;
    return noted(cudaErrorInsufficientDriver);
  }
  *count = runtime().devices();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = emulator::this_thread().device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= runtime().devices()) return noted(cudaErrorInvalidDevice);
  emulator::this_thread().device = device;
  emulator::this_thread().take_context();  // since CUDA 12 the call makes the device's primary context
  return noted(runtime().begin_call(device));
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= runtime().devices()) return noted(cudaErrorInvalidDevice);
  *properties = {};
  std::strncpy(properties->name, "emulated from PTX", sizeof properties->name - 1);
  properties->major = 8;
  properties->totalGlobalMem = emulator::kDeviceBytes;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = runtime().driver_version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return std::exchange(emulator::this_thread().last, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() {
  return emulator::this_thread().last;
}
const char* cudaGetErrorName(cudaError_t error) {
  return words_of(error).name;
}
const char* cudaGetErrorString(cudaError_t error) {
  return words_of(error).words;
}

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* result) {
#else
cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long /*flags*/,
                                    cudaDriverEntryPointQueryResult* result) {
#endif
  const std::string_view name = symbol;
  *function = name == "cuCtxGetCurrent" ? reinterpret_cast<void*>(&get_current_context)
              : name == "cuEventQuery"  ? reinterpret_cast<void*>(&query_event)
                                        : nullptr;
  if (*function == nullptr) emulator::end_process(std::string("the driver's ") + symbol + " is not emulated");
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
