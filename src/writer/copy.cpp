// Why non-temporal stores: the half is written once and read by another process later, so fetching its lines before
// overwriting them is a third of the traffic for nothing. Measured on 2 GiB into a pre-faulted /dev/shm mapping, Xeon
// (Sapphire Rapids class), GB/s by 1 and 2 threads, chunks of 1 MiB:
//   memcpy (glibc 2.36)            7.2   13.8
//   SSE2 stores, one page          11.4   22.2
//   SSE2 stores, four pages a round 12.3   23.1    <- used: no run-time choice of instruction set needed
//   AVX2 stores, four pages a round 12.7   23.9
//   AVX-512 stores, one page        9.2   17.1
#include "writer/copy.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace deltasync {
namespace {

constexpr std::size_t kChunkBytesMin = 512u << 10;
constexpr std::size_t kRunStreamBytesMin = 512;  ///< rows of a run of small jobs, which share one fence
constexpr std::size_t kChunkBytesMax = 4u << 20;

#if defined(__SSE2__)
constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kPagesPerRound = 4;

inline void stream_line(std::byte* to, const std::byte* from) noexcept {
  const auto* in = reinterpret_cast<const __m128i*>(from);
  auto* out = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(in);
  const __m128i b = _mm_loadu_si128(in + 1);
  const __m128i c = _mm_loadu_si128(in + 2);
  const __m128i d = _mm_loadu_si128(in + 3);
  _mm_stream_si128(out, a);
  _mm_stream_si128(out + 1, b);
  _mm_stream_si128(out + 2, c);
  _mm_stream_si128(out + 3, d);
}

/// `to` is aligned to a line. Four pages are copied side by side, so that four streams of the prefetcher and four
/// DRAM pages are open at once. Returns the bytes done: all whole lines.
std::size_t stream_lines(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::size_t at = 0;
  for (; bytes - at >= kPagesPerRound * kPage; at += kPagesPerRound * kPage) {
    for (std::size_t line = 0; line < kPage; line += kLine) {
      for (std::size_t page = 0; page < kPagesPerRound; ++page) {
        const std::size_t offset = at + page * kPage + line;
        stream_line(to + offset, from + offset);
      }
    }
  }
  for (; bytes - at >= kLine; at += kLine) stream_line(to + at, from + at);
  return at;
}
#endif

/// Copies unit `index` of a job cut into units: groups of rows, or parts of a row where rows are long.
struct Units {
  CopyJob job;
  std::uint64_t rows_per_unit = 1;
  std::uint64_t parts_per_row = 1;
  std::size_t part_bytes = 0;

  std::uint64_t count() const {
    return parts_per_row > 1 ? job.rows * parts_per_row : (job.rows + rows_per_unit - 1) / rows_per_unit;
  }
  void run(std::uint64_t index) const {
    if (parts_per_row > 1) {
      const std::uint64_t row = index / parts_per_row;
      const std::size_t at = static_cast<std::size_t>(index % parts_per_row) * part_bytes;
      copy_bytes(job.to + row * job.to_stride + at, job.from + row * job.from_stride + at,
                 std::min(part_bytes, job.row_bytes - at));
      return;
    }
    const std::uint64_t end = std::min(job.rows, (index + 1) * rows_per_unit);
    for (std::uint64_t row = index * rows_per_unit; row < end; ++row) {
      copy_bytes(job.to + row * job.to_stride, job.from + row * job.from_stride, job.row_bytes);
    }
  }
};

Units cut(const CopyJob& job, std::size_t chunk_bytes) {
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

}  // namespace

namespace {

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t stream_bytes_min) noexcept {
#if defined(__SSE2__)
  if (bytes >= stream_bytes_min) {
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    const std::size_t done = head + stream_lines(to + head, from + head, bytes - head);
    std::memcpy(to + done, from + done, bytes - done);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

/// Row by row, without the fence.
void copy_rows(const CopyJob& job, std::size_t stream_bytes_min) noexcept {
  if (job.row_bytes == 0) return;  // the source may be null
  for (std::uint64_t row = 0; row < job.rows; ++row) {
    copy_bytes(job.to + row * job.to_stride, job.from + row * job.from_stride, job.row_bytes, stream_bytes_min);
  }
}

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  copy_bytes(to, from, bytes, kStreamBytesMin);
}

void copy_fence() noexcept {
#if defined(__SSE2__)
  _mm_sfence();  // non-temporal stores are ordered by nothing else, not even by a release store after them
#endif
}

void copy(const CopyJob& given, ThreadPool& pool) {
  if (given.rows == 0 || given.row_bytes == 0) return;
  CopyJob job = given;
  if (job.to_stride == job.row_bytes && job.from_stride == job.row_bytes) {
    job.row_bytes *= static_cast<std::size_t>(job.rows);  // one flat run
    job.rows = 1;
  }
  const std::uint64_t bytes = job.rows * job.row_bytes;
  if (pool.size() == 1 || bytes < kParallelBytesMin) {
    copy_rows(job, kStreamBytesMin);
    copy_fence();
    return;
  }
  const auto chunk = static_cast<std::size_t>(
      std::clamp<std::uint64_t>(bytes / (std::uint64_t{pool.size()} * 4), kChunkBytesMin, kChunkBytesMax));
  const Units units = cut(job, chunk);
  pool.run(units.count(), [&units](std::uint64_t index, unsigned) {
    units.run(index);
    copy_fence();  // each thread orders its own stores before the pool's lock hands them over
  });
}

void copy(std::span<const CopyJob> jobs, ThreadPool& pool) {
  // Runs of neighbouring small jobs, [first, end), of about a chunk each; large jobs are split among the threads.
  std::vector<std::pair<std::size_t, std::size_t>> runs;
  std::uint64_t run_bytes = kChunkBytesMin;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::uint64_t bytes = jobs[i].rows * jobs[i].row_bytes;
    if (bytes >= kParallelBytesMin) {
      copy(jobs[i], pool);
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
  if (!runs.empty()) pool.run(runs.size(), copy_run);
}

}  // namespace deltasync
