#include "format/wire_ucx.hpp"

#include <utility>

#include "format/wire_codec.hpp"

namespace deltasync::wire {
namespace {

OpenUcx decode_end(Decoder& in) {
  OpenUcx m;
  m.id = in.digest();
  m.version = in.get<std::uint32_t>();
  m.address = in.blob();
  if (m.address.empty() || m.address.size() > kUcxAddressBytesMax) {
    in.reject("address", std::to_string(m.address.size()) + " bytes");
  }
  return m;
}

}  // namespace

std::vector<std::byte> OpenUcx::encode() const {
  std::vector<std::byte> bytes;
  ByteWriter out(bytes);
  put_digest(out, id);
  out.put(version);
  put_blob(out, address);
  return bytes;
}
Result<OpenUcx> OpenUcx::decode(ByteSpan payload) {
  Decoder in(payload, "open_ucx");
  OpenUcx m = decode_end(in);
  return in.finish(std::move(m));
}
Result<UcxOpened> UcxOpened::decode(ByteSpan payload) {
  Decoder in(payload, "ucx_opened");
  UcxOpened m{decode_end(in)};
  return in.finish(std::move(m));
}

}  // namespace deltasync::wire
