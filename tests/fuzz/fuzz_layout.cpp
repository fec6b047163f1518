// Layout::decode accepts only canonical encodings: what it accepts encodes to the same bytes. Decoded in pieces it is
// the same.
#include <cstdlib>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "format/layout_decoder.hpp"
#include "format/tiling.hpp"

namespace {

/// As it comes from a peer, some bytes at a time.
deltasync::Result<deltasync::LayoutPtr> decode_in_pieces(deltasync::ByteSpan bytes) {
  constexpr std::size_t kPiece = 37;
  deltasync::LayoutDecoder decoder(bytes.size());
  for (std::size_t n = kPiece; n < bytes.size(); n += kPiece) DS_TRY(decoder.feed(bytes.first(n)));
  DS_TRY(decoder.feed(bytes));
  return decoder.finish(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto layout = Layout::decode(bytes);
  const auto pieces = decode_in_pieces(bytes);
  if (pieces.ok() != layout.ok()) std::abort();
  if (!layout) return 0;
  if ((*pieces)->digest() != (*layout)->digest()) std::abort();
  const auto again = (*layout)->encode();
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  if ((*layout)->tile_count() > 0) {
    const auto last = tile_of(**layout, (*layout)->tile_count() - 1);
    const Tensor& tensor = (*layout)->tensors()[last.tensor];
    if (last.rect.elements() == 0 || last.rect.elements() > kTileElementsMax) std::abort();
    if (last.rect.row + last.rect.rows != tensor.rows || last.rect.col + last.rect.cols != tensor.cols) std::abort();
  }
  return 0;
}
