// Deltas that are made when a receiver asks: merged ones for those that are several versions late, compact ones for
// slow links. It keeps them, and has a thread for each form: a compact one takes so long that no merge could wait for
// it.
//
// Invariants:
//   - What is kept applies to the exact states of the ring's own deltas: a key names the ring's revision.
//   - A delta is made once, however many want it, and no more than a bounded number is wanted at a time.
//   - When one was made or given up, those who listen to the store's changes hear of it.
//
// Its mutex protects the cache and what the threads are at. No other is taken under it but the reclaimer's.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "agent/derive/build_delta.hpp"
#include "agent/derive/derived_delta_cache.hpp"
#include "agent/metrics.hpp"
#include "agent/options.hpp"
#include "agent/versions/changes.hpp"
#include "agent/versions/reclaimer.hpp"
#include "agent/versions/version_store.hpp"

namespace deltasync::agent {

/// A request for steps that may wait for a better answer; the same for all its tries. Not thread-safe.
struct DerivedWait {
  bool may_wait = false;  ///< its time to wait has not passed
  // Written by the builder.
  std::optional<DeltaKey> key;         ///< waits for this one and no other, so that a fast trainer cannot hold it up
  DerivedDeltaCache::Request request;  ///< for `key`, until the waiting ends
  bool began = false;                  ///< it was the first to ask for `key`
  bool hit = false;                    ///< a delta that another request had asked for answers it
};

/// Thread-safe.
class DeltaBuilder {
 public:
  /// What is passed by reference outlives it. Listens to the store's changes from here on.
  DeltaBuilder(const CoreOptions& options, VersionStore& versions, std::shared_ptr<Reclaimer> reclaimer,
               Metrics& metrics);
  ~DeltaBuilder() { stop(); }
  DeltaBuilder(const DeltaBuilder&) = delete;
  DeltaBuilder& operator=(const DeltaBuilder&) = delete;

  /// Throws std::system_error if threads are not to be had.
  void start();
  /// What is being made is given up. Does not wait for it.
  void ask_to_stop();
  /// As that, and joins the threads. Idempotent.
  void stop();

  /// Steps of the ring, as a snapshot has them.
  struct Chain {
    std::vector<RingEntryPtr> steps;  ///< at least one
    std::uint64_t revision = 0;       ///< the ring's
    bool derivable = false;           ///< a derived delta may take their place
    bool compact = false;             ///< even a compact one
  };
  /// The steps that answer: one derived delta for as much of the chain as there is one for, then the ring's own.
  /// Nothing: `wait` is for one that is being made.
  std::optional<std::vector<RingEntryPtr>> steps(Chain chain, DerivedWait& wait);
  /// What is kept, oldest first.
  std::vector<RingEntryPtr> kept() const;

  struct Info {
    struct Entry {
      Version from;
      Version to;
      std::uint64_t bytes = 0;
      std::uint64_t changed = 0;
      bool compact = false;
      double merge_s = 0;
      std::chrono::steady_clock::time_point made_at;
    };
    std::vector<Entry> entries;  ///< oldest first
    std::uint64_t bytes = 0;
    std::uint64_t bytes_max = 0;
    std::size_t wanted = 0;  ///< waiting, or being made
  };
  Info info() const;

 private:
  struct Worker {
    explicit Worker(DeltaForm made) : form(made) {}
    const DeltaForm form;
    std::optional<DeltaKey> key;      // protected by mutex_: what is being made, or was last
    std::atomic<bool> cancel{false};  // it is not wanted any more
    std::thread thread;
  };

  std::vector<DeltaKey> better_than(const Chain& chain) const;
  void request_locked(const std::vector<DeltaKey>& better, DerivedWait& wait);
  bool put_derived_locked(Chain& chain, bool compact) const;
  void retain();

  void start(Worker& worker, const std::string& name);
  void work(Worker& worker, ThreadPool& pool);
  void build(Worker& worker, const DeltaKey& key, ThreadPool& pool);
  Result<RingEntryPtr> make(const DeltaBuild& build);
  Result<RingEntryPtr> merged_for(const DeltaBuild& build);
  bool read_served(const VersionId& version, std::span<const std::uint64_t> tiles, std::byte* out) const;

  const CoreOptions& options_;
  VersionStore& versions_;
  const std::shared_ptr<Reclaimer> reclaimer_;
  Metrics& metrics_;

  mutable std::mutex mutex_;
  DerivedDeltaCache cache_;                 // protected by mutex_, as the next two
  std::weak_ptr<const Snapshot> retained_;  // what the cache was last told of
  bool stop_ = false;
  std::condition_variable changed_;  // something is wanted, was made or is given up, or stop
  Worker merger_{DeltaForm::plain};
  Worker compacter_{DeltaForm::compact};
  Changes::Listener listener_;
};

}  // namespace deltasync::agent
