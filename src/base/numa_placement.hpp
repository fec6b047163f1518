// On which memory nodes threads and memory go, on a machine of several. The rule, in architecture.md too:
//
//   - Nodes that have both memory and CPUs for this process are used. With fewer than two there is nothing to decide,
//     there is no NumaPlacement, and nothing is called.
//   - A half is cut into stripes of kStripeBytes, dealt out to the nodes in turn. Both halves alike, so that what is
//     compared lies on one node; stripes and not one range a node, so that an offload from front to back keeps all
//     nodes' memory and threads busy.
//   - Worker threads are dealt out to the nodes by their numbers of CPUs, and run anywhere on their node. They take
//     work whose bytes lie there first, then whatever is left.
//   - Memory comes from the node as long as it has some: nothing fails, and nothing is killed, for lack of room on one
//     node while another has it.
//
// The nodes that are used are counted from 0 here; node_ids() has the system's numbers.
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

struct NumaPlacementRequest {
  std::string cores;               ///< a CPU list; empty: wherever the caller may run
  std::string numa_node = "auto";  ///< a node's number: that one only; "off": none
};

class NumaPlacement;
using NumaPlacementPtr = std::shared_ptr<const NumaPlacement>;

/// The CPUs of a list, if all are there and the calling thread may run on them; else invalid_argument, which names the
/// first that is not.
Result<CpuList> usable_cores(const std::string& list, NumaSystem& system);

/// Confines the calling thread, and those that it starts from now on, to the cores of such a list; an empty one leaves
/// all as it is.
Status stay_on_cores(const std::string& list, NumaSystem& system);

class NumaPlacement {
 public:
  static constexpr std::uint64_t kStripeBytes = std::uint64_t{32} << 20;  ///< whole huge pages, and several batches

  /// Null where there is nothing to decide. invalid_argument names the core or the node that cannot be had. `system`
  /// must outlive it.
  static Result<NumaPlacementPtr> make(const NumaPlacementRequest& request, NumaSystem& system);

  unsigned node_count() const noexcept { return static_cast<unsigned>(nodes_.size()); }
  /// Of the stripe at this offset of a half.
  unsigned node_of(std::uint64_t offset) const noexcept {
    return static_cast<unsigned>(offset / kStripeBytes % nodes_.size());
  }
  /// Of the page at this address, if it is one of ours and the system tells.
  std::optional<unsigned> node_of_page(const std::byte* at) const;
  unsigned node_of_worker(unsigned worker) const;

  /// The calling thread runs on this node from now on. What is refused is logged once, and does no more harm.
  void enter(unsigned node) const;
  /// The calling thread's new pages come from it.
  void prefer_memory_of(unsigned node) const;

  /// The system's numbers of the nodes that are used.
  CpuList node_ids() const;

 private:
  struct Node {
    unsigned id = 0;
    CpuList cpus;
  };
  NumaPlacement(std::vector<Node> nodes, NumaSystem& system) : system_(system), nodes_(std::move(nodes)) {}
  void note_refused(std::atomic<bool>& said, const char* what, const Node& node, int error) const;

  NumaSystem& system_;
  const std::vector<Node> nodes_;
  mutable std::atomic<bool> said_cpus_{false};
  mutable std::atomic<bool> said_memory_{false};
};

/// For a pool of so many threads; `numa_placement` may be null. The caller of run(), worker 0, enters its node itself.
ThreadNodes thread_nodes(const NumaPlacementPtr& numa_placement, unsigned threads);

/// As worker 0 of such a pool; nothing without a placement.
inline void enter_as_worker_0(const NumaPlacementPtr& numa_placement) {
  if (numa_placement) numa_placement->enter(numa_placement->node_of_worker(0));
}

}  // namespace deltasync
