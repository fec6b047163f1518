// XXH3 as used by all formats.
#pragma once

#include "base/bytes.hpp"
#include "deltasync/layout.hpp"

namespace deltasync {

std::uint64_t xxh3_64(ByteSpan bytes) noexcept;
/// In xxHash's canonical (big-endian) byte order.
Digest128 xxh3_128(ByteSpan bytes) noexcept;

}  // namespace deltasync
