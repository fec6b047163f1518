// Copies of a source whose rows are columns of the destination.
#pragma once

#include "writer/copy.hpp"

namespace deltasync {

/// Rows and columns of what is read and written at a time.
inline constexpr std::size_t kTransposedTile = 64;

/// Of a job with a stride from column to column; on the calling thread. Stores go through the caches: no fence.
void copy_transposed(const CopyJob& job) noexcept;

}  // namespace deltasync
