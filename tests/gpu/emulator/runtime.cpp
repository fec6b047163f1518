#include "tests/gpu/emulator/runtime.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace deltasync::emulator {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// Ends the streams' threads before the process does.
struct AtEnd {
  AtEnd() = default;
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;
  ~AtEnd() { runtime().end_all(); }
};

}  // namespace

void end_process(const std::string& why) {
  // Not by std::cerr, which may come after kernels that are refused as they are registered.
  std::fprintf(stderr, "emulator: %s\n", why.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

ThreadState& this_thread() {
  static thread_local ThreadState state;
  return state;
}

cudaError_t noted(cudaError_t error) {
  if (error != cudaSuccess) this_thread().last = error;
  return error;
}

Runtime& runtime() {
  static Runtime* const made = new Runtime;  // outlives what other statics' destructors free
  return *made;
}

void keep_faults(bool keep) {
  runtime().keep_faults(keep);
}
std::string last_fault() {
  return runtime().last_fault();
}
Counts take_counts() {
  return runtime().take_counts();
}
void fail_call(std::int64_t n, cudaError_t error, bool stays) {
  runtime().fail_call(n, error, stays);
}
bool call_is_due() {
  return runtime().call_is_due();
}
void set_driver_version(int version) {
  runtime().driver_version = version;
}
void set_pools(bool has_pools) {
  runtime().has_pools = has_pools;
}
void revive() {
  fail_call(0);
  for (int device = 0; device < runtime().devices(); ++device) runtime().drain(device);
  keep_faults(true);
}

Runtime::Runtime()
    : devices_(
          static_cast<int>(std::min<std::uint64_t>(from_environment("DELTASYNC_EMULATED_DEVICES", 2), kDevicesMax))),
      first_seed_(from_environment("DELTASYNC_EMULATED_SEED", 1)),
      seed_(first_seed_),
      memory_(kDeviceBytes) {}

Stream* Runtime::make_stream(bool is_blocking) {
  static const AtEnd at_end;
  const std::lock_guard lock(mutex_);
  std::erase_if(ending_, [](const auto& stream) { return stream->ended(); });
  streams_.push_back(std::make_shared<Stream>(this_thread().device, is_blocking, next_seed()));
  return streams_.back().get();
}

void Runtime::destroy_stream(Stream* stream) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(streams_.begin(), streams_.end(), [&](const auto& s) { return s.get() == stream; });
  if (found == streams_.end()) end_process("cudaStreamDestroy of what is no stream");
  stream->end();
  ending_.push_back(std::move(*found));
  streams_.erase(found);
}

Stream* Runtime::find(cudaStream_t stream) {
  if (stream != nullptr) {
    auto* const given = reinterpret_cast<Stream*>(stream);
    const std::lock_guard lock(mutex_);
    const auto is_it = [&](const auto& s) { return s.get() == given; };
    if (std::none_of(streams_.begin(), streams_.end(), is_it)) end_process("a stream that is not there is used");
    return given;
  }
  const int device = this_thread().device;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = defaults_.find(device); found != defaults_.end()) return found->second;
  }
  Stream* const made = make_stream(false);
  const std::lock_guard lock(mutex_);
  return defaults_.try_emplace(device, made).first->second;
}

std::shared_ptr<Capture> Runtime::blocking_capture(int device) {
  for (const auto& stream : streams_) {
    if (stream->is_blocking && stream->device == device && stream->capture != nullptr) return stream->capture;
  }
  return nullptr;
}

void Runtime::end_capture(const std::shared_ptr<Capture>& capture) {
  std::erase(captures_, capture);
  for (const auto& stream : streams_) {
    if (stream->capture == capture) stream->capture = nullptr;
  }
}

cudaError_t Runtime::submit(cudaStream_t handle, std::function<void()> work) {
  Stream* const stream = find(handle);
  const int device = stream->device;
  if (const cudaError_t error = begin_call(device); error != cudaSuccess) return error;
  return put(handle, *stream, [this, device, work = std::move(work)] {
    if (error_of(device) == cudaSuccess) work();
  });
}

cudaError_t Runtime::submit_mark(cudaStream_t handle, std::shared_ptr<Mark> mark) {
  return put(handle, *find(handle), [mark = std::move(mark)] { mark->reach(); });
}

cudaError_t Runtime::submit_wait(cudaStream_t handle, std::shared_ptr<Mark> mark) {
  return put(handle, *find(handle), [mark = std::move(mark)] { mark->wait(); });
}

cudaError_t Runtime::put(cudaStream_t handle, Stream& stream, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (stream.capture != nullptr) {
    if (!stream.capture->is_valid) return cudaErrorStreamCaptureInvalidated;
    if (stream.capture->origin != &stream && stream.is_joined) {
      stream.is_joined = false;
      ++stream.capture->unjoined;
    }
    return cudaSuccess;
  }
  if (handle != nullptr) {
    stream.put(std::move(work));
    return cudaSuccess;
  }
  if (const auto capture = blocking_capture(stream.device)) {
    capture->is_valid = false;
    return cudaErrorStreamCaptureImplicit;
  }
  // The default stream's work begins behind that of all blocking streams, and theirs behind it.
  std::vector<Stream*> blocking;
  for (const auto& other : streams_) {
    if (other->is_blocking && other->device == stream.device) blocking.push_back(other.get());
  }
  for (Stream* const other : blocking) stream.put_wait(other->put_mark());
  stream.put(std::move(work));
  if (blocking.empty()) return cudaSuccess;
  const auto mark = stream.put_mark();
  for (Stream* const other : blocking) other->put_wait(mark);
  return cudaSuccess;
}

void Runtime::drain(int device) {
  std::vector<std::shared_ptr<Stream>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto* list : {&streams_, &ending_}) all.insert(all.end(), list->begin(), list->end());
  }
  for (const auto& stream : all) {
    if (stream->device == device) stream->drain();
  }
}

void Runtime::end_all() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    const std::lock_guard lock(mutex_);
    for (auto* list : {&streams_, &ending_}) {
      all.insert(all.end(), list->begin(), list->end());
      list->clear();
    }
    defaults_.clear();
  }
}

void Runtime::fail(int device, const Fault& fault) {
  const std::string text = fault.text + " (device " + std::to_string(device) +
                           ", DELTASYNC_EMULATED_SEED=" + std::to_string(first_seed_) + ")";
  if (!keep_faults_) end_process(text);
  {
    const std::lock_guard lock(mutex_);
    last_fault_ = text;
  }
  const bool misaligned = fault.kind == Fault::Kind::misaligned;
  const bool illegal = fault.kind == Fault::Kind::out_of_bounds;
  errors_[device] = misaligned ? cudaErrorMisalignedAddress
                    : illegal  ? cudaErrorIllegalAddress
                               : cudaErrorLaunchFailure;
}

void Runtime::keep_faults(bool keep) {
  keep_faults_ = keep;
  for (auto& error : errors_) error = cudaSuccess;
}

std::string Runtime::last_fault() {
  const std::lock_guard lock(mutex_);
  return last_fault_;
}

void Runtime::count(const Counts& counts) {
  const std::lock_guard lock(mutex_);
  counts_ += counts;
}

Counts Runtime::take_counts() {
  const std::lock_guard lock(mutex_);
  return std::exchange(counts_, {});
}

void Runtime::fail_call(std::int64_t n, cudaError_t error, bool stays) {
  injected_ = error;
  injected_stays_ = stays;
  calls_left_ = n;
}

cudaError_t Runtime::begin_call(int device) {
  if (calls_left_ > 0 && calls_left_.fetch_sub(1) == 1) {
    if (!injected_stays_) return static_cast<cudaError_t>(injected_.load());
    errors_[device] = injected_.load();
  }
  return error_of(device);
}

cudaError_t Runtime::begin_unsafe_call() {
  ThreadState& thread = this_thread();
  thread.take_context();
  const std::lock_guard lock(mutex_);
  for (const auto& capture : captures_) {
    const bool is_own = capture->thread == std::this_thread::get_id();
    const bool is_forbidden = thread.mode == cudaStreamCaptureModeGlobal        ? is_own || capture->is_global
                              : thread.mode == cudaStreamCaptureModeThreadLocal ? is_own
                                                                                : false;
    if (!is_forbidden) continue;
    capture->is_valid = false;
    return cudaErrorStreamCaptureUnsupported;
  }
  return begin_call(thread.device);
}

}  // namespace deltasync::emulator
