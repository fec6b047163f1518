// The home nodes of threads and memory on a machine of several memory nodes. The rule, in architecture.md too:
//
//   - Nodes that have both memory and CPUs for this process are its *homes*. With fewer than two there is nothing to
//     decide, there are no HomeNodes, and nothing is called.
//   - A half is cut into stripes of kStripeBytes, dealt out to the homes in turn. Both halves alike, so that what is
//     compared lies on one node; stripes and not one range a node, so that an offload from front to back keeps all
//     nodes' memory and threads busy.
//   - Worker threads are dealt out to the homes by their numbers of CPUs, and run anywhere on their home. They take
//     work whose bytes lie there first, then whatever is left.
//   - Memory comes from the home as long as it has some: nothing fails, and nothing is killed, for want of room on one
//     node while another has it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/numa.hpp"
#include "base/thread_pool.hpp"
#include "deltasync/result.hpp"

namespace deltasync {

struct HomeNodesRequest {
  std::string cores;               ///< a CPU list; empty: wherever the caller may run
  std::string numa_node = "auto";  ///< a node's number: that one only; "off": none
};

class HomeNodes;
using HomeNodesPtr = std::shared_ptr<const HomeNodes>;

/// The CPUs of a list, if all are there and the calling thread may run on them; else invalid_argument, which names the
/// first that is not.
Result<CpuList> usable_cores(const std::string& list, NumaSystem& system);

/// Confines the calling thread, and those that it starts from now on, to the cores of such a list; an empty one leaves
/// all as it is.
Status stay_on_cores(const std::string& list, NumaSystem& system);

class HomeNodes {
 public:
  static constexpr std::uint64_t kStripeBytes = std::uint64_t{32} << 20;  ///< whole huge pages, and several batches

  /// Null where there is nothing to decide. invalid_argument names the core or the node that cannot be had. `system`
  /// must outlive it.
  static Result<HomeNodesPtr> make(const HomeNodesRequest& request, NumaSystem& system);

  unsigned homes() const noexcept { return static_cast<unsigned>(homes_.size()); }
  /// Of the stripe at this offset of a half.
  unsigned home_of(std::uint64_t offset) const noexcept {
    return static_cast<unsigned>(offset / kStripeBytes % homes_.size());
  }
  /// Of the page at this address, if it is one of ours and the system tells.
  std::optional<unsigned> home_of_page(const std::byte* at) const;
  unsigned home_of_worker(unsigned worker) const;

  /// The calling thread runs on this home from now on. What is refused is logged once, and does no more harm.
  void enter(unsigned home) const;
  /// The calling thread's new pages come from it.
  void prefer_memory_of(unsigned home) const;

  /// Of the homes.
  CpuList nodes() const;

 private:
  struct Home {
    unsigned node = 0;
    CpuList cpus;
  };
  HomeNodes(std::vector<Home> homes, NumaSystem& system) : system_(system), homes_(std::move(homes)) {}
  void note_refused(std::atomic<bool>& said, const char* what, const Home& home, int error) const;

  NumaSystem& system_;
  const std::vector<Home> homes_;
  mutable std::atomic<bool> said_cpus_{false};
  mutable std::atomic<bool> said_memory_{false};
};

/// For a pool of so many threads; `home_nodes` may be null. The caller of run(), worker 0, enters its home itself.
ThreadHomes thread_homes(const HomeNodesPtr& home_nodes, unsigned threads);

/// As worker 0 of such a pool; nothing without home nodes.
inline void enter_as_worker_0(const HomeNodesPtr& home_nodes) {
  if (home_nodes) home_nodes->enter(home_nodes->home_of_worker(0));
}

}  // namespace deltasync
