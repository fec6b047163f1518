// A log line as one JSON object.
#pragma once

#include <fmt/core.h>

#include <chrono>
#include <string>
#include <string_view>

#include "base/log.hpp"

namespace deltasync::log {

/// {"time": …, "level": …, "process": …, "pid": …, "event": …, KEY: VALUE, …} of `event key={} other="{}"`. The keys
/// are the format's: whatever a value holds, it stays in its field. Arguments that are numbers are numbers there, all
/// else is text; "message" is what stands beside the keys, if anything does. `time` is local, to the millisecond, with
/// its offset from UTC (RFC 3339).
std::string json_line(Level level, std::string_view process, std::chrono::system_clock::time_point now,
                      fmt::string_view format, fmt::format_args args);

/// "2026-01-02T03:04:05.678+01:00"
std::string local_time(std::chrono::system_clock::time_point now);

}  // namespace deltasync::log
