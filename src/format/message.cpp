#include "format/message.hpp"

#include <algorithm>
#include <string>

#include "base/hash.hpp"

namespace deltasync::wire {

std::string describe(const Header& header) {
  return "a message of type " + type_name(header.type);
}

Error unexpected(const Header& header, std::uint64_t request) {
  return Error(Errc::protocol, describe(header) + " for request " + std::to_string(header.request) +
                                   " came where the answer to request " + std::to_string(request) + " was due");
}

Status check_payload(const Header& header, ByteSpan payload) {
  if (header.type == static_cast<std::uint16_t>(Type::extent) || xxh3_64(payload) == header.payload_hash) return {};
  return Error(Errc::corrupt, "payload hash of " + describe(header));
}

MutByteSpan MessageParser::next() {
  if (arrived_ < sizeof(Header)) {
    const MutByteSpan head(reinterpret_cast<std::byte*>(&message_.header), sizeof(Header));
    return head.subspan(static_cast<std::size_t>(arrived_));
  }
  if (!allowed_) return {};
  std::vector<std::byte>& payload = message_.payload;
  const std::uint64_t at = arrived_ - sizeof(Header);
  if (at == payload.size()) {
    payload.resize(payload.size() + std::min<std::uint64_t>(message_.header.payload_bytes - at, kPayloadStepBytes));
  }
  return MutByteSpan(payload).subspan(static_cast<std::size_t>(at));
}

Status MessageParser::took(std::size_t bytes) {
  arrived_ += bytes;
  if (arrived_ == sizeof(Header)) return check_header(message_.header);
  return check_end();
}

Status MessageParser::allow_payload(std::uint64_t bytes_max) {
  const std::uint64_t bytes = message_.header.payload_bytes;
  if (bytes > bytes_max) {
    return Error(Errc::protocol, describe(message_.header) + " claims " + std::to_string(bytes) + " bytes where " +
                                     std::to_string(bytes_max) + " are allowed");
  }
  allowed_ = true;
  return check_end();
}

Status MessageParser::check_end() const {
  if (!allowed_ || arrived_ != sizeof(Header) + message_.header.payload_bytes) return {};
  return check_payload(message_.header, message_.payload);
}

}  // namespace deltasync::wire
