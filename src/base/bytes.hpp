// Little-endian byte streams with bounds: the only way that variable-length formats are read or written.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "deltasync/result.hpp"

namespace deltasync {

static_assert(std::endian::native == std::endian::little, "all formats are little-endian and are mapped in place");

using ByteSpan = std::span<const std::byte>;
using MutByteSpan = std::span<std::byte>;

/// The bytes of a trivially copyable object.
template <class T>
requires std::is_trivially_copyable_v<T> ByteSpan bytes_of(const T& value)
noexcept {
  return {reinterpret_cast<const std::byte*>(&value), sizeof(T)};
}
inline ByteSpan bytes_of(std::string_view s) noexcept {
  return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
}

/// Unaligned load and store.
template <class T>
T load(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
template <class T>
void store(std::byte* to, T value) noexcept {
  std::memcpy(to, &value, sizeof(T));
}

/// Appends to a byte vector that the caller owns.
class ByteWriter {
 public:
  explicit ByteWriter(std::vector<std::byte>& out) : out_(out) {}

  template <std::integral T>
  void put(T value) {
    append(bytes_of(value));
  }
  void append(ByteSpan bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }
  /// LEB128, least significant group first.
  void put_varint(std::uint64_t value);
  /// u32 length, then the bytes.
  void put_string(std::string_view s) {
    put<std::uint32_t>(static_cast<std::uint32_t>(s.size()));
    append(bytes_of(s));
  }

 private:
  std::vector<std::byte>& out_;
};

/// Reads from a span; every read checks its bound and fails with Errc::corrupt, naming `what`.
/// Failure is sticky: after the first, all reads fail, so that a caller may check once at the end.
class ByteReader {
 public:
  explicit ByteReader(ByteSpan bytes) : bytes_(bytes) {}

  /// Zero after failure.
  template <std::integral T>
  T get() {
    if (failed_ || bytes_.size() - pos_ < sizeof(T)) return failed_ = true, T{};
    T value = load<T>(bytes_.data() + pos_);
    pos_ += sizeof(T);
    return value;
  }
  /// At most 10 bytes; a longer, overflowing or non-minimal encoding fails.
  std::uint64_t get_varint();
  /// Empty after failure.
  ByteSpan take(std::uint64_t n) {
    if (failed_ || bytes_.size() - pos_ < n) return failed_ = true, ByteSpan{};
    ByteSpan out = bytes_.subspan(pos_, static_cast<std::size_t>(n));
    pos_ += static_cast<std::size_t>(n);
    return out;
  }
  /// u32 length ≤ `bytes_max`, then the bytes.
  std::string get_string(std::size_t bytes_max);

  bool failed() const noexcept { return failed_; }
  void fail() noexcept { failed_ = true; }
  std::size_t remaining() const noexcept { return failed_ ? 0 : bytes_.size() - pos_; }
  std::size_t position() const noexcept { return pos_; }
  /// Ok when nothing failed and nothing is left.
  Status finish(std::string_view what) const;

 private:
  ByteSpan bytes_;
  std::size_t pos_ = 0;
  bool failed_ = false;
};

}  // namespace deltasync
