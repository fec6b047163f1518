// delta::from_container over hostile bytes; every record that it lets through is decoded over a tile of zeros.
#include "delta/delta.hpp"
#include "fuzz_delta_layout.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto delta = delta::from_container(bytes, fuzz::layout());
  if (!delta) return 0;
  for (const auto& frame : delta->frames) fuzz::decode_frame(fuzz::layout(), frame.bytes);
  return 0;
}
