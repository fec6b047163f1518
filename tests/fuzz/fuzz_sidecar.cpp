// Sidecar::decode against a small fixed layout: what it accepts encodes to the same bytes. Decoded in pieces it is the
// same.
#include <algorithm>
#include <cstdlib>

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"
#include "format/hf_files.hpp"
#include "format/sidecar_decoder.hpp"

namespace {

/// As it comes from a peer, some bytes at a time.
deltasync::Result<deltasync::Sidecar> decode_in_pieces(const deltasync::Layout& layout, deltasync::ByteSpan bytes) {
  constexpr std::size_t kPiece = 37;
  deltasync::SidecarDecoder decoder(layout, bytes.size());
  for (std::size_t n = kPiece; n < bytes.size(); n += kPiece) DS_TRY(decoder.feed(bytes.first(n)));
  DS_TRY(decoder.feed(bytes));
  return decoder.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deltasync;
  static const LayoutPtr layout =
      Layout::build({{"a", Dtype::bf16, {4, 8}, {}, {}}, {"b", Dtype::f32, {3}, {}, {}}}).value();
  const ByteSpan bytes(reinterpret_cast<const std::byte*>(data), size);
  const auto sidecar = Sidecar::decode(bytes, *layout);
  const auto pieces = decode_in_pieces(*layout, bytes);
  if (pieces.ok() != sidecar.ok()) std::abort();
  if (!sidecar) return 0;
  if (pieces->encode() != sidecar->encode()) std::abort();
  const auto again = sidecar->encode();
  if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  (void)hf_places(*layout, *sidecar);
  return 0;
}
