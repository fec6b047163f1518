// The user's name for a version, as writers and askers may give it.
#pragma once

#include <string_view>

#include "deltasync/result.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

/// invalid_argument unless it has at most kLabelBytesMax bytes and is plain text (base/utf8.hpp). Empty is fine.
Status check_label(std::string_view label);

/// invalid_argument if the label is of digits alone, and not the version's own number: by such a text people ask for a
/// number, and would get another version.
Status check_no_other_number(const Version& version);

}  // namespace deltasync
