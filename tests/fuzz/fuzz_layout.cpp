// Layout::decode accepts only canonical encodings: what it accepts encodes to the same bytes.
#include <cstdlib>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto layout = Layout::decode(bytes);
  if (!layout) return 0;
  const auto again = (*layout)->encode();
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  if ((*layout)->tile_count() > 0) {
    const auto last = (*layout)->tile((*layout)->tile_count() - 1);
    const Tensor& tensor = (*layout)->tensors()[last.tensor];
    if (last.rect.elements() == 0 || last.rect.elements() > kTileElementsMax) std::abort();
    if (last.rect.row + last.rect.rows != tensor.rows || last.rect.col + last.rect.cols != tensor.cols) std::abort();
  }
  return 0;
}
