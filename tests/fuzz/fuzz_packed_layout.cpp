// A layout message's payload, unpacked as a peer's would be: what is accepted has exactly the sizes that it names, and
// encodes to the same bytes.
#include <cstdlib>

#include "deltasync/layout.hpp"
#include "format/packed_layout.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  constexpr std::uint64_t kRawBytesMax = 16u << 20;  // larger ones only take time
  const auto message = wire::LayoutMessage::decode({reinterpret_cast<const std::byte*>(data), size});
  if (!message || message->layout_raw_bytes > kRawBytesMax || message->sidecar_raw_bytes > kRawBytesMax) return 0;
  const auto out = wire::unpack_layout(*message);
  if (!out) return 0;
  if (out->layout->encode() != out->layout_encoded || out->layout_encoded.size() != message->layout_raw_bytes)
    std::abort();
  if (out->sidecar_encoded.size() != message->sidecar_raw_bytes) std::abort();
  if (out->sidecar && out->sidecar->encode() != out->sidecar_encoded) std::abort();
  return 0;
}
