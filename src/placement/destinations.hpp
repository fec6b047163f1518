// Proof that no byte of live memory takes two elements: exact for every pair of strides.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "placement/regions.hpp"

namespace deltasync {

/// Where a slice's elements lie in its memory, in bytes: rows × cols of them, `element_bytes` wide. Inside the memory
/// and aligned; no two elements of one destination share a byte.
struct Destination {
  std::uint64_t offset = 0;
  std::uint64_t rows = 0;
  std::uint64_t cols = 0;
  std::uint64_t row_stride = 0;
  std::uint64_t col_stride = 0;
  std::uint32_t element_bytes = 0;
};

/// True if two elements of the destination share a byte. Strides of more than one row or column are multiples of the
/// element's width.
bool folds_onto_itself(const Destination& d) noexcept;

/// Two of the destinations (by index, the smaller first) that share a byte; nothing if all are disjoint. O(n log n)
/// where those that lie between each other's ends are runs of bytes or have one pitch in common; else the runs of these
/// are met in the order of their addresses, which takes as long as theirs alternate. Memory does not grow with that.
std::optional<std::pair<std::size_t, std::size_t>> find_shared_byte(std::span<const Destination> destinations);

}  // namespace deltasync
