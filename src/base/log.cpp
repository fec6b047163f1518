#include "base/log.hpp"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>

#include "base/log_json.hpp"
#include "base/log_setup.hpp"

namespace deltasync {
namespace {

std::atomic<bool> g_json{false};  ///< LogFormat::json

spdlog::level::level_enum to_spdlog(log::Level level) {
  switch (level) {
    case log::Level::debug: return spdlog::level::debug;
    case log::Level::info: return spdlog::level::info;
    case log::Level::warn: return spdlog::level::warn;
    case log::Level::error: return spdlog::level::err;
    case log::Level::critical: break;
  }
  return spdlog::level::critical;
}

}  // namespace

void init_log(const std::string& process_name, const std::string& level) {
  init_log(process_name, level, LogFormat::text);
}

void init_log(const std::string& process_name, const std::string& level, LogFormat format) {
  auto logger = spdlog::stderr_color_mt(process_name);
  g_json = format == LogFormat::json;
  logger->set_pattern(g_json ? "%v" : "%Y-%m-%dT%H:%M:%S.%e%z %^%l%$ %n[%P] %v");
  const auto parsed = spdlog::level::from_str(level);
  logger->set_level(parsed == spdlog::level::off && level != "off" ? spdlog::level::info : parsed);
  spdlog::set_default_logger(std::move(logger));
}

void log::write(Level level, fmt::string_view format, fmt::format_args args) noexcept {
  const auto to = to_spdlog(level);
  try {
    if (!spdlog::should_log(to)) return;
    if (g_json) {
      const std::string& process = spdlog::default_logger_raw()->name();
      spdlog::log(to, json_line(level, process, std::chrono::system_clock::now(), format, args));
      return;
    }
    fmt::memory_buffer text;
    fmt::vformat_to(fmt::appender(text), format, args);
    spdlog::log(to, spdlog::string_view_t(text.data(), text.size()));
  } catch (const std::exception&) {  // no memory for the line; spdlog itself says what its sinks throw
  }
}

}  // namespace deltasync
