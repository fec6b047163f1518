#include "base/log.hpp"

#include <fmt/args.h>
#include <fmt/format.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/log_json.hpp"
#include "base/log_setup.hpp"
#include "base/utf8.hpp"

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

/// Levels as --log-level and the JSON lines name them: spdlog says "warning".
class LevelName final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& line, const std::tm& /*time*/, spdlog::memory_buf_t& to) override {
    const auto name =
        line.level == spdlog::level::warn ? spdlog::string_view_t("warn") : spdlog::level::to_string_view(line.level);
    to.append(name.data(), name.data() + name.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<LevelName>(); }
};

/// Values come from users and peers: as one stands between quotes, it ends where the line's own quote is. Control
/// characters become text as well (printable()), so that no value ends the line or tells a terminal what to do.
std::string quotable(std::string_view value) {
  std::string out;
  out.reserve(value.size());
  for (const char c : value) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

/// The arguments with their texts as quotable() has them. (A number cannot end a field, and nothing else is logged.)
fmt::dynamic_format_arg_store<fmt::format_context> with_quotable_texts(const fmt::format_args& args) {
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (int i = 0; args.get(i); ++i) {
    fmt::visit_format_arg(
        [&]<class T>(T value) {
          using Handle = fmt::basic_format_arg<fmt::format_context>::handle;
          if constexpr (std::is_same_v<T, const char*> || std::is_same_v<T, fmt::string_view>) {
            const fmt::string_view text(value);
            store.push_back(quotable({text.data(), text.size()}));
          } else if constexpr (!std::is_same_v<T, fmt::monostate> && !std::is_same_v<T, Handle>) {
            store.push_back(value);
          }
        },
        args.get(i));
  }
  return store;
}

}  // namespace

void init_log(const std::string& process_name, const std::string& level) {
  init_log(process_name, level, LogFormat::text);
}

void init_log(const std::string& process_name, const std::string& level, LogFormat format) {
  auto logger = spdlog::stderr_color_mt(process_name);
  g_json = format == LogFormat::json;
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<LevelName>('*').set_pattern(g_json ? "%v" : "%Y-%m-%dT%H:%M:%S.%e%z %^%*%$ %n[%P] %v");
  logger->set_formatter(std::move(formatter));
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
    fmt::vformat_to(fmt::appender(text), format, with_quotable_texts(args));
    spdlog::log(to, printable({text.data(), text.size()}));
  } catch (const std::exception&) {  // no memory for the line; spdlog itself says what its sinks throw
  }
}

}  // namespace deltasync
