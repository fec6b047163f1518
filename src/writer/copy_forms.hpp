// The forms of a long copy. Why most of them store past the caches: the half is written once and read by another
// process later, so fetching its lines before overwriting them is a third of the traffic for nothing. How wide the
// stores should be, and how many pages side by side, differs: four pages by 16-byte stores are the best on one
// processor (a Xeon of the Sapphire Rapids class) and take four times as long as memcpy on another (an EPYC without
// AVX-512).
#pragma once

#include <cstddef>
#include <span>

namespace deltasync {

struct CopyForm {
  const char* name;
  /// Copies whole lines to an aligned place, and may leave the rest. Returns the bytes done.
  std::size_t (*lines)(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
};

/// Those that this CPU has, within what DELTASYNC_ISA allows. The first is memcpy; the second is the usual one, which
/// is no slower than memcpy wherever it was tried.
std::span<const CopyForm> copy_forms();
inline constexpr unsigned kMemcpyForm = 0;
inline constexpr unsigned kUsualForm = 1;

#ifdef DELTASYNC_X86_COPY
extern const CopyForm kAvx2CopyForms[2];
extern const CopyForm kAvx512CopyForms[2];
#endif

}  // namespace deltasync
