#include <stdio_ext.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>

#include "base/utf8.hpp"
#include "tools/cli/cli.hpp"

namespace deltasync::cli {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string format(const char* pattern, double value) {
  char text[64];
  const int n = std::snprintf(text, sizeof(text), pattern, value);
  return {text, static_cast<std::size_t>(n)};
}

Status write_line(std::string_view line) {
  if (std::fwrite(line.data(), 1, line.size(), stdout) != line.size() || std::fputc('\n', stdout) == EOF ||
      std::fflush(stdout) != 0) {
    const int why = errno;
    ::__fpurge(stdout);  // it would come with a later line, or a part of it
    if (why == EPIPE) return Error(Errc::io, "stdout: nobody reads it any more");  // no connection that comes again
    return Error::from_errno("stdout", why);
  }
  return {};
}

}  // namespace

Exit exit_of(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument:
    case Errc::out_of_range: return Exit::usage;
    case Errc::connection:
    case Errc::protocol:
    case Errc::peer_died:
    case Errc::lease_revoked: return Exit::connection;
    case Errc::corrupt:
    case Errc::coverage: return Exit::not_verified;
    case Errc::timed_out: return Exit::deadline;
    case Errc::no_space: return Exit::no_space;
    case Errc::gone:
    case Errc::version_conflict:
    case Errc::layout_mismatch:
    case Errc::aborted:
    case Errc::quarantined: return Exit::version;
    case Errc::unauthenticated:
    case Errc::permission: return Exit::access;
    case Errc::not_found:
    case Errc::already_exists: return Exit::missing;
    case Errc::unsupported: return Exit::unsupported;
    case Errc::io:
    case Errc::internal:
    case Errc::cancelled: return Exit::other;  // a signal's own exit code goes before
  }
  return Exit::other;
}

std::string not_negative(const std::string& number) {
  return number.starts_with('-') ? number + " is negative" : "";
}

std::string one_or_more(const std::string& number) {
  return number.starts_with('-') || number.find_first_not_of('0') == std::string::npos ? number + " is less than 1"
                                                                                       : "";
}

void add_tls_options(CLI::App& app, TlsOptions& tls) {
  app.add_option("--tls-ca", tls.ca,
                 "speak TLS, and trust only an agent whose certificate a CA in this file has signed (PEM)")
      ->type_name("FILE");
  app.add_option("--tls-name", tls.name, "the name in the agent's certificate (default: the host that is dialled)")
      ->type_name("NAME");
  app.add_option("--tls-cert", tls.cert, "a certificate of one's own, for agents that want one (PEM)")
      ->type_name("FILE");
  app.add_option("--tls-key", tls.key, "its private key")->type_name("FILE");
}

void add_transfer_options(CLI::App& app, unsigned& streams, std::string& cores, double& link_gbps,
                          std::optional<bool>& local) {
  app.add_option("--streams", streams, "parallel data connections")->capture_default_str()->check(CLI::Range(1, 64));
  app.add_option("--cores", cores, "CPUs to run on, such as 0-7,16 (default: all that it may)")->type_name("LIST");
  app.add_option("--link-gbps", link_gbps,
                 "speed of the link from the agent in gigabits per second: full transfers come packed where that is "
                 "sooner (default: measured)")
      ->check(CLI::Range(0.001, 1e6));
  static const std::map<std::string, std::optional<bool>> kLocal{
      {"auto", std::nullopt}, {"never", false}, {"always", true}};
  app.add_option_function<std::string>(
         "--local", [&local](const std::string& name) { local = kLocal.at(name); },
         "copy full updates out of the memory of an agent on this host: where that can be (auto, default), never, or "
         "always, else fail")
      ->check(CLI::IsMember({"auto", "never", "always"}))
      ->option_text("auto|never|always");
}

std::string exit_code_help() {
  return "Exit codes:\n"
         "  0  done\n"
         "  1  wrong options or arguments\n"
         "  2  connection: no agent there, or it went away\n"
         "  3  not verified: corrupt or incomplete bytes; nothing was published\n"
         "  4  the deadline passed\n"
         "  5  no space: disk, /dev/shm or cgroup full\n"
         "  6  version: gone, out of order, another layout, or its fill was aborted\n"
         "  7  access: token or certificate missing or wrong, file permissions\n"
         "  8  a file or directory is not there, or one is in the way\n"
         "  9  unsupported by this build\n"
         " 10  any other error\n"
         "128+N  pull, relay: ended by signal N\n";
}

Status print_line(std::string_view line) {
  return write_line(printable(line));
}

std::filesystem::path model_directory(const std::string& path) {
  const std::filesystem::path current = std::filesystem::path(path) / "current";
  std::error_code none;
  return std::filesystem::is_directory(current, none) ? current : std::filesystem::path(path);
}

Result<std::string> read_text(const std::string& path) {
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) return Error(Errc::invalid_argument, path + ": a directory");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text;
  if (file) text.assign(std::istreambuf_iterator<char>(file), {});
  if (!file || file.bad()) return Error::from_errno(path, errno != 0 ? errno : EIO);
  return text;
}

Status print_json(const Json& object, int indent) {
  // Names and messages come from outside: bytes that are no UTF-8 must not stop the program.
  return write_line(object.dump(indent, ' ', false, Json::error_handler_t::replace));
}

std::string human_bytes(std::uint64_t bytes) {
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return format(value < 10 ? "%.2f " : "%.1f ", value) + units[unit];
}

std::string human_age(double seconds) {
  if (seconds < 120) return human_seconds(seconds);
  if (seconds < 7200) return format("%.0f min", std::floor(seconds / 60));
  return format("%.0f h", std::floor(seconds / 3600));
}

std::string human_seconds(double seconds) {
  if (seconds >= 1) return format("%.2f s", seconds);
  if (seconds >= 1e-3) return format("%.1f ms", seconds * 1e3);
  return format("%.0f us", seconds * 1e6);
}

std::string human_percent(double fraction) {
  return format(fraction < 0.01 ? "%.3f%%" : "%.2f%%", fraction * 100);
}

Progress::Progress(bool enabled) : enabled_(enabled && ::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  clear();
}

void Progress::show(const std::string& line) {
  if (!enabled_ || now_s() - last_s_ < 0.1) return;
  last_s_ = now_s();
  shown_ = true;
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
}

void Progress::clear() {
  if (shown_) std::fputs("\r\033[K", stderr);
  shown_ = false;
}

}  // namespace deltasync::cli
