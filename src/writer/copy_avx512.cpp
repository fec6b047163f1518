#include <immintrin.h>

#include "writer/copy_forms.hpp"
#include "writer/copy_lines.hpp"

namespace deltasync {
namespace {

struct Line512 {
  static void copy(std::byte* to, const std::byte* from) noexcept {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
};

}  // namespace

const CopyForm kAvx512CopyForms[2] = {{"stream 64 bytes", stream_lines<Line512, 1>},
                                      {"stream 64 bytes, 4 pages", stream_lines<Line512, 4>}};

}  // namespace deltasync
