// The safetensors header parser: first 8 bytes = size of the data section, the rest = a file's header. What it accepts
// must tile the data section exactly.
#include <cstdlib>

#include "format/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  if (size < 8) return 0;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto data_bytes = load<std::uint64_t>(bytes.data());
  const ByteSpan header = bytes.subspan(8);
  (void)safetensors::header_bytes(header, header.size());
  const auto entries = safetensors::parse_header(header, data_bytes);
  if (!entries) return 0;
  std::uint64_t at = 0;
  for (const auto& entry : *entries) {
    if (entry.begin != at || entry.end < entry.begin) std::abort();
    at = entry.end;
  }
  if (at != data_bytes) std::abort();
  return 0;
}
