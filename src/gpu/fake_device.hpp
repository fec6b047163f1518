// A device for tests, made of host memory and a queue. It does what a real one may do and what code that was only ever
// run against one that is fast, obedient and forgiving gets wrong:
//   - its memory cannot be read or written but by copies and kernels: anything else faults (SIGSEGV);
//   - nothing that is put into a stream happens at once; it happens later, in any order that streams and events allow,
//     by a seed. So host memory that is used again too early, and work that needs another stream's, show;
//   - the blocks of a kernel run in random order, and so do the threads of a block;
//   - kernels are refused pointers, and copies memory, that a real device could not reach;
//   - host memory is not let go while a copy into it waits, another device's among them: that ends the program;
//   - memory, copies, launches and records fail, and streams stop, when a test says so.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "gpu/device.hpp"

namespace deltasync::gpu {

class FakeDevice final : public Device {
 public:
  struct Options {
    std::int32_t ordinal = 0;
    std::uint64_t seed = 1;
    std::uint64_t memory_bytes = std::uint64_t{1} << 30;
    std::uint64_t pinned_bytes = std::uint64_t{1} << 30;
    bool lazy = false;  ///< nothing happens before somebody asks for an event
  };
  /// Aborts without address space.
  explicit FakeDevice(const Options& options);
  ~FakeDevice() override;
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  const std::string& name() const override { return name_; }  ///< with its seed
  Result<Memory> allocate(std::uint64_t bytes) override;
  Result<Memory> pin(std::uint64_t bytes) override;
  Result<Memory> register_host(std::byte* data, std::uint64_t bytes, std::shared_ptr<const void> keeper) override;
  Result<std::unique_ptr<Stream>> make_stream() override;
  Result<std::unique_ptr<Stream>> adopt_stream(StreamHandle handle) override;
  Result<std::unique_ptr<Event>> make_event() override;

  // ---- what an engine does ----
  /// A stream of the engine, to be adopted. Lives as long as the device.
  StreamHandle engine_stream();
  /// Work of the engine's own in its stream; `work` may use device memory.
  void engine_work(StreamHandle handle, std::function<void()> work);
  /// Runs everything that can run. False if something cannot.
  bool drain();
  /// Nothing waits to be run, but in streams of the engine's.
  bool idle() const;
  /// Reads and writes device memory past all streams.
  void peek(const std::byte* device, std::byte* host, std::uint64_t bytes);
  void poke(std::byte* device, const std::byte* host, std::uint64_t bytes);

  // ---- what a test breaks ----
  enum class Call : std::uint8_t {
    allocate,
    pin,
    copy,
    launch,
    zero,
    endless_launch,  ///< does not fail, but from there on all streams hang
    register_host,
    record,
    wait_for,
    done,
  };
  /// Has no memory left, until false.
  void fill(bool full);
  /// The n-th such call from now on fails (1: the next); once.
  void fail(Call call, std::uint64_t n);
  /// Those that have not happened yet will not; how many.
  std::size_t forget_faults();
  /// The n-th operation from now on that runs (0: none) goes wrong half-way. That shows in no call that put it there,
  /// but in every later one, of whatever stream: nothing works any more, until a test wants to see what is left.
  void die(std::uint64_t n);
  void revive();
  /// Whatever is in a stream stays there, until false.
  void hang(bool hangs);
  /// The same of one stream of the engine's, which has more to do than anybody expects.
  void hold(StreamHandle handle, bool holds);
  /// The engine captures a stream of its own as a graph, until false: what is put into it fails, and ends the capture.
  void capture(StreamHandle handle, bool captures);
  bool capture_ended_by_others() const;

  // ---- what a test counts ----
  struct Counts {
    std::uint64_t launches = 0;
    std::uint64_t copies = 0;
    std::uint64_t bytes_copied = 0;
    std::uint64_t allocations = 0;  ///< that are there now
    std::uint64_t pinned_bytes = 0;
    std::uint64_t pinned_bytes_most = 0;
    std::uint64_t registered_bytes = 0;
    std::uint64_t copied_from_registered = 0;  ///< bytes
  };
  Counts counts() const;

 protected:
  void give_back(Memory::Kind kind, std::byte* data, std::uint64_t bytes) noexcept override;

 private:
  friend class FakeStream;
  friend class FakeEvent;
  /// A place in a stream.
  struct Mark {
    std::uint64_t stream = 0;
    std::uint64_t done = 0;  ///< reached once so many operations of the stream are
  };
  struct Operation {
    std::function<void()> work;  ///< or, if it is none, wait for the mark
    Mark mark;
    /// What a copy reads or writes of the host's.
    const std::byte* host = nullptr;
    std::uint64_t host_bytes = 0;
  };
  struct Queue {
    std::deque<Operation> waiting;
    std::uint64_t put = 0;
    std::uint64_t done = 0;
    bool held = false;
    bool captured = false;
  };

  struct Host;
  static Host& host();
  void release_host(std::byte* data, std::uint64_t bytes) noexcept;
  // All of these need mutex_.
  Status count_locked(Call call, const std::string& what);
  Status put_locked(std::uint64_t stream, Operation operation);
  Status leave_capture_locked(std::uint64_t stream, const std::string& what);
  bool reached_locked(const Mark& mark) const { return queues_[mark.stream].done >= mark.done; }
  bool step_locked();
  void run_some_locked(std::uint64_t most);
  Status check_copy_locked(const std::byte* device, std::uint64_t device_bytes, const std::byte* host,
                           std::uint64_t host_bytes, const std::string& what) const;
  bool on_device_locked(const void* at, std::uint64_t bytes) const;
  bool waits_for_host_locked(const std::byte* host, std::uint64_t bytes) const;
  void unlock_memory_locked(bool open) noexcept;
  std::uint64_t random_locked() noexcept;
  template <class K>
  void run_kernel_locked(const K& kernel);
  Error error(const std::string& what, Errc code, const std::string& why) const;

  const Options options_;
  const std::string name_;
  const std::uint64_t page_bytes_;
  std::byte* const arena_;  ///< address space, of which allocations are never used twice

  mutable std::mutex mutex_;  ///< protects all of the following
  std::uint64_t random_state_;
  std::uint64_t arena_used_ = 0;
  std::uint64_t memory_used_ = 0;
  std::map<std::byte*, std::uint64_t> allocations_;
  std::map<std::byte*, std::uint64_t> pinned_;
  std::map<std::byte*, std::uint64_t> registered_;
  std::deque<Queue> queues_;
  std::deque<std::uint64_t> engine_streams_;
  std::map<Call, std::uint64_t> faults_;
  bool hangs_ = false;
  bool capture_ended_ = false;
  bool full_ = false;
  std::uint64_t dies_in_ = 0;  ///< operations; 0: it does not
  bool dead_ = false;
  Counts counts_;
};

}  // namespace deltasync::gpu
