// A trainer in miniature: versions of a test model, and the updates between them as a receiver would stage them.
#pragma once

#include <vector>

#include "base/deadline.hpp"
#include "base/thread_pool.hpp"
#include "format/tiling.hpp"
#include "receiver/targets/target.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {

/// One version, whole.
struct Reference {
  TargetState state;
  std::vector<std::byte> half;
};

class TrainerModel {
 public:
  explicit TrainerModel(std::uint64_t seed, std::vector<TensorSpec> specs = sample_specs());

  const LayoutPtr& layout() const noexcept { return model_.layout; }
  const Reference& now() const noexcept { return now_; }
  /// Makes the next version; `density` of the elements change.
  const Reference& step(double density);
  /// The same with changes as an optimizer makes them.
  const Reference& small_step(double density);
  /// From `before` to `after`, encoded, parsed, ready to be committed.
  StagedStep delta(const Reference& before, const Reference& after,
                   delta::ValueForm form = delta::ValueForm::ulp) const;
  /// The same with a frame for each tile.
  StagedStep delta_by_tile(const Reference& before, const Reference& after) const;
  /// The same in exponent classes, where that is smaller.
  StagedStep compact_delta(const Reference& before, const Reference& after) const;
  /// The same step once more, as it was before it was committed anywhere.
  StagedStep copy(const StagedStep& step) const;
  ThreadPool& pool() const noexcept { return pool_; }

 private:
  const Reference& name_next();
  delta::Delta encode(const Reference& before, const Reference& after, delta::ValueForm form) const;
  StagedStep staged(delta::Delta encoded) const;
  StagedFrame staged(std::vector<std::byte> bytes) const;

  TestModel model_;
  Reference now_;
  std::uint64_t seed_;
  mutable ThreadPool pool_{2, "trainer"};
};

/// Later than any test that passes.
inline Deadline in_time() {
  return Deadline::after(std::chrono::minutes(2));
}

/// Puts a tile of a half into the target's open full update; all of them.
Status put_from_half(Target& target, const Reference& reference, const Tile& tile);
void fill_full(Target& target, const Reference& reference);
/// begin_full, fill, commit_full.
Status commit_whole(Target& target, const Reference& reference, FullUpdatePolicy policy = FullUpdatePolicy::stage);

/// The tensors of the committed version, laid out like a half with zero padding.
std::vector<std::byte> read_live(const Target& target);

}  // namespace deltasync::test
