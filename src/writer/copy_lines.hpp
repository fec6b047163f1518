// The loop of the copies that go past the caches, for stores of any width.
#pragma once

#include <cstddef>

namespace deltasync {

inline constexpr std::size_t kLineBytes = 64;
inline constexpr std::size_t kPageBytes = 4096;

/// Copies whole lines to a place that is aligned to one; the last bytes, less than a line, are left. Several pages are
/// copied side by side, so that as many streams of the prefetcher and DRAM pages are open at once. Line::copy(to, from)
/// copies one. Returns the bytes done.
template <class Line, std::size_t kPages>
std::size_t stream_lines(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::size_t at = 0;
  if constexpr (kPages > 1) {
    for (; bytes - at >= kPages * kPageBytes; at += kPages * kPageBytes) {
      for (std::size_t line = 0; line < kPageBytes; line += kLineBytes) {
        for (std::size_t page = 0; page < kPages; ++page) {
          const std::size_t offset = at + page * kPageBytes + line;
          Line::copy(to + offset, from + offset);
        }
      }
    }
  }
  for (; bytes - at >= kLineBytes; at += kLineBytes) Line::copy(to + at, from + at);
  return at;
}

}  // namespace deltasync
