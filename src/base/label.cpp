#include "base/label.hpp"

#include <charconv>
#include <cstdint>
#include <string>

#include "base/utf8.hpp"

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

Status check_no_other_number(const Version& version) {
  const std::string& label = version.label;
  if (label.empty() || label.find_first_not_of("0123456789") != std::string::npos) return {};
  std::uint64_t number = 0;
  const auto read = std::from_chars(label.data(), label.data() + label.size(), number);
  if (read.ec == std::errc() && number == version.id.number) return {};
  return Error(Errc::invalid_argument, "the label '" + label + "' is another version's number, and this is version " +
                                           std::to_string(version.id.number) + ": give it a letter, as in step_" +
                                           label);
}

}  // namespace deltasync
