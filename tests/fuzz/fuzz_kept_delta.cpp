// decode_kept_delta over hostile bytes: what it lets through is written as it was read.
#include <algorithm>
#include <cstdlib>

#include "delta/kept_delta.hpp"
#include "fuzz_delta_layout.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto kept = delta::decode_kept_delta(bytes, fuzz::layout());
  if (!kept) return 0;
  const auto head = delta::kept_delta_head(kept->delta, kept->from, kept->to, kept->before);
  if (head.size() > bytes.size() || !std::equal(head.begin(), head.end(), bytes.begin())) std::abort();
  for (const auto& frame : kept->delta.frames) fuzz::decode_frame(fuzz::layout(), frame.bytes);
  return 0;
}
