#include "format/coverage.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace deltasync {
namespace {

auto key_of(const TensorSlice& s) {
  return std::make_tuple(s.tensor, s.rect.row, s.rect.col, s.rect.rows, s.rect.cols);
}

bool same(const TensorSlice& a, const TensorSlice& b) {
  return a.tensor == b.tensor && a.rect == b.rect;
}

Error twice(const Tensor& tensor, const Rect& rect) {
  return {Errc::coverage, "written twice: " + describe_slice(tensor, rect)};
}

Error never(const Tensor& tensor, const Rect& rect) {
  return {Errc::coverage, "never written: " + describe_slice(tensor, rect)};
}

}  // namespace

Coverage::Coverage(LayoutPtr layout) : layout_(std::move(layout)), states_(layout_->tensors().size()) {
  for (const auto& t : layout_->tensors()) tensors_with_elements_ += t.tile_count != 0 ? 1 : 0;
}

Status Coverage::set_plan(std::span<const TensorSlice> plan) {
  DS_TRY(check_disjoint(*layout_, plan));
  plan_.clear();
  for (const auto& slice : plan) {
    if (slice.rect.elements() != 0) plan_.push_back(slice);
  }
  plan_order_.resize(plan_.size());
  std::iota(plan_order_.begin(), plan_order_.end(), 0u);
  std::sort(plan_order_.begin(), plan_order_.end(),
            [&](std::uint32_t a, std::uint32_t b) { return key_of(plan_[a]) < key_of(plan_[b]); });
  plan_fill_.assign(plan_.size(), 0);
  planned_ = true;
  last_.clear();
  reset();
  return {};
}

void Coverage::clear_plan() {
  planned_ = false;
  plan_.clear();
  reset();
}

void Coverage::reset() {
  if (++fill_ == 0) {  // wrapped: no stamp of four billion fills ago may count
    for (auto& s : states_) s.fill = 0;
    std::fill(plan_fill_.begin(), plan_fill_.end(), 0u);
    fill_ = 1;
  }
  parts_.clear();
  covered_ = 0;
  current_.clear();
  follows_last_ = !last_.empty();
  position_ = 0;
  plan_done_ = 0;
}

Status Coverage::add(std::uint32_t tensor, const Rect& rect) {
  const TensorSlice slice{tensor, rect};
  if (rect.rows == 0 || rect.cols == 0) return check_slice(*layout_, slice);
  if (planned_) return add_planned(slice);
  if (follows_last_) {
    if (position_ < last_.size() && same(last_[position_], slice)) {
      ++position_;
      return {};
    }
    DS_TRY(leave_last_sequence());
  }
  DS_TRY(check_slice(*layout_, slice));
  return add_free(slice);
}

Status Coverage::finish() {
  if (planned_) return finish_planned();
  if (follows_last_) {
    if (position_ == last_.size()) return {};  // the very calls that were found complete before
    DS_TRY(leave_last_sequence());
  }
  DS_TRY(finish_free());
  std::swap(last_, current_);
  return {};
}

// ---- without a plan ------------------------------------------------------------------------------------------

/// This fill is no repetition of the last one: what was only compared so far is added for real.
Status Coverage::leave_last_sequence() {
  follows_last_ = false;
  for (std::size_t i = 0; i < position_; ++i) DS_TRY(add_free(last_[i]));
  return {};
}

/// `slice` is inside its tensor and not empty.
Status Coverage::add_free(const TensorSlice& slice) {
  const Tensor& tensor = layout_->tensors()[slice.tensor];
  TensorState& state = states_[slice.tensor];
  const bool whole = slice.rect == Rect{0, 0, tensor.rows, tensor.cols};
  if (state.fill != fill_) {
    state = {fill_, 0, whole, whole};
    if (!whole) {
      state.parts = static_cast<std::uint32_t>(parts_.size());
      parts_.emplace_back();
    }
  } else if (state.whole) {
    return twice(tensor, slice.rect);
  }
  if (!whole || !state.whole) {
    auto& parts = parts_[state.parts];
    if (const auto both = parts.insert(slice.rect)) return twice(tensor, *both);
    state.covered = parts.elements() == tensor.rows * tensor.cols;
  }
  covered_ += state.covered ? 1 : 0;
  current_.push_back(slice);
  return {};
}

Status Coverage::finish_free() const {
  if (covered_ == tensors_with_elements_) return {};
  for (std::size_t i = 0; i < states_.size(); ++i) {
    const Tensor& tensor = layout_->tensors()[i];
    if (tensor.tile_count == 0) continue;
    const TensorState& state = states_[i];
    if (state.fill != fill_) return never(tensor, {0, 0, tensor.rows, tensor.cols});
    if (state.covered) continue;
    const auto hole = parts_[state.parts].first_hole(tensor.rows, tensor.cols);
    return never(tensor, hole.value_or(Rect{0, 0, tensor.rows, tensor.cols}));
  }
  return Error(Errc::internal, "coverage: the count of covered tensors is wrong");
}

// ---- with a plan ---------------------------------------------------------------------------------------------

Status Coverage::add_planned(const TensorSlice& slice) {
  std::size_t index = position_;
  if (index >= plan_.size() || !same(plan_[index], slice)) {  // out of the plan's order
    DS_TRY(check_slice(*layout_, slice));
    const auto key = key_of(slice);
    const auto found = std::lower_bound(plan_order_.begin(), plan_order_.end(), key,
                                        [&](std::uint32_t i, const auto& wanted) { return key_of(plan_[i]) < wanted; });
    if (found == plan_order_.end() || !same(plan_[*found], slice)) {
      return Error(Errc::coverage,
                   "not in this writer's plan: " + describe_slice(layout_->tensors()[slice.tensor], slice.rect));
    }
    index = *found;
  }
  if (plan_fill_[index] == fill_) return twice(layout_->tensors()[slice.tensor], slice.rect);
  plan_fill_[index] = fill_;
  ++plan_done_;
  position_ = index + 1;
  return {};
}

Status Coverage::finish_planned() {
  if (plan_done_ == plan_.size()) return {};
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    if (plan_fill_[i] != fill_) return never(layout_->tensors()[plan_[i].tensor], plan_[i].rect);
  }
  return Error(Errc::internal, "coverage: the count of done rectangles is wrong");
}

}  // namespace deltasync
