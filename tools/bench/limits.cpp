#include "bench/limits.hpp"

#include <sys/mman.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "bench/bench.hpp"
#include "writer/copy.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kPiece = 4u << 20;

/// Keeps the optimiser from dropping the loads.
std::atomic<std::uint64_t> g_sink{0};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::byte* a, const std::byte* b, std::uint64_t n) {
  __m512i x = _mm512_setzero_si512();
  __m512i y = x;
  for (std::uint64_t i = 0; i + 128 <= n; i += 128) {
    x = _mm512_xor_si512(x, _mm512_xor_si512(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i)));
    y = _mm512_xor_si512(y, _mm512_xor_si512(_mm512_loadu_si512(a + i + 64), _mm512_loadu_si512(b + i + 64)));
  }
  std::uint64_t lanes[8];
  _mm512_storeu_si512(lanes, _mm512_xor_si512(x, y));
  return lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3] ^ lanes[4] ^ lanes[5] ^ lanes[6] ^ lanes[7];
}

__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::byte* a, const std::byte* b, std::uint64_t n) {
  __m256i x = _mm256_setzero_si256();
  for (std::uint64_t i = 0; i + 32 <= n; i += 32) {
    x = _mm256_xor_si256(x, _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i)),
                                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i))));
  }
  return static_cast<std::uint64_t>(_mm256_extract_epi64(x, 0) ^ _mm256_extract_epi64(x, 1) ^
                                    _mm256_extract_epi64(x, 2) ^ _mm256_extract_epi64(x, 3));
}

#endif

std::uint64_t read_scalar(const std::byte* a, const std::byte* b, std::uint64_t n) {
  std::uint64_t x = 0;
  for (std::uint64_t i = 0; i + 8 <= n; i += 8) {
    std::uint64_t u;
    std::uint64_t v;
    std::memcpy(&u, a + i, 8);
    std::memcpy(&v, b + i, 8);
    x ^= u ^ v;
  }
  return x;
}

using ReadFn = std::uint64_t (*)(const std::byte*, const std::byte*, std::uint64_t);
ReadFn widest_read() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_scalar;
}

}  // namespace

Result<Buffer> Buffer::allocate(std::uint64_t bytes, ThreadPool& pool) {
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return Error::from_errno("mmap of " + std::to_string(bytes) + " bytes", errno);
  ::madvise(p, bytes, MADV_HUGEPAGE);
  ::madvise(p, bytes, MADV_DONTFORK);
  Buffer buffer(static_cast<std::byte*>(p), bytes);
  pool.run((bytes + kPiece - 1) / kPiece, [&](std::uint64_t i, unsigned) {
    std::memset(buffer.data_ + i * kPiece, 1, std::min(kPiece, bytes - i * kPiece));
  });
  return buffer;
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
Buffer::~Buffer() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

double copy_once(std::span<std::byte> to, std::span<const std::byte> from, ThreadPool& pool) {
  const std::uint64_t bytes = from.size();
  const auto in_pieces = [&](std::uint64_t piece) {
    const Stopwatch watch;
    pool.run((bytes + piece - 1) / piece, [&](std::uint64_t i, unsigned) {
      std::memcpy(to.data() + i * piece, from.data() + i * piece, std::min(piece, bytes - i * piece));
    });
    return watch.seconds();
  };
  const double pieces_s = in_pieces(kPiece);
  const double shares_s = in_pieces((bytes / pool.size() + 4095) / 4096 * 4096 + 4096);
  static FormChoice choice(static_cast<unsigned>(copy_forms().size()), kUsualForm);
  const Stopwatch watch;
  pool.run((bytes + kPiece - 1) / kPiece, [&](std::uint64_t i, unsigned) {
    const std::size_t at = i * kPiece;
    const std::size_t size = std::min<std::uint64_t>(kPiece, bytes - at);
    choice.run(size, true,
               [&](unsigned form) { copy_in_form(copy_forms()[form], to.data() + at, from.data() + at, size); });
  });
  return std::min({pieces_s, shares_s, watch.seconds()});
}

double memcpy_s(std::span<std::byte> to, std::span<const std::byte> from, ThreadPool& pool) {
  double best = 1e300;
  for (int i = 0; i < 5; ++i) best = std::min(best, copy_once(to, from, pool));
  return best;
}

double read_both_once(std::span<const std::byte> a, std::span<const std::byte> b, ThreadPool& pool) {
  const ReadFn read = widest_read();
  const std::uint64_t bytes = std::min(a.size(), b.size());
  const Stopwatch watch;
  pool.run((bytes + kPiece - 1) / kPiece, [&](std::uint64_t i, unsigned) {
    g_sink += read(a.data() + i * kPiece, b.data() + i * kPiece, std::min(kPiece, bytes - i * kPiece));
  });
  return watch.seconds();
}

}  // namespace deltasync::bench
