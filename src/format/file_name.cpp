#include "format/file_name.hpp"

#include <algorithm>
#include <vector>

#include "base/utf8.hpp"

namespace deltasync {

Status check_file_name(std::string_view name) {
  const auto refuse = [&](const char* why) {
    return Error(Errc::invalid_argument, "file name '" + printable(name.substr(0, kFileNameBytesMax)) + "': " + why);
  };
  if (name.empty()) return refuse("empty");
  if (name.size() > kFileNameBytesMax) return refuse("too long");
  if (!is_utf8(name)) return refuse("is not UTF-8");
  if (!is_plain_text(name)) return refuse("contains a control character");
  if (name.find('\\') != std::string_view::npos)
    return refuse("contains a '\\', which separates directories elsewhere");
  if (name.front() == '/') return refuse("absolute");
  for (std::string_view rest = name;;) {
    const auto slash = rest.find('/');
    const auto component = rest.substr(0, slash);
    if (component.empty()) return refuse("has an empty component");
    if (component.front() == '.') return refuse("has a component that begins with '.'");
    if (component.size() > 255) return refuse("has a component of more than 255 bytes");
    if (slash == std::string_view::npos) return {};
    rest.remove_prefix(slash + 1);
  }
}

Status check_file_names(std::span<const std::string_view> names) {
  std::vector<std::string_view> sorted(names.begin(), names.end());
  for (const auto name : sorted) DS_TRY(check_file_name(name));
  std::sort(sorted.begin(), sorted.end());
  const auto twin = std::adjacent_find(sorted.begin(), sorted.end());
  if (twin != sorted.end()) {
    return Error(Errc::invalid_argument, "file name '" + std::string(*twin) + "' occurs twice");
  }
  for (const auto name : sorted) {
    for (auto slash = name.find('/'); slash != std::string_view::npos; slash = name.find('/', slash + 1)) {
      const auto parent = name.substr(0, slash);
      if (std::binary_search(sorted.begin(), sorted.end(), parent)) {
        return Error(Errc::invalid_argument,
                     "'" + std::string(parent) + "' is a file and the directory of '" + std::string(name) + "'");
      }
    }
  }
  return {};
}

}  // namespace deltasync
