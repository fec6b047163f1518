// How a data connection's bytes come to go over UCX (wire_protocol.md "UCX"); protocol 5.
#pragma once

#include <cstdint>
#include <vector>

#include "format/wire.hpp"

namespace deltasync::wire {

inline constexpr std::uint64_t kUcxAddressBytesMax = 64u << 10;

/// Where one end of the channel is reached. Reply: ucx_opened, or unsupported; then nothing more is said as it was.
struct OpenUcx {
  static constexpr Type kType = Type::open_ucx;
  Digest128 id;                    ///< random, new for each channel; the other side's messages begin with it
  std::uint32_t version = 0;       ///< of its libucp: major << 16 | minor
  std::vector<std::byte> address;  ///< of a UCP worker; 1 to kUcxAddressBytesMax bytes
  bool operator==(const OpenUcx&) const = default;
  std::vector<std::byte> encode() const;
  static Result<OpenUcx> decode(ByteSpan payload);
};
struct UcxOpened : OpenUcx {
  static constexpr Type kType = Type::ucx_opened;
  static Result<UcxOpened> decode(ByteSpan payload);
};

}  // namespace deltasync::wire
