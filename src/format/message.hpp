// One message as its bytes come, for who receives: a thread that blocks, or a coroutine. No I/O here, so that tests
// and the fuzzer feed the very code of the connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "deltasync/result.hpp"
#include "format/wire.hpp"

namespace deltasync::wire {

struct Message {
  Header header;
  std::vector<std::byte> payload;

  Type type() const noexcept { return static_cast<Type>(header.type); }
};

/// "a message of type plan"
std::string describe(const Header& header);
/// "a message of type extent for request 4 came where the answer to request 3 was due"
Error unexpected(const Header& header, std::uint64_t request);
/// corrupt if it has not the hash that its header names; an extent has none.
Status check_payload(const Header& header, ByteSpan payload);

/// Says where the next bytes belong, so that they are received in place, and checks what came: the header as soon as it
/// is whole (check_header), the payload's length before its first byte, its hash at its end. Stops after the header
/// until allow_payload(). After an error it is of no use.
class MessageParser {
 public:
  MessageParser() = default;
  /// Goes on after a header that was checked.
  explicit MessageParser(const Header& checked) : message_{checked, {}}, arrived_(sizeof checked) {}

  /// Where the next bytes belong; empty after the header and at the end. Never further ahead of what arrived than
  /// kPayloadStepBytes, so that memory does not grow with what a header claims. Good until the next call.
  MutByteSpan next();
  /// The first `bytes` of next() are there.
  Status took(std::size_t bytes);
  /// Once the header is there: protocol if it claims more than `bytes_max`.
  Status allow_payload(std::uint64_t bytes_max);

  const Header& header() const noexcept { return message_.header; }
  /// Once it is whole.
  Message take() && { return std::move(message_); }

 private:
  Status check_end() const;

  Message message_;
  std::uint64_t arrived_ = 0;  // bytes of the message
  bool allowed_ = false;       // its payload
};

inline constexpr std::size_t kPayloadStepBytes = 4u << 20;

}  // namespace deltasync::wire
