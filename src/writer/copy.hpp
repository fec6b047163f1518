// Copies slices into a half: by several threads where that pays, and in the form that is the fastest here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/form_choice.hpp"
#include "base/thread_pool.hpp"
#include "writer/copy_forms.hpp"

namespace deltasync {

/// A rectangle of bytes: `rows` runs of `row_bytes`, each a stride after the one before. Its source may be transposed:
/// then the elements of a run lie a stride apart.
struct CopyJob {
  std::byte* to = nullptr;
  std::size_t to_stride = 0;
  const std::byte* from = nullptr;
  std::size_t from_stride = 0;
  std::uint64_t rows = 0;
  std::size_t row_bytes = 0;
  std::size_t from_col_stride = 0;  ///< 0: the bytes of a run are contiguous
  std::size_t element_bytes = 1;    ///< counts if they are not

  std::uint64_t bytes() const noexcept { return rows * row_bytes; }
  std::size_t cols() const noexcept { return row_bytes / element_bytes; }
};

/// What copies into one segment. Used by one thread at a time.
class Copier {
 public:
  /// `threads` ≥ 1, the caller included; those that it starts are named after `name`.
  Copier(unsigned threads, const std::string& name);

  /// Returns when all bytes are in place and ordered before anything that the caller stores next. All of it goes to the
  /// threads at once; less than kParallelBytesMin stays on the calling one. No source and no other destination may
  /// overlap a destination.
  void copy(std::span<const CopyJob> jobs);

  /// Whether copies take as long as they always will: all pages that they write to were touched before. Until then none
  /// is timed, and none of the forms is chosen.
  void set_steady(bool steady) noexcept { steady_ = steady; }
  /// The form of long rows, or of short ones where there are only those. `chosen` is false as long as it is only the
  /// usual one.
  struct InUse {
    const char* name;
    bool chosen;
  };
  InUse form() const;
  unsigned threads() const noexcept { return pool_.size(); }

 private:
  /// What one thread does at a time: a part of a large job, or a run of small jobs, which share one fence.
  struct Task {
    std::size_t first;  ///< of the parts, or of the jobs, as the next one
    std::size_t end;
    std::uint64_t bytes;
    std::uint64_t streamed;  ///< of them, in rows that are long enough to go past the caches
    bool is_part;
  };
  void cut(const CopyJob& job, std::size_t chunk);
  void cut_transposed(const CopyJob& job, std::size_t chunk);
  void append(std::span<const CopyJob> jobs, std::size_t i, std::size_t chunk);
  void copy_task(std::span<const CopyJob> jobs, const Task& task) noexcept;

  ThreadPool pool_;
  FormChoice long_rows_;
  FormChoice short_rows_;  ///< of many small jobs: no pages side by side
  bool steady_ = false;
  std::vector<CopyJob> parts_;  ///< of the jobs that are copied, as the next one; they keep their memory
  std::vector<Task> tasks_;
};

/// A copy in one form on the calling thread, ordered as copy() orders it.
void copy_in_form(const CopyForm& form, std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

inline constexpr std::size_t kStreamBytesMin = 64u << 10;
inline constexpr std::size_t kParallelBytesMin = 2u << 20;  ///< below, waking threads costs more than it saves

}  // namespace deltasync
