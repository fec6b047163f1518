// The other processes of a benchmark: a real agent, and a real receiver that reports each version on a pipe.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.hpp"
#include "bench/bench.hpp"
#include "deltasync/result.hpp"

namespace deltasync::bench {

/// A child that is terminated (SIGTERM, after 10 s SIGKILL) and reaped when this goes, and terminated when the thread
/// that spawned it ends, however that ends.
class Child {
 public:
  /// argv[0] is a path. With `pipe`, the child's standard output comes back through read_line.
  static Result<Child> spawn(const std::vector<std::string>& argv, bool pipe);
  Child(Child&& other) noexcept;
  Child& operator=(Child&& other) noexcept;
  ~Child();

  pid_t pid() const noexcept { return pid_; }
  /// One line of the child's output. timed_out, or peer_died if the output ended.
  Result<std::string> read_line(Deadline deadline);
  /// Until its output ends, which is when it does: what it writes at its end is there then. What it still says is lost.
  Status wait_end(Deadline deadline);

 private:
  Child(pid_t pid, int out) : pid_(pid), out_(out) {}
  void stop() noexcept;
  pid_t pid_ = -1;
  int out_ = -1;
  std::string buffered_;
};

/// A fresh agent of its own name in a temporary directory, gone with its segment when this goes.
class BenchAgent {
 public:
  static Result<BenchAgent> start(const Options& options);
  BenchAgent(BenchAgent&&) = default;
  BenchAgent& operator=(BenchAgent&&) = default;
  ~BenchAgent();

  const std::string& endpoint() const noexcept { return endpoint_; }
  std::string socket() const { return (dir_ / "agent.sock").string(); }
  /// Of its first layout, in options.shm_dir.
  std::string segment_name() const { return dir_.filename().string() + ".g1"; }
  pid_t pid() const noexcept { return child_.pid(); }

 private:
  BenchAgent(Child child, std::filesystem::path dir) : child_(std::move(child)), dir_(std::move(dir)) {}
  Child child_;
  std::filesystem::path dir_;
  std::string endpoint_;
};

/// CPU seconds of all threads of a process, so far.
Result<double> process_cpu_s(pid_t pid);
/// Private resident memory of a process (RssAnon: shared pages left out); 0 once it is gone.
std::uint64_t rss_anon_bytes(pid_t pid);
/// The highest of a process while this lives, sampled every 2 ms.
class RssSampler {
 public:
  explicit RssSampler(pid_t pid);
  ~RssSampler();
  RssSampler(const RssSampler&) = delete;
  RssSampler& operator=(const RssSampler&) = delete;
  std::uint64_t peak_bytes() const noexcept { return peak_; }

 private:
  std::atomic<std::uint64_t> peak_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// Seconds of the clock that all processes of a machine share.
double monotonic_s();

struct ReceiverArgs {
  std::string endpoint;
  unsigned streams = 4;
  unsigned threads = 2;
  unsigned count = 1;      ///< versions, each a JSON line of output
  bool compact = false;    ///< deltas in exponent classes
  bool say_bound = false;  ///< one line more, before the first pull
  std::string trace;
};
/// The receiver process of the end-to-end cases (first argument kReceiverArg): pulls into host memory. Returns an exit
/// code.
int receiver_main(const ReceiverArgs& args);

}  // namespace deltasync::bench
