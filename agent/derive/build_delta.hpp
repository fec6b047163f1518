// Making one derived delta: a chain of the ring's deltas merged, or a delta made compact. No lock; it counts and logs.
#pragma once

#include <cstdint>
#include <vector>

#include "agent/derive/derived_delta_cache.hpp"
#include "agent/metrics.hpp"
#include "base/thread_pool.hpp"
#include "delta/delta.hpp"
#include "deltasync/layout.hpp"

namespace deltasync::agent {

/// What is to be made of what.
struct DeltaBuild {
  DeltaKey key;
  LayoutPtr layout;
  std::vector<RingEntryPtr> chain;  ///< the ring's steps, the first of them perhaps merged already
  std::uint64_t chain_bytes = 0;    ///< of the ring's steps
  delta::MergeOptions options;
  ThreadPool& pool;
  Metrics& metrics;
};

/// One delta for the chain. Null: there can be none, or it would not pay. An error may pass: no_space, cancelled.
Result<RingEntryPtr> merge_chain(const DeltaBuild& build);
/// `plain` in exponent classes; null and errors are as above.
Result<RingEntryPtr> compact_delta(const DeltaBuild& build, const RingEntry& plain);

}  // namespace deltasync::agent
