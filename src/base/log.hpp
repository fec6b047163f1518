// Structured logs: one line an event, `event key=value …`, through spdlog on stderr.
#pragma once

#include <spdlog/spdlog.h>

#include <string>

namespace deltasync {

/// Sets the process-wide logger: pattern with time, level, process name. level: trace debug info warn error off;
/// an unknown level reads as info. Called once by each executable.
void init_log(const std::string& process_name, const std::string& level);

}  // namespace deltasync
