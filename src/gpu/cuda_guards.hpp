// What a thread of an engine finds as it was after a call of this project: its current device, its last error, its
// graphs' captures. Of cuda_device.cpp.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace deltasync::gpu {

/// A function of the driver itself, whose errors are no last error of the runtime's; null if it has none.
template <class Function>
Function of_driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  const bool is_there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return is_there ? reinterpret_cast<Function>(function) : nullptr;
}

/// A thread that never chose a device has no context, and to set it "back" to device 0 would make one there.
inline bool thread_has_context() {
  static const auto get_current = of_driver<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  return get_current != nullptr && get_current(&context) == CUDA_SUCCESS && context != nullptr;
}

/// Not done is no error, and the runtime would note it as the thread's last one.
inline cudaError_t query_event(cudaEvent_t event) {
  static const auto ask = of_driver<CUresult (*)(CUevent)>("cuEventQuery");
  return ask == nullptr ? cudaEventQuery(event) : static_cast<cudaError_t>(ask(event));
}

/// Errors of this file are told by itself: an engine that asks for its thread's last error finds none of them, and its
/// own if there was one, unless a call failed meanwhile: CUDA keeps one only, and that is left in its place.
class LastError {
 public:
  LastError() = default;
  ~LastError() {
    if (before_ == cudaSuccess) static_cast<void>(cudaGetLastError());
  }
  LastError(const LastError&) = delete;
  LastError& operator=(const LastError&) = delete;

 private:
  const cudaError_t before_ = cudaPeekAtLastError();
};

/// The calling thread's current device is the engine's business: it is set back. Meanwhile its calls do not end a graph
/// capture that the engine has begun on another thread.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal) : error_(use(ordinal)) {
    // Behind it: a thread without a context would get one of device 0.
    if (error_ == cudaSuccess) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_));
  }
  ~CurrentDevice() {
    if (error_ == cudaSuccess) static_cast<void>(cudaThreadExchangeStreamCaptureMode(&capture_));
    if (set_back_) static_cast<void>(cudaSetDevice(before_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  /// Nothing may be done on the device after one.
  cudaError_t error() const noexcept { return error_; }

 private:
  cudaError_t use(int ordinal) {
    if (thread_has_context()) {
      const cudaError_t error = cudaGetDevice(&before_);
      if (error != cudaSuccess || before_ == ordinal) return error;
      set_back_ = true;
    }
    return cudaSetDevice(ordinal);
  }

  const LastError last_error_;  // ends last
  cudaStreamCaptureMode capture_ = cudaStreamCaptureModeRelaxed;
  int before_ = 0;
  bool set_back_ = false;
  const cudaError_t error_;
};

}  // namespace deltasync::gpu
