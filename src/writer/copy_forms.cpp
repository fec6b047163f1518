#include "writer/copy_forms.hpp"

#include <cstring>
#include <string_view>
#include <vector>

#include "delta/delta.hpp"
#include "writer/copy_lines.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace deltasync {
namespace {

std::size_t copy_all(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
  return bytes;
}

#if defined(__SSE2__)
struct Line128 {
  static void copy(std::byte* to, const std::byte* from) noexcept {
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
};
#elif defined(__aarch64__)
struct Line128 {
  static void copy(std::byte* to, const std::byte* from) noexcept {
    asm volatile(
        "ldp q0, q1, [%1]\n\t"
        "ldp q2, q3, [%1, #32]\n\t"
        "stnp q0, q1, [%0]\n\t"
        "stnp q2, q3, [%0, #32]"
        :
        : "r"(to), "r"(from)
        : "v0", "v1", "v2", "v3", "memory");
  }
};
#endif

std::vector<CopyForm> list_forms() {
  std::vector<CopyForm> forms = {{"memcpy", copy_all}};
#if defined(__SSE2__) || defined(__aarch64__)
  forms.push_back({"stream 16 bytes", stream_lines<Line128, 1>});
  forms.push_back({"stream 16 bytes, 4 pages", stream_lines<Line128, 4>});
#else
  forms.push_back({"memcpy, as usual", copy_all});
#endif
#ifdef DELTASYNC_X86_COPY
  const std::string_view isa = delta::isa_name();
  if (isa != "scalar") forms.insert(forms.end(), std::begin(kAvx2CopyForms), std::end(kAvx2CopyForms));
  if (isa == "avx512") forms.insert(forms.end(), std::begin(kAvx512CopyForms), std::end(kAvx512CopyForms));
#endif
  return forms;
}

}  // namespace

std::span<const CopyForm> copy_forms() {
  static const std::vector<CopyForm> forms = list_forms();
  return forms;
}

}  // namespace deltasync
