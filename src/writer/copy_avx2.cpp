#include <immintrin.h>

#include "writer/copy_forms.hpp"
#include "writer/copy_lines.hpp"

namespace deltasync {
namespace {

struct Line256 {
  static void copy(std::byte* to, const std::byte* from) noexcept {
    const auto* in = reinterpret_cast<const __m256i*>(from);
    auto* out = reinterpret_cast<__m256i*>(to);
    const __m256i a = _mm256_loadu_si256(in);
    const __m256i b = _mm256_loadu_si256(in + 1);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
  }
};

}  // namespace

const CopyForm kAvx2CopyForms[2] = {{"stream 32 bytes", stream_lines<Line256, 1>},
                                    {"stream 32 bytes, 4 pages", stream_lines<Line256, 4>}};

}  // namespace deltasync
