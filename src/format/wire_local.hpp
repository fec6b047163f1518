// How a receiver on the agent's host finds the served half in memory (wire_protocol.md "Local pulls"); protocol 5.
// get_local is asked over the control connection; map_segment over the agent's Unix socket.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "format/wire.hpp"

namespace deltasync::wire {

/// Where are the bytes of this full plan? Reply: local.
struct GetLocal {
  static constexpr Type kType = Type::get_local;
  std::uint64_t plan = 0;
  std::vector<std::byte> encode() const;
  static Result<GetLocal> decode(ByteSpan payload);
};
/// They are valid while the half's state word names a version and this sequence.
struct Local {
  static constexpr Type kType = Type::local;
  std::string socket;            ///< path of the agent's Unix socket
  std::uint64_t generation = 0;  ///< of the segment
  std::uint8_t half = 0;         ///< 0 or 1
  std::uint64_t sequence = 0;    ///< of its fill
  std::vector<std::byte> encode() const;
  static Result<Local> decode(ByteSpan payload);
};
/// The first message on the Unix socket. Reply: segment, without payload, with a descriptor that is open for reading.
struct MapSegment {
  static constexpr Type kType = Type::map_segment;
  std::uint16_t protocol = kProtocolVersion;
  std::uint64_t instance = 0;  ///< as Hello::instance: whom the path led to may be another agent
  std::uint64_t generation = 0;
  std::vector<std::byte> encode() const;
  static Result<MapSegment> decode(ByteSpan payload);
};

}  // namespace deltasync::wire
