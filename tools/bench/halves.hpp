// Two successive versions of the synthetic model in the halves of a real segment: the pages that the agent works on.
#pragma once

#include <memory>
#include <vector>

#include "base/thread_pool.hpp"
#include "bench/bench.hpp"
#include "bench/synth.hpp"
#include "delta/delta.hpp"
#include "receiver/targets/target.hpp"
#include "shm/segment.hpp"

namespace deltasync::bench {

class Halves {
 public:
  /// The segment's file is unlinked at once: nothing stays behind, however the process ends.
  static Result<Halves> make(const Options& options, ThreadPool& pool);

  const Layout& layout() const noexcept { return *layout_; }
  const LayoutPtr& layout_ptr() const noexcept { return layout_; }
  ByteSpan before() const noexcept { return segment_->half(0); }
  ByteSpan after() const noexcept { return segment_->half(1); }
  /// The same bytes as after(), to be overwritten.
  MutByteSpan writable() noexcept { return segment_->half(1); }
  /// Digests of `before`.
  const std::vector<std::uint64_t>& digests() const noexcept { return digests_; }
  const shm::Segment& segment() const noexcept { return *segment_; }

  /// One encode of before → after; `digests` becomes that of `after`.
  delta::Delta encode(std::vector<std::uint64_t>& digests, ThreadPool& pool,
                      delta::ValueForm form = delta::ValueForm::ulp) const;

 private:
  LayoutPtr layout_;
  std::unique_ptr<shm::Segment> segment_;
  std::vector<std::uint64_t> digests_;
};

/// What a target has committed: version `number` with these tile digests.
TargetState state_of(std::uint64_t number, std::vector<std::uint64_t> digests);

}  // namespace deltasync::bench
