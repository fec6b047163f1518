// CUDA Runtime API, "Stream Management" and "Event Management"; Programming Guide, "CUDA Graphs" (stream capture) and
// "Stream and Event Behavior" with several devices.
#include "tests/gpu/emulator/runtime.hpp"

namespace deltasync::emulator {
namespace {

Event& event_of(cudaEvent_t event) {
  if (event == nullptr) end_process("an event that is not there is used");
  return *reinterpret_cast<Event*>(event);
}

/// The stream waits for the event. mutex() is held.
cudaError_t wait_in_captures(Stream& stream, Event& event) {
  if (event.capture == nullptr) {
    // A captured stream cannot wait for what is not in its capture.
    if (stream.capture == nullptr || event.last == nullptr) return cudaSuccess;
    stream.capture->is_valid = false;
    return cudaErrorStreamCaptureIsolation;
  }
  if (stream.capture == nullptr) {  // from here on it belongs to the capture
    stream.capture = event.capture;
    stream.is_joined = false;
    ++event.capture->unjoined;
    return cudaSuccess;
  }
  if (stream.capture != event.capture) {
    stream.capture->is_valid = event.capture->is_valid = false;
    return cudaErrorStreamCaptureMerge;
  }
  if (event.recorded_in != &stream && event.recorded_in != stream.capture->origin && !event.recorded_in->is_joined) {
    event.recorded_in->is_joined = true;
    --stream.capture->unjoined;
  }
  return cudaSuccess;
}

cudaStreamCaptureStatus status_of(const std::shared_ptr<Capture>& capture) {
  if (capture == nullptr) return cudaStreamCaptureStatusNone;
  return capture->is_valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
}

}  // namespace

cudaError_t query(cudaEvent_t handle) {
  Event& event = event_of(handle);
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return error;
  {
    const std::lock_guard lock(runtime().mutex());
    if (event.capture != nullptr) {
      event.capture->is_valid = false;
      return cudaErrorCapturedEvent;
    }
  }
  bool is_done = false;
  {
    const std::lock_guard lock(event.mutex);
    is_done = event.last == nullptr || event.last->reached();
  }
  // After the mark: an error that came before it is seen.
  if (const cudaError_t error = runtime().error_of(event.device); error != cudaSuccess) return error;
  return is_done ? cudaSuccess : cudaErrorNotReady;
}

}  // namespace deltasync::emulator

using deltasync::emulator::Event;
using deltasync::emulator::noted;
using deltasync::emulator::runtime;
using deltasync::emulator::Stream;
namespace emulator = deltasync::emulator;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  *stream = reinterpret_cast<cudaStream_t>(runtime().make_stream((flags & cudaStreamNonBlocking) == 0));
  return cudaSuccess;
}

// "This function may also return error codes from previous, asynchronous launches", and so may cudaEventDestroy.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  emulator::this_thread().take_context();
  auto* const stream = reinterpret_cast<Stream*>(handle);
  const int device = stream->device;
  runtime().destroy_stream(stream);
  return noted(runtime().begin_call(device));
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  emulator::this_thread().take_context();
  Stream* const stream = runtime().find(handle);
  {
    const std::lock_guard lock(runtime().mutex());
    if (stream->capture != nullptr) {
      stream->capture->is_valid = false;
      return noted(cudaErrorStreamCaptureUnsupported);
    }
  }
  stream->drain();
  runtime().memory().give_back(stream->device);
  return noted(runtime().begin_call(stream->device));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return noted(runtime().submit(stream, [=] { function(data); }));
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  if (handle == nullptr) return noted(cudaErrorStreamCaptureUnsupported);
  Stream* const stream = runtime().find(handle);
  const std::lock_guard lock(runtime().mutex());
  if (stream->capture != nullptr) return noted(cudaErrorIllegalState);
  auto capture = std::make_shared<emulator::Capture>();
  capture->is_global = mode == cudaStreamCaptureModeGlobal;
  capture->thread = mode == cudaStreamCaptureModeRelaxed ? std::thread::id() : std::this_thread::get_id();
  capture->origin = stream;
  stream->capture = capture;
  runtime().captures().push_back(capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Stream* const stream = runtime().find(handle);
  *graph = nullptr;
  const std::lock_guard lock(runtime().mutex());
  const auto capture = stream->capture;
  if (capture == nullptr || capture->origin != stream) return noted(cudaErrorIllegalState);
  runtime().end_capture(capture);
  if (!capture->is_valid) return noted(cudaErrorStreamCaptureInvalidated);
  if (capture->unjoined != 0) return noted(cudaErrorStreamCaptureUnjoined);
  return cudaSuccess;  // graphs are not run here: there is none
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  emulator::this_thread().take_context();
  Stream* const stream = runtime().find(handle);
  const std::lock_guard lock(runtime().mutex());
  if (handle == nullptr && runtime().blocking_capture(stream->device) != nullptr) {
    return noted(cudaErrorStreamCaptureImplicit);
  }
  *status = emulator::status_of(stream->capture);
  return noted(runtime().begin_call(stream->device));
}

// It makes a context, too, as torch found.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  emulator::this_thread().take_context();
  std::swap(*mode, emulator::this_thread().mode);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const cudaError_t error = runtime().begin_unsafe_call(); error != cudaSuccess) return noted(error);
  if ((flags & cudaEventDisableTiming) == 0) emulator::end_process("an event that takes the time is not emulated");
  *event = reinterpret_cast<cudaEvent_t>(new Event{emulator::this_thread().device, {}, {}, {}, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  emulator::this_thread().take_context();
  const Event* const event = &emulator::event_of(handle);
  const int device = event->device;
  delete event;  // what waits for its mark goes on
  return noted(runtime().begin_call(device));
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t to) {
  emulator::this_thread().take_context();
  Event& event = emulator::event_of(handle);
  Stream* const stream = runtime().find(to);
  if (event.device != stream->device) return noted(cudaErrorInvalidResourceHandle);
  if (const cudaError_t error = runtime().begin_call(stream->device); error != cudaSuccess) return noted(error);
  {
    const std::lock_guard lock(runtime().mutex());
    event.capture = stream->capture;
    event.recorded_in = stream;
    if (stream->capture != nullptr)
      return noted(stream->capture->is_valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
  }
  auto mark = std::make_shared<emulator::Mark>();
  const cudaError_t error = runtime().submit_mark(to, mark);
  if (error != cudaSuccess) return noted(error);
  const std::lock_guard lock(event.mutex);
  event.last = std::move(mark);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t to, cudaEvent_t handle, unsigned /*flags*/) {
  emulator::this_thread().take_context();
  Event& event = emulator::event_of(handle);
  Stream* const stream = runtime().find(to);
  if (const cudaError_t error = runtime().begin_call(stream->device); error != cudaSuccess) return noted(error);
  std::shared_ptr<emulator::Mark> mark;
  {
    const std::lock_guard lock(runtime().mutex());
    const std::lock_guard lock_event(event.mutex);
    const cudaError_t error = emulator::wait_in_captures(*stream, event);
    if (error != cudaSuccess || stream->capture != nullptr) return noted(error);
    mark = event.last;
  }
  if (mark == nullptr) return cudaSuccess;  // "if cudaEventRecord() has not been called … no effect"
  return noted(runtime().submit_wait(to, std::move(mark)));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return noted(emulator::query(event));
}

}  // extern "C"
