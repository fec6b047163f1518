// Proof that every byte of a version is written exactly once: by all writers' plans together (check_coverage), and by
// one writer's calls in each fill (Coverage). Pure: rectangles in, errors out.
//
// Errors give half-open ranges of the 2-D view: "written twice: model.x rows 3..9, columns 0..64" is rows 3 to 8.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"
#include "deltasync/result.hpp"
#include "deltasync/writer.hpp"
#include "format/rect_set.hpp"

namespace deltasync {

/// out_of_range unless the slice names a tensor of the layout and lies inside of it. An empty rectangle may lie
/// anywhere inside, its edge included.
Status check_slice(const Layout& layout, const TensorSlice& slice);

/// "model.x rows 3..9, columns 0..64"; a range that is all of the tensor's is left out.
std::string describe_slice(const Tensor& tensor, const Rect& rect);

/// The slices, in any order, are disjoint. Errors: out_of_range, coverage ("written twice: …").
Status check_disjoint(const Layout& layout, std::span<const TensorSlice> slices);
/// Disjoint, and together the whole layout. Errors as above, and coverage ("never written: …"). O(n log n).
Status check_coverage(const Layout& layout, std::span<const TensorSlice> slices);

/// What one writer has written in the open fill. Without a plan it has to write the whole layout, in slices of its
/// own choice; with one, exactly the plan's rectangles, in any order. Empty rectangles are accepted and ignored.
/// A fill that repeats the calls of the last complete one costs a comparison per call. Not thread-safe.
class Coverage {
 public:
  explicit Coverage(LayoutPtr layout);

  /// From the next reset() on, only these rectangles. Checks that they are disjoint; that all writers' plans together
  /// cover the layout is check_coverage's affair.
  Status set_plan(std::span<const TensorSlice> plan);
  void clear_plan();

  /// A new fill: nothing is written yet. O(1) but for slices of tensors written in parts.
  void reset();
  /// Errors: out_of_range, coverage ("written twice", "not in this writer's plan"). After an error only reset() helps.
  Status add(std::uint32_t tensor, const Rect& rect);
  /// Everything is written. coverage names the first tensor that is not.
  Status finish();

 private:
  struct TensorState {
    std::uint32_t fill = 0;   ///< the fill (fill_) that this state is of; an older one means untouched
    std::uint32_t parts = 0;  ///< index in parts_, if written in parts; else it was written whole
    bool whole = false;
    bool covered = false;
  };

  Status add_planned(const TensorSlice& slice);
  Status finish_planned();
  Status add_free(const TensorSlice& slice);
  Status finish_free() const;
  Status leave_last_sequence();

  const LayoutPtr layout_;
  std::uint64_t tensors_with_elements_ = 0;
  std::uint32_t fill_ = 1;

  // Without a plan.
  std::vector<TensorState> states_;  ///< by tensor
  std::vector<RectSet> parts_;
  std::uint64_t covered_ = 0;         ///< tensors
  std::vector<TensorSlice> last_;     ///< the calls of the last fill that was complete
  std::vector<TensorSlice> current_;  ///< the calls of this fill, once it differs from last_
  bool follows_last_ = false;         ///< so far this fill is a prefix of last_
  std::size_t position_ = 0;          ///< in last_ or in plan_: the call expected next

  // With a plan.
  bool planned_ = false;
  std::vector<TensorSlice> plan_;
  std::vector<std::uint32_t> plan_order_;  ///< indices of plan_, sorted by tensor and rectangle
  std::vector<std::uint32_t> plan_fill_;   ///< per rectangle: the fill that wrote it last
  std::uint64_t plan_done_ = 0;
};

}  // namespace deltasync
