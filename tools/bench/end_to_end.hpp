// What the end-to-end cases share: this process as the trainer, and receivers that are processes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/bytes.hpp"
#include "base/thread_pool.hpp"
#include "bench/processes.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/writer.hpp"

namespace deltasync::bench {

struct Round {
  Version version;
  OffloadReport offload;
  double started_at = 0;
  double ready_s = 0;  ///< commit() returned → the agent serves the version
  Json received;
};

class Trainer {
 public:
  /// `half` is what each version is published from.
  static Result<Trainer> attach(const std::string& socket, const LayoutPtr& layout, ByteSpan half, unsigned threads);

  /// Publishes the next version and waits until the agent serves it.
  Result<Round> publish();
  /// And waits for the receiver's line.
  Result<Round> publish(Child& receiver);

 private:
  Trainer(std::vector<SliceSource> slices, std::unique_ptr<Writer> writer);
  std::vector<SliceSource> slices_;
  std::unique_ptr<Writer> writer_;
  std::uint64_t epoch_;
  std::uint64_t number_ = 0;
};

Digest128 root_of(const Layout& layout, ByteSpan half, ThreadPool& pool);

/// One that pulls `count` versions. With `say_bound` it says a line before the first: "connect_s".
Result<Child> start_receiver(const Options& options, const BenchAgent& agent, unsigned count, bool say_bound = false);

/// A child's next line. internal: it is no JSON.
Result<Json> next_line(Child& child);

}  // namespace deltasync::bench
