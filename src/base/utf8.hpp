// Text from users and peers: what is well-formed, what is harmless to show, and how to show what is not.
#pragma once

#include <string>
#include <string_view>

namespace deltasync {

/// Well-formed UTF-8: no overlong form, no surrogate, nothing above U+10FFFF.
bool is_utf8(std::string_view text) noexcept;

/// UTF-8 without control characters (U+0000 to U+001F, U+007F to U+009F). What names a tensor, a file or a version is
/// such text: it stays on its line, and a terminal that shows it does nothing else.
bool is_plain_text(std::string_view text) noexcept;

/// The text with each control character as \x1b, so that it stays on its line and a terminal only shows it. Text that
/// is no UTF-8 has all its bytes from 0x80 on written so. Plain text is returned as it is.
std::string printable(std::string_view text);

}  // namespace deltasync
