// Frees what is large on a thread of its own: mappings of generations, deltas.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "agent/versions/generation.hpp"

namespace deltasync::agent {

/// Unmapping and freeing gigabytes takes long, and the last to hold a generation or a delta may be a thread that serves
/// connections, or one that holds a mutex. So both are handed over here, and end on the thread in work(). Any
/// thread may call any method.
class Reclaimer : public std::enable_shared_from_this<Reclaimer> {
 public:
  /// `before_unmap`: for tests, on the thread that unmaps.
  explicit Reclaimer(std::function<void()> before_unmap = {}) : before_unmap_(std::move(before_unmap)) {}
  /// Takes ownership; the generation ends here once the last holder has dropped it. Numbers are unique.
  GenerationPtr keep(std::unique_ptr<Generation> generation);
  /// Takes a share of something large, which may be the last. Cheap. If there is no memory for that, it ends at once.
  void retire(std::shared_ptr<const void> thing) noexcept;
  /// Unmaps the generations that nobody holds any more, and drops what was retired.
  void clear();
  /// clear() whenever there is something, until close().
  void work();
  /// Clears for the last time. From then on the last holder of a generation unmaps it.
  void close();
  /// Somebody may still use it.
  bool held(std::uint64_t number) const;
  /// All that somebody may still use.
  std::vector<GenerationPtr> all_held() const;
  /// Not unmapped yet, which takes its time after the last holder has dropped it.
  bool has(std::uint64_t number) const;

 private:
  void take(std::unique_ptr<Generation> generation) noexcept;

  const std::function<void()> before_unmap_;
  mutable std::mutex mutex_;
  std::set<std::uint64_t> mapped_;                           // protected by mutex_, as all below
  std::map<std::uint64_t, std::weak_ptr<Generation>> held_;  // of these, by somebody
  std::vector<std::unique_ptr<Generation>> unheld_;          // of these, by nobody
  std::vector<std::shared_ptr<const void>> retired_;
  std::condition_variable came_;
  bool closed_ = false;
};

/// A share that ends by retire() at the end of its scope: it may be the last.
template <class Thing>
class RetiredAtEnd {
 public:
  RetiredAtEnd(Reclaimer& reclaimer, std::shared_ptr<Thing> thing) noexcept
      : reclaimer_(reclaimer), thing_(std::move(thing)) {}
  ~RetiredAtEnd() { reclaimer_.retire(std::move(thing_)); }
  RetiredAtEnd(const RetiredAtEnd&) = delete;
  RetiredAtEnd& operator=(const RetiredAtEnd&) = delete;

  Thing* operator->() const noexcept { return thing_.get(); }
  Thing& operator*() const noexcept { return *thing_; }
  const std::shared_ptr<Thing>& share() const noexcept { return thing_; }

 private:
  Reclaimer& reclaimer_;
  std::shared_ptr<Thing> thing_;
};

}  // namespace deltasync::agent
