// Log lines that strangers can cause. Anyone who can connect can make a process write a line as often as they like: of
// each kind a few are written in a while, and the next one says how many were left out.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>

#include "base/log.hpp"

namespace deltasync::log {

/// One kind of line. Any thread.
class LineLimit {
 public:
  using Clock = std::chrono::steady_clock;

  /// At most `lines` in each span of `per`.
  explicit LineLimit(unsigned lines = 5, std::chrono::nanoseconds per = std::chrono::seconds(10))
      : lines_(lines), per_(per) {}

  /// Nothing: the line is left out. Else how many were left out since the last that was written.
  std::optional<std::uint64_t> admit(Clock::time_point now = Clock::now());

 private:
  const unsigned lines_;
  const std::chrono::nanoseconds per_;
  std::mutex mutex_;
  std::optional<Clock::time_point> begun_;  // protected by mutex_, as all below: the span at hand
  unsigned written_ = 0;                    // in it
  std::uint64_t left_out_ = 0;
};

/// The line as log::write writes it, unless `limit` leaves it out; `left_out=N` at its end says how many were before
/// it.
void write(LineLimit& limit, Level level, fmt::string_view format, fmt::format_args args) noexcept;

template <class... Args>
void warn(LineLimit& limit, fmt::format_string<Args...> format, Args&&... args) {
  write(limit, Level::warn, format, fmt::make_format_args(args...));
}

}  // namespace deltasync::log
