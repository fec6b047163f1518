// Which batches of the layout the slices of a fill lie in, so that the agent learns which of them are whole. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "delta/delta.hpp"
#include "deltasync/layout.hpp"

namespace deltasync {

/// Adds up elements by batch. Slices that lie in the same batch and follow each other make one part.
class BatchCounter {
 public:
  struct Part {
    std::uint64_t batch = 0;
    std::uint64_t elements = 0;
  };

  explicit BatchCounter(LayoutPtr layout);

  std::size_t batches() const noexcept { return batches_.size(); }
  /// `rect` lies inside the tensor.
  void add(std::uint32_t tensor, const Rect& rect) {
    const Tensor& t = layout_->tensors()[tensor];
    if (t.tile_count == 1 && !parts_.empty() && t.first_tile >= here_.first && t.first_tile < here_.end) {
      parts_.back().elements += rect.elements();
    } else if (rect.rows != 0 && rect.cols != 0) {
      add_tiles(tensor, rect);
    }
  }
  std::span<const Part> parts() const noexcept { return parts_; }
  void clear() noexcept { parts_.clear(); }

 private:
  void add_tiles(std::uint32_t tensor, const Rect& rect);
  void add_elements(std::uint64_t tile, std::uint64_t elements);

  const LayoutPtr layout_;
  const std::vector<delta::Batch> batches_;
  std::vector<Part> parts_;
  delta::Batch here_;  ///< the last part's batch
};

}  // namespace deltasync
