// A CUDA runtime without a device: the calls that this project makes, with the promises of NVIDIA's "CUDA Runtime API"
// and "CUDA C++ Programming Guide", over kernels that are interpreted. A call that is not emulated does not link; a use
// that is not emulated ends the process and names itself, and so does a launch that is no valid one (see keep_faults).
//
// DELTASYNC_EMULATED_DEVICES: how many, else 2. DELTASYNC_EMULATED_SEED: of all that is left to chance, else 1.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/gpu/emulator/launch.hpp"
#include "tests/gpu/emulator/memory.hpp"
#include "tests/gpu/emulator/streams.hpp"

namespace deltasync::emulator {

inline constexpr int kDevicesMax = 8;
inline constexpr std::uint64_t kDeviceBytes = std::uint64_t{8} << 30;

/// Prints what is not emulated, or what a launch did wrong.
[[noreturn]] void end_process(const std::string& why);

/// From here on a fault is what it is on a device: an error that every later call returns (true), instead of the
/// process's end. Forgets all devices' errors.
void keep_faults(bool keep);
/// What the last launch that was no valid one did, of all devices.
std::string last_fault();

/// What all kernels did since the last call.
Counts take_counts();

/// The n-th call from here on (1: the next; 0: none) that may fail does: with this error, which is what every later
/// call for its device returns if it `stays`, as after a kernel that went wrong. Faults have to be kept.
void fail_call(std::int64_t n, cudaError_t error = cudaSuccess, bool stays = false);
/// Whether fewer calls than that have been made.
bool call_is_due();
/// As cudaDriverGetVersion() has it. One of an older major version than the runtime's has no devices for it.
void set_driver_version(int version);
/// Whether devices have memory pools.
void set_pools(bool has_pools);
/// All devices are as good as new, once what is in their streams has ended.
void revive();

/// The default stream is the host's business in a thread: what CUDA keeps for each.
struct ThreadState {
  int device = 0;
  bool has_context = false;
  unsigned contexts = 0;  ///< bit i: its calls would have made device i's, were there none
  cudaError_t last = cudaSuccess;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

  /// By a call that works in the current device's context: most do, some that do not look like it among them.
  void take_context() {
    has_context = true;
    contexts |= 1u << device;
  }
};
ThreadState& this_thread();

/// Notes the error for cudaGetLastError().
cudaError_t noted(cudaError_t error);
/// cudaEventQuery() and cuEventQuery(), which does not note it.
cudaError_t query(cudaEvent_t event);

class Runtime {
 public:
  Runtime();

  int devices() const noexcept { return devices_; }
  Memory& memory() noexcept { return memory_; }
  std::uint64_t next_seed() { return seed_++; }

  Stream* make_stream(bool is_blocking);
  void destroy_stream(Stream* stream);
  /// Null is the current device's default stream.
  Stream* find(cudaStream_t stream);
  /// Runs it in the stream; in a capture, not at all.
  cudaError_t submit(cudaStream_t stream, std::function<void()> work);
  /// Also after an error of the device.
  cudaError_t submit_mark(cudaStream_t stream, std::shared_ptr<Mark> mark);
  cudaError_t submit_wait(cudaStream_t stream, std::shared_ptr<Mark> mark);
  void drain(int device);
  void end_all();

  /// The device's error, which stays.
  cudaError_t error_of(int device) const {
    return static_cast<cudaError_t>(errors_[static_cast<std::size_t>(device)].load());
  }
  void fail(int device, const Fault& fault);
  void fail_call(std::int64_t n, cudaError_t error, bool stays);
  bool call_is_due() const { return calls_left_ > 0; }
  /// For calls that may fail: the device's error, or the one that a test wants.
  cudaError_t begin_call(int device);
  std::atomic<int> driver_version{CUDART_VERSION};
  std::atomic<bool> has_pools{true};
  void keep_faults(bool keep);
  std::string last_fault();
  void count(const Counts& counts);
  Counts take_counts();

  /// For calls that a capture may forbid to this thread: the error, and the capture is broken. Else the error of the
  /// current device.
  cudaError_t begin_unsafe_call();
  /// Protects captures.
  std::mutex& mutex() noexcept { return mutex_; }
  std::vector<std::shared_ptr<Capture>>& captures() noexcept { return captures_; }
  /// Its streams run again. mutex() is held.
  void end_capture(const std::shared_ptr<Capture>& capture);
  /// Of a blocking stream of the device. mutex() is held.
  std::shared_ptr<Capture> blocking_capture(int device);

 private:
  cudaError_t put(cudaStream_t handle, Stream& stream, std::function<void()> work);

  const int devices_;
  const std::uint64_t first_seed_;
  std::atomic<std::uint64_t> seed_;
  Memory memory_;
  std::mutex mutex_;
  // Shared with who drains them meanwhile.
  std::vector<std::shared_ptr<Stream>> streams_;    ///< protected by mutex_
  std::vector<std::shared_ptr<Stream>> ending_;     ///< protected by mutex_; destroyed, with work left
  std::map<int, Stream*> defaults_;                 ///< protected by mutex_; by device
  std::vector<std::shared_ptr<Capture>> captures_;  ///< protected by mutex_
  std::atomic<int> errors_[kDevicesMax] = {};
  std::atomic<bool> keep_faults_{false};
  std::atomic<std::int64_t> calls_left_{0};
  std::atomic<int> injected_{0};
  std::atomic<bool> injected_stays_{false};
  std::string last_fault_;  ///< protected by mutex_
  Counts counts_;           ///< protected by mutex_
};
Runtime& runtime();

}  // namespace deltasync::emulator
