#include "base/log.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>

namespace deltasync {

void init_log(const std::string& process_name, const std::string& level) {
  auto logger = spdlog::stderr_color_mt(process_name);
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %n[%P] %v");
  const auto parsed = spdlog::level::from_str(level);
  logger->set_level(parsed == spdlog::level::off && level != "off" ? spdlog::level::info : parsed);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace deltasync
