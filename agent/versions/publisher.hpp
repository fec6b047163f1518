// The publisher: the one thread that activates, digests, diffs and publishes versions, and hands halves back.
//
// Invariant: a half goes back to the writers only when the diff that read it is done, no lease on that content lives
// and no Reader is inside (LeaseTable::idle), and after no new lease on it can count: what is served has moved on by
// then, which is looked at first.
// No lock: all but start() and stop() is the thread's own.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "agent/metrics.hpp"
#include "agent/options.hpp"
#include "agent/versions/arrival.hpp"
#include "agent/versions/bell.hpp"
#include "agent/versions/damage.hpp"
#include "agent/versions/delta_arrival.hpp"
#include "agent/versions/leases.hpp"
#include "agent/versions/origin.hpp"
#include "agent/versions/overlapped_diff.hpp"
#include "agent/versions/version_store.hpp"
#include "base/thread_pool.hpp"

namespace deltasync::agent {

class Publisher {
 public:
  /// What is passed by reference outlives it. Throws std::system_error if threads are not to be had.
  Publisher(const CoreOptions& options, VersionStore& versions, LeaseTable& leases, Damage& damage,
            const Origin& origin, Arrival& arrival, DeltaArrival& delta_arrival, Bell& bell, Metrics& metrics);
  ~Publisher() { stop(); }
  Publisher(const Publisher&) = delete;
  Publisher& operator=(const Publisher&) = delete;

  void start();
  /// The thread ends after the diff in progress. Does not wait for it.
  void ask_to_stop();
  /// A diff in progress is finished first. Idempotent.
  void stop();

 private:
  void work();
  bool maintain(const GenerationPtr& generation);
  void serve_first(const GenerationPtr& generation, const shm::HalfView& active);
  void serve_next(const ServedPtr& before, const shm::HalfView& sealed);
  void follow_fill(const ServedPtr& served);
  std::optional<delta::Delta> diff(const ServedPtr& before, const shm::HalfView& sealed, ServedVersion& now,
                                   std::vector<std::uint64_t>& digests);
  void drop_old_generations();
  void wait_for_work();

  const CoreOptions& options_;
  VersionStore& versions_;
  LeaseTable& leases_;
  Damage& damage_;
  const Origin& origin_;
  Arrival& arrival_;
  DeltaArrival& delta_arrival_;
  Bell& bell_;
  Metrics& metrics_;
  ThreadPool pool_;
  OverlappedDiff overlapped_diff_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace deltasync::agent
