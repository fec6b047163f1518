// Copies slices into a half: by several threads where that pays, by non-temporal stores where they win.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/thread_pool.hpp"

namespace deltasync {

/// A rectangle of bytes: `rows` runs of `row_bytes`, each a stride after the one before.
struct CopyJob {
  std::byte* to = nullptr;
  std::size_t to_stride = 0;
  const std::byte* from = nullptr;
  std::size_t from_stride = 0;
  std::uint64_t rows = 0;
  std::size_t row_bytes = 0;
};

/// Returns when all bytes are in place and ordered before anything that the caller stores next. Small jobs stay on
/// the calling thread and allocate nothing. Source and destination must not overlap.
void copy(const CopyJob& job, ThreadPool& pool);

/// Copies all jobs, small ones many at a time on each thread. Destinations must not overlap. As copy() otherwise.
void copy(std::span<const CopyJob> jobs, ThreadPool& pool);

/// One run of bytes on the calling thread. Sizes from kStreamBytesMin up go past the caches; copy_fence() must follow
/// before the copy is published.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
void copy_fence() noexcept;

inline constexpr std::size_t kStreamBytesMin = 64u << 10;
inline constexpr std::size_t kParallelBytesMin = 2u << 20;  ///< below, waking threads costs more than it saves

}  // namespace deltasync
