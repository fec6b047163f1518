// Work on a device in tests: copies and kernels one after the other in a stream, and one wait at the end.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "base/deadline.hpp"
#include "gpu/device.hpp"

namespace deltasync::test {

class Work {
 public:
  explicit Work(gpu::Device& device) : device_(device) {
    stream_ = value(device.make_stream());
    event_ = value(device.make_event());
  }
  ~Work() { finish(); }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  gpu::Stream& stream() { return *stream_; }

  /// New device memory that has these bytes, once it is its turn.
  template <class T>
  T* up(std::span<const T> values) {
    device_memory_.push_back(value(device_.allocate(values.size_bytes())));
    T* const at = reinterpret_cast<T*>(device_memory_.back().data());
    to(reinterpret_cast<std::byte*>(at), std::as_bytes(values));
    return at;
  }
  template <class T>
  T* up(const std::vector<T>& values) {
    return up(std::span<const T>(values));
  }
  void to(std::byte* device, std::span<const std::byte> bytes) {
    pinned_.push_back(value(device_.pin(bytes.size())));
    if (!bytes.empty()) std::memcpy(pinned_.back().data(), bytes.data(), bytes.size());
    check(stream_->copy_in(device, pinned_.back().data(), bytes.size()));
  }
  void run(const gpu::Kernel& kernel) { check(stream_->launch(kernel)); }
  /// Waits for all that came before.
  template <class T>
  std::vector<T> down(const T* device, std::size_t count) {
    std::vector<T> values(count);
    pinned_.push_back(value(device_.pin(count * sizeof(T))));
    const gpu::Memory& pinned = pinned_.back();
    check(stream_->copy_out(pinned.data(), reinterpret_cast<const std::byte*>(device), pinned.bytes()));
    finish();
    if (count != 0) std::memcpy(values.data(), pinned.data(), count * sizeof(T));
    return values;
  }
  void finish() {
    check(stream_->record(*event_));
    check(gpu::wait(*event_, Deadline::after(std::chrono::minutes(2)), "waiting for a test's work"));
  }

  static void check(const Status& status) {
    if (!status.ok()) ADD_FAILURE() << status.error().to_string();
  }

 private:
  template <class T>
  static T value(Result<T> result) {
    if (!result.ok()) ADD_FAILURE() << result.error().to_string();
    return *std::move(result);
  }

  gpu::Device& device_;
  std::unique_ptr<gpu::Stream> stream_;
  std::unique_ptr<gpu::Event> event_;
  std::vector<gpu::Memory> device_memory_;
  std::vector<gpu::Memory> pinned_;
};

}  // namespace deltasync::test
