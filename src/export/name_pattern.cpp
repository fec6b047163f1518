#include "export/name_pattern.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

namespace deltasync::exporting {
namespace {

constexpr std::ptrdiff_t kStarsMax = 2;  ///< a look costs the name's length for each

Error lone_brace(std::string_view pattern) {
  return {Errc::invalid_argument, "'" + std::string(pattern) + "': a brace without its other one"};
}

/// The text between the brace at `at` and its end.
Result<std::string_view> place(std::string_view pattern, std::size_t at) {
  const std::size_t end = pattern.find('}', at);
  if (end == std::string_view::npos || end == at + 1) return lone_brace(pattern);
  return pattern.substr(at + 1, end - at - 1);
}

/// With `rest` the name may go on after the pattern.
bool match_from(std::string_view pattern, std::string_view name, Captures& found, std::string_view* rest = nullptr) {
  while (!pattern.empty()) {
    if (pattern.front() == '*') {
      pattern.remove_prefix(1);
      if (pattern.empty() && rest == nullptr) return true;
      for (std::size_t skipped = 0; skipped <= name.size(); ++skipped) {
        Captures tried = found;
        if (match_from(pattern, name.substr(skipped), tried, rest)) {
          found = std::move(tried);
          return true;
        }
      }
      return false;
    }
    if (pattern.front() != '{') {
      if (name.empty() || name.front() != pattern.front()) return false;
      pattern.remove_prefix(1);
      name.remove_prefix(1);
      continue;
    }
    const std::size_t end = pattern.find('}');
    const std::string what(pattern.substr(1, end - 1));
    std::uint64_t number = 0;
    const auto [stop, failed] = std::from_chars(name.data(), name.data() + name.size(), number);
    const auto digits = static_cast<std::size_t>(stop - name.data());
    if (failed != std::errc() || (digits > 1 && name.front() == '0')) return false;
    const auto [there, fresh] = found.emplace(what, number);
    if (!fresh && there->second != number) return false;
    pattern.remove_prefix(end + 1);
    name.remove_prefix(digits);
  }
  if (rest != nullptr) *rest = name;
  return rest != nullptr || name.empty();
}

Status check_pattern(std::string_view pattern) {
  if (std::count(pattern.begin(), pattern.end(), '*') > kStarsMax) {
    return Error(Errc::invalid_argument, "'" + std::string(pattern) + "' has more than two '*'");
  }
  for (std::size_t at = pattern.find_first_of("{}"); at != std::string_view::npos;) {
    if (pattern[at] == '}') return lone_brace(pattern);
    DS_ASSIGN(const std::string_view inside, place(pattern, at));
    at = pattern.find_first_of("{}", at + inside.size() + 2);
  }
  return {};
}

}  // namespace

Result<std::optional<Captures>> match_name(std::string_view pattern, std::string_view name) {
  DS_TRY(check_pattern(pattern));
  Captures found;
  if (!match_from(pattern, name, found)) return std::optional<Captures>();
  return std::optional<Captures>(std::move(found));
}

Result<std::optional<Captures>> match_prefix(std::string_view pattern, std::string_view name, std::string_view& rest) {
  DS_TRY(check_pattern(pattern));
  Captures found;
  if (!match_from(pattern, name, found, &rest)) return std::optional<Captures>();
  return std::optional<Captures>(std::move(found));
}

Result<std::string> expand_name(std::string_view pattern, const Names& names) {
  std::string out;
  while (!pattern.empty()) {
    const std::size_t at = pattern.find_first_of("{}");
    out += pattern.substr(0, at);
    if (at == std::string_view::npos) break;
    if (pattern[at] == '}') return lone_brace(pattern);
    DS_ASSIGN(const std::string_view inside, place(pattern, at));
    DS_ASSIGN(const std::uint64_t value, evaluate_size(inside, names));
    out += std::to_string(value);
    pattern.remove_prefix(at + inside.size() + 2);
  }
  return out;
}

}  // namespace deltasync::exporting
