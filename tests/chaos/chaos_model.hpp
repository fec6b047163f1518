// The model of the chaos runs: what every element is in every version, in closed form. A process that holds a version
// can say of each of its bytes what it must be, from the version's number alone and without a byte of the project's
// formats. tests/chaos/chaos_model.py says the same in Python.
//
// A version's number is step × kVariants + variant. A variant is a layout; about 1 % of the elements change from one
// step to the next.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "deltasync/layout.hpp"

namespace deltasync::chaos {

inline constexpr std::uint64_t kVariants = 8;
inline constexpr std::uint64_t kSmallVariant = kVariants - 1;  ///< a sixteenth of the others' size, for long runs
inline constexpr std::uint64_t kPeriod = 100;                  ///< steps after which an element has another value

/// Aborts if there is no such variant.
LayoutPtr make_layout(std::uint64_t variant);

/// The bits of one element, in the low bytes.
std::uint64_t element_bits(std::uint32_t tensor, std::uint64_t element, std::uint64_t number);

/// The rows [first, end) of a tensor, contiguous.
std::vector<std::byte> make_rows(const Tensor& tensor, std::uint32_t index, std::uint64_t number, std::uint64_t first,
                                 std::uint64_t end);

/// Where a tensor's elements are in somebody's memory: element (row, col) at row·row_stride + col·col_stride bytes.
struct Look {
  const std::byte* base = nullptr;
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;
};

/// An element that is not what it must be.
struct Wrong {
  std::uint32_t tensor = 0;
  std::uint64_t element = 0;
  std::uint64_t is = 0;
  std::uint64_t should_be = 0;
};

/// All of them in one tensor, appended to `found`; counting goes on behind `found_max`. Returns how many.
std::uint64_t find_wrong(const Tensor& tensor, std::uint32_t index, std::uint64_t number, const Look& look,
                         std::size_t found_max, std::vector<Wrong>& found);

}  // namespace deltasync::chaos
