#include "base/log_limit.hpp"

#include <fmt/format.h>

#include <exception>
#include <string>
#include <utility>

namespace deltasync::log {

std::optional<std::uint64_t> LineLimit::admit(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (!begun_ || now - *begun_ >= per_) {
    begun_ = now;
    written_ = 0;
  }
  if (written_ >= lines_) {
    ++left_out_;
    return std::nullopt;
  }
  ++written_;
  return std::exchange(left_out_, 0);
}

void write(LineLimit& limit, Level level, fmt::string_view format, fmt::format_args args) noexcept {
  try {
    const auto left_out = limit.admit();
    if (!left_out) return;
    if (*left_out == 0) return write(level, format, args);
    const std::string line = fmt::vformat(format, args);
    write(level, "{} left_out={}", fmt::make_format_args(line, *left_out));
  } catch (const std::exception&) {  // no memory for the line
  }
}

}  // namespace deltasync::log
