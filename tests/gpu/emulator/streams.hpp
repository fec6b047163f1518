// Streams, events and captures of the emulated runtime. A stream is a thread that does what was put into it, in order,
// now and then late.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

namespace deltasync::emulator {

/// A point in a stream that may be waited for.
class Mark {
 public:
  void reach();
  void wait();
  bool reached() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable change_;
  bool reached_ = false;  ///< protected by mutex_
};

/// What is put into its streams is recorded and not run.
struct Capture {
  bool is_valid = true;
  bool is_global = true;  ///< forbids all threads what may break it
  std::thread::id thread;
  void* origin = nullptr;  ///< the stream that began it
  int unjoined = 0;        ///< of its other streams
};

class Stream {
 public:
  Stream(int device, bool is_blocking, std::uint64_t seed);
  /// Of work that is done already; see end().
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void put(std::function<void()> work);
  std::shared_ptr<Mark> put_mark();
  void put_wait(std::shared_ptr<Mark> mark);
  /// Until all is done that is in it.
  void drain();
  /// The thread ends when that is done.
  void end();
  bool ended() const;

  const int device;
  const bool is_blocking;            ///< ordered with the default stream
  std::shared_ptr<Capture> capture;  ///< protected by the runtime's mutex
  bool is_joined = true;             ///< protected by the runtime's mutex; of a capture's other streams

 private:
  void run();

  std::mt19937_64 random_;  ///< of the thread
  mutable std::mutex mutex_;
  std::condition_variable change_;
  std::deque<std::function<void()>> work_;  ///< protected by mutex_; the first is being done
  bool ending_ = false;                     ///< protected by mutex_
  bool ended_ = false;                      ///< protected by mutex_
  std::thread thread_;
};

struct Event {
  const int device;
  std::mutex mutex;
  std::shared_ptr<Mark> last;        ///< protected by mutex; null if it was never recorded
  std::shared_ptr<Capture> capture;  ///< protected by the runtime's mutex; that it was last recorded in
  Stream* recorded_in = nullptr;     ///< protected by the runtime's mutex; of the capture
};

}  // namespace deltasync::emulator
