// Structured logs: one line an event, `event key=value …`, through spdlog on stderr. Only log.cpp sees spdlog: its
// headers would compile the formatting of every type again in each file that logs.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>

namespace deltasync {

/// Sets the process-wide logger: pattern with time, level, process name. level: trace debug info warn error off;
/// an unknown level reads as info. Called once by each executable.
void init_log(const std::string& process_name, const std::string& level);

namespace log {

enum class Level { debug, info, warn, error, critical };

/// One line of spdlog's default logger, if it takes this level. Never throws. Any thread.
void write(Level level, fmt::string_view format, fmt::format_args args) noexcept;

/// `log::warn("event key={} other=\"{}\"", …)`: the format is checked as it is compiled.
template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::debug, format, fmt::make_format_args(args...));
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::info, format, fmt::make_format_args(args...));
}
template <class... Args>
void warn(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::warn, format, fmt::make_format_args(args...));
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::error, format, fmt::make_format_args(args...));
}
template <class... Args>
void critical(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::critical, format, fmt::make_format_args(args...));
}

}  // namespace log
}  // namespace deltasync
