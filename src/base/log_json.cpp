#include "base/log_json.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cctype>
#include <ctime>

#include "base/utf8.hpp"

namespace deltasync::log {
namespace {

std::string_view name_of(Level level) {
  switch (level) {
    case Level::debug: return "debug";
    case Level::info: return "info";
    case Level::warn: return "warn";
    case Level::error: return "error";
    case Level::critical: break;
  }
  return "critical";
}

void put_string(std::string& out, std::string_view text) {
  const bool utf8 = is_utf8(text);
  out += '"';
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u == 0x7F) {
      out += fmt::format("\\u{:04x}", u);
    } else {
      out += u >= 0x80 && !utf8 ? '?' : c;  // JSON can hold nothing else
    }
  }
  out += '"';
}

/// The format piece by piece, each with the arguments that it takes: they are numbered through the whole format.
class Pieces {
 public:
  Pieces(std::string_view format, fmt::format_args args) : format_(format), args_(args) {}

  bool more() const { return at_ < format_.size(); }
  void skip_blanks() {
    while (more() && format_[at_] == ' ') ++at_;
  }
  /// Up to a blank, and a key up to its '='; empty if no key begins here.
  std::string_view key() {
    std::size_t end = at_;
    while (end < format_.size() && (std::isalnum(static_cast<unsigned char>(format_[end])) != 0 || format_[end] == '_'))
      ++end;
    if (end == at_ || end == format_.size() || format_[end] != '=') return {};
    const std::string_view found = format_.substr(at_, end - at_);
    at_ = end + 1;
    return found;
  }
  /// Up to a blank, or between quotes, as JSON.
  std::string value() {
    const bool quoted = more() && format_[at_] == '"';
    if (quoted) ++at_;
    const std::size_t begin = at_;
    const int first_arg = arg_;
    const std::string text = take(quoted ? '"' : ' ');
    const bool alone = format_.substr(begin, 1) == "{" && at_ - begin >= 2 && format_.find('}', begin) + 1 == at_;
    if (quoted && more()) ++at_;
    if (!quoted && alone && arg_ == first_arg + 1 && args_.get(first_arg).is_arithmetic() && is_number(text)) {
      return text;
    }
    std::string json;
    put_string(json, text);
    return json;
  }
  /// Up to a blank, as it is.
  std::string word() { return take(' '); }

 private:
  static bool is_number(const std::string& text) {
    std::size_t at = text[0] == '-' ? 1 : 0;
    if (at == text.size() || (text[at] == '0' && at + 1 < text.size() && text[at + 1] != '.')) return false;
    std::size_t points = 0;
    for (const std::size_t first = at; at < text.size(); ++at) {
      if (text[at] == '.' && at != first && at + 1 != text.size())
        ++points;
      else if (std::isdigit(static_cast<unsigned char>(text[at])) == 0)
        return false;
    }
    return points <= 1;
  }
  /// Up to `end` outside of braces, formatted.
  std::string take(char end) {
    std::string piece;
    while (more() && format_[at_] != end) {
      const char c = format_[at_++];
      piece += c;
      if (c != '{' && c != '}') continue;
      if (more() && format_[at_] == c) {
        piece += format_[at_++];
        continue;
      }
      if (c == '}') continue;
      // A field: give it its number.
      if (more() && (format_[at_] == '}' || format_[at_] == ':')) piece += std::to_string(arg_++);
      while (more() && format_[at_] != '}') piece += format_[at_++];
    }
    return fmt::vformat(piece, args_);
  }

  const std::string_view format_;
  const fmt::format_args args_;
  std::size_t at_ = 0;
  int arg_ = 0;
};

}  // namespace

std::string local_time(std::chrono::system_clock::time_point now) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  const auto seconds = static_cast<std::time_t>(ms / 1000);
  std::tm local{};
  ::localtime_r(&seconds, &local);
  const long minutes = local.tm_gmtoff / 60;
  const long ahead = minutes < 0 ? -minutes : minutes;
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}{}{:02}:{:02}", local.tm_year + 1900, local.tm_mon + 1,
                     local.tm_mday, local.tm_hour, local.tm_min, local.tm_sec, ms % 1000, minutes < 0 ? '-' : '+',
                     ahead / 60, ahead % 60);
}

std::string json_line(Level level, std::string_view process, std::chrono::system_clock::time_point now,
                      fmt::string_view format, fmt::format_args args) {
  std::string out = fmt::format(R"({{"time": "{}", "level": "{}", "process": )", local_time(now), name_of(level));
  put_string(out, process);
  out += fmt::format(R"(, "pid": {}, "event": )", ::getpid());
  Pieces pieces({format.data(), format.size()}, args);
  put_string(out, pieces.word());
  std::string message;
  for (pieces.skip_blanks(); pieces.more(); pieces.skip_blanks()) {
    if (const std::string_view key = pieces.key(); !key.empty()) {
      out += ", ";
      put_string(out, key);
      out += ": " + pieces.value();
    } else {
      message += (message.empty() ? "" : " ") + pieces.word();
    }
  }
  if (!message.empty()) {
    out += R"(, "message": )";
    put_string(out, message);
  }
  return out + "}";
}

}  // namespace deltasync::log
