// The user's name for a version, as writers and askers may give it.
#pragma once

#include <string_view>

#include "deltasync/result.hpp"

namespace deltasync {

/// invalid_argument unless it has at most kLabelBytesMax bytes and is plain text (base/utf8.hpp). Empty is fine.
Status check_label(std::string_view label);

}  // namespace deltasync
