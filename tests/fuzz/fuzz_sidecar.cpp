// Sidecar::decode against a small fixed layout: what it accepts encodes to the same bytes.
#include <algorithm>
#include <cstdlib>

#include "base/bytes.hpp"
#include "deltasync/hf.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  static const LayoutPtr layout =
      Layout::build({{"a", Dtype::bf16, {4, 8}, {}, {}}, {"b", Dtype::f32, {3}, {}, {}}}).value();
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto sidecar = Sidecar::decode(bytes, *layout);
  if (!sidecar) return 0;
  const auto again = sidecar->encode();
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  (void)hf_places(*layout, *sidecar);
  return 0;
}
