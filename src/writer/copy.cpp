#include "writer/copy.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "writer/copy_lines.hpp"

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
  if (job.to_stride == job.row_bytes && job.from_stride == job.row_bytes) {
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

}  // namespace

/// A job cut into units: groups of rows, or parts of a row where rows are long.
struct Copier::Units {
  CopyJob job;
  std::uint64_t rows_per_unit = 1;
  std::uint64_t parts_per_row = 1;
  std::size_t part_bytes = 0;

  static Units cut(const CopyJob& job, std::size_t chunk_bytes) {
    Units units{job, 1, 1, job.row_bytes};
    if (job.row_bytes > chunk_bytes) {
      // Equal parts of whole lines, so that no two threads store into one line.
      const std::uint64_t parts = (job.row_bytes + chunk_bytes - 1) / chunk_bytes;
      units.part_bytes = (job.row_bytes / parts + 63) / 64 * 64;
      units.parts_per_row = (job.row_bytes + units.part_bytes - 1) / units.part_bytes;
    } else {
      units.rows_per_unit = std::max<std::uint64_t>(1, chunk_bytes / job.row_bytes);
    }
    return units;
  }
  std::uint64_t count() const {
    return parts_per_row > 1 ? job.rows * parts_per_row : (job.rows + rows_per_unit - 1) / rows_per_unit;
  }
};

Copier::Copier(unsigned threads, const std::string& name)
    : pool_(threads, name), choice_(static_cast<unsigned>(copy_forms().size()), kUsualForm) {}

Copier::InUse Copier::form() const {
  const std::optional<unsigned> chosen = choice_.chosen();
  return {copy_forms()[chosen.value_or(kUsualForm)].name, chosen.has_value()};
}

void Copier::copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes,
                        std::size_t stream_bytes_min) noexcept {
  if (bytes < stream_bytes_min) {
    std::memcpy(to, from, bytes);
    return;
  }
  choice_.run(bytes, steady_, [&](unsigned form) { run_form(copy_forms()[form], to, from, bytes); });
}

/// Row by row, without the fence.
void Copier::copy_rows(const CopyJob& given, std::size_t stream_bytes_min) noexcept {
  if (given.rows == 0 || given.row_bytes == 0) return;  // the source may be null
  const CopyJob job = flat(given);
  for (std::uint64_t row = 0; row < job.rows; ++row) {
    copy_bytes(job.to + row * job.to_stride, job.from + row * job.from_stride, job.row_bytes, stream_bytes_min);
  }
}

void Copier::copy_unit(const Units& units, std::uint64_t index) noexcept {
  CopyJob job = units.job;
  if (units.parts_per_row > 1) {
    const std::uint64_t row = index / units.parts_per_row;
    const std::size_t at = static_cast<std::size_t>(index % units.parts_per_row) * units.part_bytes;
    copy_bytes(job.to + row * job.to_stride + at, job.from + row * job.from_stride + at,
               std::min(units.part_bytes, job.row_bytes - at), kStreamBytesMin);
    return;
  }
  const std::uint64_t first = index * units.rows_per_unit;
  job.to += first * job.to_stride;
  job.from += first * job.from_stride;
  job.rows = std::min(job.rows - first, units.rows_per_unit);
  copy_rows(job, kStreamBytesMin);
}

void Copier::copy(const CopyJob& given) {
  if (given.rows == 0 || given.row_bytes == 0) return;
  const CopyJob job = flat(given);
  const std::uint64_t bytes = job.rows * job.row_bytes;
  if (pool_.size() == 1 || bytes < kParallelBytesMin) {
    copy_rows(job, kStreamBytesMin);
    copy_fence();
    return;
  }
  const auto chunk = static_cast<std::size_t>(
      std::clamp<std::uint64_t>(bytes / (std::uint64_t{pool_.size()} * 4), kChunkBytesMin, kChunkBytesMax));
  const Units units = Units::cut(job, chunk);
  pool_.run(units.count(), [&](std::uint64_t index, unsigned) {
    copy_unit(units, index);
    copy_fence();  // each thread orders its own stores before the pool's lock hands them over
  });
}

void Copier::copy(std::span<const CopyJob> jobs) {
  // Runs of neighbouring small jobs, [first, end), of about a chunk each; large jobs are split among the threads.
  std::vector<std::pair<std::size_t, std::size_t>> runs;
  std::uint64_t run_bytes = kChunkBytesMin;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::uint64_t bytes = jobs[i].rows * jobs[i].row_bytes;
    if (bytes >= kParallelBytesMin) {
      copy(jobs[i]);
      run_bytes = kChunkBytesMin;
      continue;
    }
    if (run_bytes >= kChunkBytesMin) {
      runs.emplace_back(i, i);
      run_bytes = 0;
    }
    run_bytes += bytes;
    runs.back().second = i + 1;
  }
  const auto copy_run = [&](std::uint64_t run, unsigned) {
    for (std::size_t i = runs[run].first; i < runs[run].second; ++i) copy_rows(jobs[i], kRunStreamBytesMin);
    copy_fence();
  };
  if (runs.size() == 1) return copy_run(0, 0);
  if (!runs.empty()) pool_.run(runs.size(), copy_run);
}

void copy_in_form(const CopyForm& form, std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  run_form(form, to, from, bytes);
  copy_fence();
}

}  // namespace deltasync
