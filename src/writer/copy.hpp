// Copies slices into a half: by several threads where that pays, and in the form that is the fastest here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/form_choice.hpp"
#include "base/thread_pool.hpp"
#include "writer/copy_forms.hpp"

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

/// What copies into one segment. Used by one thread at a time.
class Copier {
 public:
  /// `threads` ≥ 1, the caller included; those that it starts are named after `name`.
  Copier(unsigned threads, const std::string& name);

  /// Returns when all bytes are in place and ordered before anything that the caller stores next. Small jobs stay on
  /// the calling thread and allocate nothing. Source and destination must not overlap.
  void copy(const CopyJob& job);
  /// Copies all jobs, small ones many at a time on each thread. Destinations must not overlap. As copy() otherwise.
  void copy(std::span<const CopyJob> jobs);

  /// Whether copies take as long as they always will: all pages that they write to were touched before. Until then none
  /// is timed, and none of the forms is chosen.
  void set_steady(bool steady) noexcept { steady_ = steady; }
  /// The form of long copies. `chosen` is false as long as it is only the usual one.
  struct InUse {
    const char* name;
    bool chosen;
  };
  InUse form() const;
  unsigned threads() const noexcept { return pool_.size(); }

 private:
  /// One run of bytes on the calling thread. From `stream_bytes_min` up it goes past the caches: copy_fence() must
  /// follow.
  void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t stream_bytes_min) noexcept;
  void copy_rows(const CopyJob& given, std::size_t stream_bytes_min) noexcept;
  struct Units;
  void copy_unit(const Units& units, std::uint64_t index) noexcept;

  ThreadPool pool_;
  FormChoice choice_;
  bool steady_ = false;
};

/// A copy in one form on the calling thread, ordered as copy() orders it.
void copy_in_form(const CopyForm& form, std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

inline constexpr std::size_t kStreamBytesMin = 64u << 10;
inline constexpr std::size_t kParallelBytesMin = 2u << 20;  ///< below, waking threads costs more than it saves

}  // namespace deltasync
