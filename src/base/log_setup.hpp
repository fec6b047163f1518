// How an executable logs; for its main() only.
#pragma once

#include <string>

namespace deltasync {

enum class LogFormat {
  text,  ///< `TIME LEVEL PROCESS[PID] event key=value …`
  json,  ///< one JSON object a line (base/log_json.hpp)
};

/// As init_log() of base/log.hpp, in either format. Times of both are local, with their offset from UTC.
void init_log(const std::string& process_name, const std::string& level, LogFormat format);

}  // namespace deltasync
