#include "writer/copy.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "writer/copy_lines.hpp"
#include "writer/copy_transposed.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace deltasync {
namespace {

constexpr std::size_t kChunkBytesMin = 512u << 10;
constexpr std::size_t kRunStreamBytesMin = 512;  ///< rows of a run of small jobs, which share one fence
constexpr std::size_t kChunkBytesMax = 4u << 20;

/// Stores past the caches are ordered by nothing else: on x86 not even by a release store after them.
void copy_fence() noexcept {
#if defined(__SSE2__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

/// One row, if its rows follow each other without gaps.
CopyJob flat(CopyJob job) noexcept {
  if (job.from_col_stride == 0 && job.to_stride == job.row_bytes && job.from_stride == job.row_bytes) {
    job.row_bytes *= static_cast<std::size_t>(std::exchange(job.rows, 1));
  }
  return job;
}

void run_form(const CopyForm& form, std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  const std::size_t head =
      std::min(bytes, (kLineBytes - reinterpret_cast<std::uintptr_t>(to) % kLineBytes) % kLineBytes);
  std::memcpy(to, from, head);
  const std::size_t done = head + form.lines(to + head, from + head, bytes - head);
  std::memcpy(to + done, from + done, bytes - done);
}

/// Row by row on the calling thread, without the fence. From `stream_bytes_min` up a row may go past the caches.
void copy_rows(const CopyForm& form, const CopyJob& given, std::size_t stream_bytes_min) noexcept {
  if (given.rows == 0 || given.row_bytes == 0) return;  // the source may be null
  if (given.from_col_stride != 0) return copy_transposed(given);
  const CopyJob job = flat(given);
  for (std::uint64_t row = 0; row < job.rows; ++row) {
    std::byte* const to = job.to + row * job.to_stride;
    const std::byte* const from = job.from + row * job.from_stride;
    if (job.row_bytes < stream_bytes_min) {
      std::memcpy(to, from, job.row_bytes);
    } else {
      run_form(form, to, from, job.row_bytes);
    }
  }
}

}  // namespace

Copier::Copier(unsigned threads, const std::string& name)
    : pool_(threads, name),
      long_rows_(static_cast<unsigned>(copy_forms().size()), kUsualForm),
      short_rows_(long_rows_.forms(), kUsualForm) {}

Copier::InUse Copier::form() const {
  const std::optional<unsigned> of_long = long_rows_.chosen();
  const std::optional<unsigned> chosen = of_long ? of_long : short_rows_.chosen();
  return {copy_forms()[chosen.value_or(kUsualForm)].name, chosen.has_value()};
}

void Copier::copy(std::span<const CopyJob> jobs) {
  parts_.clear();
  tasks_.clear();
  std::uint64_t bytes = 0;
  for (const CopyJob& job : jobs) bytes += job.bytes();
  const auto chunk = static_cast<std::size_t>(
      std::clamp<std::uint64_t>(bytes / (std::uint64_t{pool_.size()} * 4), kChunkBytesMin, kChunkBytesMax));
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (jobs[i].bytes() >= kParallelBytesMin && jobs[i].from_col_stride != 0) {
      cut_transposed(jobs[i], chunk);
    } else if (jobs[i].bytes() >= kParallelBytesMin) {
      cut(flat(jobs[i]), chunk);
    } else {
      append(jobs, i, chunk);
    }
  }
  const auto copy_one = [&](std::uint64_t index, unsigned) { copy_task(jobs, tasks_[index]); };
  if (bytes >= kParallelBytesMin) return pool_.run(tasks_.size(), copy_one);
  for (std::size_t p = 0; p < tasks_.size(); ++p) copy_one(p, 0);
}

/// A large job, as groups of rows, or as parts of a row where rows are long.
void Copier::cut(const CopyJob& job, std::size_t chunk) {
  const auto add = [this](const CopyJob& part) {
    tasks_.push_back(
        {parts_.size(), parts_.size() + 1, part.bytes(), part.row_bytes >= kStreamBytesMin ? part.bytes() : 0, true});
    parts_.push_back(part);
  };
  if (job.row_bytes <= chunk) {
    const std::uint64_t rows = chunk / job.row_bytes;
    for (std::uint64_t row = 0; row < job.rows; row += rows) {
      add({job.to + row * job.to_stride, job.to_stride, job.from + row * job.from_stride, job.from_stride,
           std::min(rows, job.rows - row), job.row_bytes});
    }
    return;
  }
  // Equal parts of whole lines, so that no two threads store into one line.
  const std::size_t parts = (job.row_bytes + chunk - 1) / chunk;
  const std::size_t part_bytes = (job.row_bytes / parts + kLineBytes - 1) / kLineBytes * kLineBytes;
  for (std::uint64_t row = 0; row < job.rows; ++row) {
    for (std::size_t at = 0; at < job.row_bytes; at += part_bytes) {
      add({job.to + row * job.to_stride + at, job.to_stride, job.from + row * job.from_stride + at, job.from_stride, 1,
           std::min(part_bytes, job.row_bytes - at)});
    }
  }
}

/// A large job of which whole tiles are copied at a time: as bands of rows, or parts of these.
void Copier::cut_transposed(const CopyJob& job, std::size_t chunk) {
  const std::size_t band_cols = chunk / (kTransposedTile * job.element_bytes) / kTransposedTile * kTransposedTile;
  const std::size_t cols = std::max(band_cols, kTransposedTile);
  for (std::uint64_t row = 0; row < job.rows; row += kTransposedTile) {
    for (std::size_t col = 0; col < job.cols(); col += cols) {
      CopyJob part = job;
      part.to += row * job.to_stride + col * job.element_bytes;
      part.from += row * job.from_stride + col * job.from_col_stride;
      part.rows = std::min<std::uint64_t>(kTransposedTile, job.rows - row);
      part.row_bytes = std::min(cols, job.cols() - col) * job.element_bytes;
      tasks_.push_back({parts_.size(), parts_.size() + 1, part.bytes(), 0, true});
      parts_.push_back(part);
    }
  }
}

/// A small job, to the ones before it as long as they are less than a chunk.
void Copier::append(std::span<const CopyJob> jobs, std::size_t i, std::size_t chunk) {
  if (tasks_.empty() || tasks_.back().is_part || tasks_.back().bytes >= chunk) tasks_.push_back({i, i, 0, 0, false});
  Task& run = tasks_.back();
  run.end = i + 1;
  run.bytes += jobs[i].bytes();
  if (jobs[i].from_col_stride == 0 && flat(jobs[i]).row_bytes >= kRunStreamBytesMin) run.streamed += jobs[i].bytes();
}

/// On the calling thread. Each thread orders its own stores, before the pool's lock hands them over.
void Copier::copy_task(std::span<const CopyJob> jobs, const Task& task) noexcept {
  const std::span<const CopyJob> all = task.is_part ? std::span<const CopyJob>(parts_) : jobs;
  FormChoice& choice = task.is_part ? long_rows_ : short_rows_;
  const std::size_t stream_min = task.is_part ? kStreamBytesMin : kRunStreamBytesMin;
  choice.run(static_cast<std::size_t>(task.streamed), steady_, [&](unsigned form) {
    for (std::size_t i = task.first; i < task.end; ++i) copy_rows(copy_forms()[form], all[i], stream_min);
    copy_fence();
  });
}

void copy_in_form(const CopyForm& form, std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  run_form(form, to, from, bytes);
  copy_fence();
}

}  // namespace deltasync
