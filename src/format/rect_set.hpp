// A growing set of disjoint rectangles of one tensor, as row bands that each hold sorted column ranges.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "deltasync/layout.hpp"

namespace deltasync {

/// Inserts cost O(log n + bands touched): slices by rows, by columns or in a grid touch few.
class RectSet {
 public:
  /// Adds a rectangle that is not empty. If it overlaps one that is there, nothing is added and a part that both have
  /// is returned.
  std::optional<Rect> insert(const Rect& rect);
  std::uint64_t elements() const noexcept { return elements_; }
  /// A part that both the set and the rectangle have.
  std::optional<Rect> overlap(const Rect& rect) const;
  /// Appends disjoint rectangles that make up what the set has of this one, and what it does not.
  void split(const Rect& rect, std::vector<Rect>& inside, std::vector<Rect>& outside) const;
  /// Adds what the set does not have of a rectangle, and returns that.
  std::vector<Rect> add(const Rect& rect);
  /// The first part of rows × cols, in row order, that is not in the set; nullopt if there is none.
  std::optional<Rect> first_hole(std::uint64_t rows, std::uint64_t cols) const;
  void clear();

 private:
  struct Range {
    std::uint64_t start = 0;
    std::uint64_t end = 0;
  };
  struct Band {
    std::uint64_t end = 0;      ///< row behind the last
    std::vector<Range> ranges;  ///< of columns; sorted, disjoint, not adjacent
  };
  using Bands = std::map<std::uint64_t, Band>;  ///< by first row; disjoint, each with at least one range

  Bands::const_iterator first_band(std::uint64_t row) const;
  void split_at(std::uint64_t row);
  static void add_range(std::vector<Range>& ranges, Range range);

  Bands bands_;
  std::uint64_t elements_ = 0;
};

}  // namespace deltasync
