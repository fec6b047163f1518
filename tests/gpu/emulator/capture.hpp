// An engine's stream, and a graph that is captured on it.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

namespace deltasync::emulator {

/// On device 0, which is the thread's from here on.
inline cudaStream_t make_stream(unsigned flags) {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
  return stream;
}

/// A capture as torch begins it: other threads may not even allocate.
class Captured {
 public:
  explicit Captured(cudaStream_t stream) : stream_(stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  }
  /// It has what the engine recorded and no more.
  void end() {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess) << "somebody ended it";
  }

 private:
  const cudaStream_t stream_;
};

}  // namespace deltasync::emulator
