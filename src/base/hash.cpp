#include "base/hash.hpp"

#include <xxhash.h>

namespace deltasync {

std::uint64_t xxh3_64(ByteSpan bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}

Digest128 xxh3_128(ByteSpan bytes) noexcept {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  Digest128 out;
  std::memcpy(out.bytes.data(), canonical.digest, sizeof(canonical.digest));
  return out;
}

std::string to_string(const Digest128& digest) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const auto b : digest.bytes) {
    out += kHex[b >> 4];
    out += kHex[b & 15];
  }
  return out;
}

}  // namespace deltasync
