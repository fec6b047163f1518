// Where the elements of one tensor of the trainer go in a HF tensor, if it is cut into parts along dimension 0 and each
// part is seen another way. All of it is axes: each steps through the source and through the target by a fixed stride,
// and one number of each axis is one element.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"
#include "export/expression.hpp"

namespace deltasync::exporting {

struct Axis {
  std::uint64_t extent = 1;
  unsigned source_dim = 0;
  std::uint64_t source_stride = 1;  ///< in positions of that dimension
  std::uint64_t target_stride = 1;  ///< in elements

  std::uint64_t stride_end() const { return extent * source_stride; }
};

/// Places of the target that the map keeps to: `count` of `extent`, from the index-th on. All maps into one target have
/// the same strides and extents, and each other places: so that all of them together cover it once.
struct FixedAxis {
  std::uint64_t stride = 1;
  std::uint64_t extent = 1;
  std::uint64_t index = 0;
  std::uint64_t count = 1;
};

struct ElementMap {
  std::vector<Axis> axes;                    ///< those of one source dimension together, the largest stride first
  std::vector<std::uint64_t> source_begins;  ///< position of the first element, of each source dimension
  std::vector<std::uint64_t> target_shape;
  std::vector<FixedAxis> fixed;  ///< as the view names them

  std::uint64_t target_begin() const;
};

/// What `parts` says of dimension 0: `repeat * [name: size, …]`, one block of parts after the other.
struct Parts {
  struct Part {
    std::string name;  ///< "_" is dropped
    std::uint64_t begin = 0;
    std::uint64_t size = 0;
  };
  std::uint64_t repeat = 1;
  std::uint64_t block = 0;  ///< sum of the sizes
  std::vector<Part> parts;
};

/// Of `text`, or one part without a name where it is empty. The last size may be `*`, what is left.
///   - Errc::invalid_argument: another form, or sizes that are not those of a dimension of `rows`.
Result<Parts> parse_parts(std::string_view text, std::uint64_t rows, const Names& names);

/// `view`: `(G two:2 d) c -> (two G d) c`. On the left are the part's dimensions; one in parentheses is split into
/// names with sizes, of which one may be left out. On the right are the target's, of the same names; `index/extent` is
/// a fixed axis of one place, and `name@index/extent` one in which the name's positions are, from the index-th on; of
/// expressions without blanks. `...` on both sides is all other dimensions. Empty: as it is.
///   - Errc::invalid_argument: another form, names of one side only, sizes that do not fit the shape.
Result<ElementMap> map_part(const Parts& parts, const Parts::Part& part, std::string_view view,
                            std::span<const std::uint64_t> source_shape, const Names& names);

}  // namespace deltasync::exporting
