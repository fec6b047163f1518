#include "base/bytes.hpp"

namespace deltasync {

void ByteWriter::put_varint(std::uint64_t value) {
  while (value >= 0x80) {
    put<std::uint8_t>(static_cast<std::uint8_t>(value | 0x80));
    value >>= 7;
  }
  put<std::uint8_t>(static_cast<std::uint8_t>(value));
}

std::uint64_t ByteReader::get_varint() {
  std::uint64_t value = 0;
  for (unsigned shift = 0; shift < 70; shift += 7) {
    const auto byte = get<std::uint8_t>();
    if (failed_) return 0;
    const std::uint64_t group = byte & 0x7F;
    if (shift == 63 && group > 1) break;
    value |= group << shift;
    if ((byte & 0x80) == 0) {
      if (shift > 0 && group == 0) break;  // not minimal
      return value;
    }
  }
  failed_ = true;
  return 0;
}

std::string ByteReader::get_string(std::size_t bytes_max) {
  const auto n = get<std::uint32_t>();
  if (n > bytes_max) failed_ = true;
  const ByteSpan s = take(n);
  return {reinterpret_cast<const char*>(s.data()), s.size()};
}

Status ByteReader::finish(std::string_view what) const {
  if (failed_) return Error(Errc::corrupt, std::string(what) + ": truncated or out of bounds");
  if (pos_ != bytes_.size()) {
    return Error(Errc::corrupt, std::string(what) + ": " + std::to_string(bytes_.size() - pos_) + " bytes too many");
  }
  return {};
}

}  // namespace deltasync
