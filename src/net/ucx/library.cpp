#include "net/ucx/library.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdarg>
#include <cstdio>
#include <type_traits>

#include "base/log.hpp"
#include "base/log_limit.hpp"
#include "base/utf8.hpp"

namespace deltasync::net::ucx {
namespace {

constexpr const char* kRemedy = "; name another one in DELTASYNC_UCX_LIBRARY (a path, or a name for dlopen)";

// ---- its log, which would go to the standard output
// ------------------------------------------------------------------

enum LogLevel { kFatal = 0, kError = 1, kWarn = 2 };
constexpr int kLogStop = 0;

int to_our_log(const char* /*file*/, unsigned /*line*/, const char* /*function*/, int level, const void* /*component*/,
               const char* format, va_list arguments) {
  static log::LineLimit lines{};
  std::array<char, 1024> text{};
  static_cast<void>(std::vsnprintf(text.data(), text.size(), format, arguments));
  const std::string said = printable(text.data());
  if (level == kFatal) {
    log::critical("ucx said=\"{}\"", said);
  } else if (level > kWarn) {  // UCX_LOG_LEVEL asks for it
    log::info("ucx said=\"{}\"", said);
  } else {
    log::warn(lines, "ucx level={} said=\"{}\"", level == kError ? "error" : "warn", said);
  }
  return kLogStop;
}

using LogHandler = int (*)(const char*, unsigned, const char*, int, const void*, const char*, va_list);

}  // namespace

KeptSignals::KeptSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], nullptr, &before_[i]);
}

KeptSignals::~KeptSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
}

Result<Library> Library::open(const std::string& name) {
  Library lib;
  lib.name = name;
  const KeptSignals kept;
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    return Error(Errc::unsupported, "UCX: " + (why != nullptr ? std::string(why) : name) + kRemedy);
  }
  std::string missing;
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, symbol));
    if (function == nullptr && missing.empty()) missing = symbol;
  };
  find(lib.get_version, "ucp_get_version");
  if (!missing.empty()) return Error(Errc::unsupported, "UCX: " + name + " has no " + missing + kRemedy);
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  lib.get_version(&major, &minor, &release);
  lib.version_number = major << 16 | minor;
  lib.version = std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
  if (major != OldestVersion::kMajor || minor < OldestVersion::kMinor) {
    return Error(Errc::unsupported, "UCX: " + name + " is version " + lib.version + ", and " +
                                        std::to_string(OldestVersion::kMajor) + "." +
                                        std::to_string(OldestVersion::kMinor) +
                                        " of the same major version is the oldest that is known to survive the death "
                                        "of a peer" +
                                        kRemedy);
  }
  find(lib.config_read, "ucp_config_read");
  find(lib.config_modify, "ucp_config_modify");
  find(lib.config_release, "ucp_config_release");
  find(lib.init, "ucp_init_version");
  find(lib.cleanup, "ucp_cleanup");
  find(lib.worker_create, "ucp_worker_create");
  find(lib.worker_destroy, "ucp_worker_destroy");
  find(lib.worker_get_address, "ucp_worker_get_address");
  find(lib.worker_release_address, "ucp_worker_release_address");
  find(lib.worker_get_efd, "ucp_worker_get_efd");
  find(lib.worker_arm, "ucp_worker_arm");
  find(lib.worker_progress, "ucp_worker_progress");
  find(lib.worker_set_am_recv_handler, "ucp_worker_set_am_recv_handler");
  find(lib.ep_create, "ucp_ep_create");
  find(lib.ep_close, "ucp_ep_close_nbx");
  find(lib.ep_query, "ucp_ep_query");
  find(lib.am_send, "ucp_am_send_nbx");
  find(lib.am_recv_data, "ucp_am_recv_data_nbx");
  find(lib.am_data_release, "ucp_am_data_release");
  find(lib.request_check_status, "ucp_request_check_status");
  find(lib.request_free, "ucp_request_free");
  find(lib.status_string, "ucs_status_string");
  if (!missing.empty()) return Error(Errc::unsupported, "UCX: " + name + " has no " + missing + kRemedy);
  void (*push_log_handler)(LogHandler) = nullptr;  // no part of the stable interface: without it the log goes elsewhere
  push_log_handler = reinterpret_cast<decltype(push_log_handler)>(::dlsym(handle, "ucs_log_push_handler"));
  if (push_log_handler != nullptr) push_log_handler(to_our_log);
  return lib;
}

}  // namespace deltasync::net::ucx
