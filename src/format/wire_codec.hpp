// What the encoders and decoders of the wire messages share: a reader that names the field that is wrong, and the
// fields that several messages have. Only src/format/wire*.cpp include this.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "base/utf8.hpp"
#include "format/wire.hpp"

namespace deltasync::wire {

/// A ByteReader that remembers which field broke the rules, so that the error names it.
class Decoder {
 public:
  Decoder(ByteSpan payload, const char* message) : in_(payload), message_(message) {}

  ByteReader& in() { return in_; }
  template <std::integral T>
  T get() {
    return in_.get<T>();
  }
  template <std::integral T>
  T get_at_most(T max, const char* field) {
    const T value = in_.get<T>();
    return value <= max ? value : reject(field, std::to_string(value));
  }
  std::uint8_t flag(const char* field) { return get_at_most<std::uint8_t>(1, field); }
  /// At the end of a message: there if it is 1.
  std::uint8_t flag_if_set(const char* field) {
    if (in_.failed() || in_.remaining() == 0) return 0;
    return flag(field) == 1 ? std::uint8_t{1} : reject(field, "0, which is not written");
  }
  std::uint64_t varint() { return in_.get_varint(); }
  template <class E>
  E enumerator(E first, E last, const char* field) {
    const auto value = in_.get<std::uint8_t>();
    if (value < static_cast<std::uint8_t>(first) || value > static_cast<std::uint8_t>(last)) {
      reject(field, std::to_string(value));
      return first;
    }
    return static_cast<E>(value);
  }
  template <std::size_t N>
  std::array<std::uint8_t, N> array() {
    std::array<std::uint8_t, N> out{};
    const ByteSpan from = in_.take(N);
    if (from.size() == N) std::memcpy(out.data(), from.data(), N);
    return out;
  }
  Digest128 digest() { return {array<16>()}; }
  VersionId version_id() {
    VersionId id;
    id.epoch = get<std::uint64_t>();
    id.number = get<std::uint64_t>();
    return id;
  }
  std::string string(std::size_t bytes_max, const char* field) {
    const auto n = in_.get<std::uint32_t>();
    if (n > bytes_max) reject(field, std::to_string(n) + " bytes");
    const ByteSpan s = in_.take(n);
    return {reinterpret_cast<const char*>(s.data()), s.size()};
  }
  /// Of a version: plain text.
  std::string label() {
    std::string text = string(kLabelBytesMax, "label");
    if (!is_plain_text(text)) reject("label", "'" + printable(text) + "', which is no plain text");
    return text;
  }
  /// u64 length, then the bytes. The length is checked against what is there before anything is allocated.
  std::vector<std::byte> blob() {
    const ByteSpan s = in_.take(in_.get<std::uint64_t>());
    return {s.begin(), s.end()};
  }
  Version version() {
    Version v;
    v.id = version_id();
    v.label = label();
    return v;
  }

  /// Returns 0 for the convenience of callers.
  std::uint8_t reject(const char* field, const std::string& value) {
    if (problem_.empty() && !in_.failed()) problem_ = std::string(field) + " is " + value;
    in_.fail();
    return 0;
  }
  Status finish() const {
    if (!problem_.empty()) return Error(Errc::corrupt, std::string(message_) + ": " + problem_);
    return in_.finish(message_);
  }
  template <class T>
  Result<T> finish(T value) const {
    DS_TRY(finish());
    return value;
  }

 private:
  ByteReader in_;
  const char* message_;
  std::string problem_;
};

inline void put_digest(ByteWriter& out, const Digest128& digest) {
  out.append(bytes_of(digest.bytes));
}

inline void put_if_set(ByteWriter& out, std::uint8_t flag) {
  if (flag != 0) out.put(flag);
}

inline void put_version_id(ByteWriter& out, const VersionId& id) {
  out.put(id.epoch);
  out.put(id.number);
}

inline void put_version(ByteWriter& out, const Version& version) {
  put_version_id(out, version.id);
  out.put_string(version.label);
}

inline void put_blob(ByteWriter& out, ByteSpan bytes) {
  out.put<std::uint64_t>(bytes.size());
  out.append(bytes);
}

/// At most `bytes_max` bytes, not cut inside a UTF-8 sequence.
inline std::string_view cut(std::string_view text, std::size_t bytes_max) {
  if (text.size() <= bytes_max) return text;
  std::size_t n = bytes_max;
  while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;
  return text.substr(0, n);
}

template <class E>
std::uint8_t code_of(E value) {
  return static_cast<std::uint8_t>(value);
}

inline void put_layout_message(ByteWriter& out, const LayoutMessage& m) {
  out.put(m.layout_raw_bytes);
  out.put(m.sidecar_raw_bytes);
  put_blob(out, m.layout_zstd);
  put_blob(out, m.sidecar_zstd);
}

inline LayoutMessage get_layout_message(Decoder& in) {
  LayoutMessage m;
  m.layout_raw_bytes = in.get_at_most(kLayoutRawBytesMax, "layout_raw_bytes");
  m.sidecar_raw_bytes = in.get_at_most(kLayoutRawBytesMax, "sidecar_raw_bytes");
  m.layout_zstd = in.blob();
  m.sidecar_zstd = in.blob();
  return m;
}

}  // namespace deltasync::wire
