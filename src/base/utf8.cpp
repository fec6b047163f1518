#include "base/utf8.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace deltasync {
namespace {

/// Length of the well-formed sequence at the start of `text` (not empty), or 0.
std::size_t sequence_bytes(std::string_view text) noexcept {
  const auto lead = static_cast<std::uint8_t>(text[0]);
  if (lead < 0x80) return 1;
  const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((static_cast<std::uint8_t>(text[i]) & 0xC0) != 0x80) return 0;
  }
  const auto second = static_cast<std::uint8_t>(text[1]);
  const bool overlong = (lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90);
  const bool surrogate = lead == 0xED && second >= 0xA0;
  const bool too_large = lead == 0xF4 && second >= 0x90;
  return overlong || surrogate || too_large ? 0 : bytes;
}

/// Whether the well-formed sequence at the start of `text` is a control character: C0 and DEL have one byte, C1 two.
bool is_control(std::string_view text) noexcept {
  const auto byte = static_cast<std::uint8_t>(text[0]);
  return byte < 0x20 || byte == 0x7F || (byte == 0xC2 && static_cast<std::uint8_t>(text[1]) < 0xA0);
}

}  // namespace

bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const auto bytes = sequence_bytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

bool is_plain_text(std::string_view text) noexcept {
  while (!text.empty()) {
    const auto bytes = sequence_bytes(text);
    if (bytes == 0 || is_control(text)) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string printable(std::string_view text) {
  const bool utf8 = is_utf8(text);
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = utf8 ? sequence_bytes(text) : 1;
    const bool shown = utf8 ? !is_control(text) : static_cast<std::uint8_t>(text[0]) < 0x7F && !is_control(text);
    if (shown) {
      out += text.substr(0, bytes);
    } else {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\x%02x",
                    static_cast<unsigned>(static_cast<std::uint8_t>(text[bytes - 1])));
      out += escape;
    }
    text.remove_prefix(bytes);
  }
  return out;
}

}  // namespace deltasync
