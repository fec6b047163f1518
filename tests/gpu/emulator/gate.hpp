// Work in a stream that goes on when a test says so.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>

#include "tests/gpu/emulator/streams.hpp"

namespace deltasync::emulator {

class Gate {
 public:
  /// What is put into the stream from here on waits.
  explicit Gate(cudaStream_t stream) {
    EXPECT_EQ(cudaLaunchHostFunc(stream, wait, new std::shared_ptr<Mark>(mark_)), cudaSuccess);
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() { mark_->reach(); }

 private:
  static void wait(void* mark) {
    const std::unique_ptr<std::shared_ptr<Mark>> own(static_cast<std::shared_ptr<Mark>*>(mark));
    (*own)->wait();
  }

  const std::shared_ptr<Mark> mark_ = std::make_shared<Mark>();  // the stream may be slower than its test
};

}  // namespace deltasync::emulator
