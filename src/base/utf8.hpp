// UTF-8 validity: names come from JSON and go back into JSON, which can hold nothing else.
#pragma once

#include <string_view>

namespace deltasync {

/// Well-formed UTF-8: no overlong form, no surrogate, nothing above U+10FFFF.
bool is_utf8(std::string_view text) noexcept;

}  // namespace deltasync
