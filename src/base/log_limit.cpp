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
    // In the format, so that the line's fields stay what they are.
    write(level, std::string(format.data(), format.size()) + " left_out=" + std::to_string(*left_out), args);
  } catch (const std::exception&) {  // no memory for the line
  }
}

}  // namespace deltasync::log
