// The first messages of a connection, by which the ends learn whether they understand each other.
#pragma once

#include <string>
#include <string_view>

#include "deltasync/result.hpp"
#include "format/wire.hpp"

namespace deltasync::wire {

/// A message of the handshake from `peer` ("the agent"). Its hash was right, so it is as it was sent: `protocol` if it
/// cannot be decoded, since then the peer means another form by it.
template <class M>
Result<M> decode_handshake(ByteSpan payload, std::string_view peer) {
  auto message = M::decode(payload);
  if (message) return message;
  return Error(Errc::protocol, message.error().message() + ": " + std::string(peer) +
                                   " is of another release, and both ends need the same");
}

}  // namespace deltasync::wire
