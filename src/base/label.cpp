#include "base/label.hpp"

#include <string>

#include "base/utf8.hpp"
#include "deltasync/version.hpp"

namespace deltasync {

Status check_label(std::string_view label) {
  if (label.size() > kLabelBytesMax) {
    return Error(Errc::invalid_argument, "the label has " + std::to_string(label.size()) + " bytes; at most " +
                                             std::to_string(kLabelBytesMax) + " are possible");
  }
  if (!is_plain_text(label)) {
    return Error(Errc::invalid_argument,
                 "the label '" + printable(label) + "' is not UTF-8, or contains a control character");
  }
  return {};
}

}  // namespace deltasync
