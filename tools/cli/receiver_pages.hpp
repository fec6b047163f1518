// The status pages of a process that follows an agent: the same as the agent's, of one receiver.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "deltasync/tls.hpp"
#include "tools/cli/follow.hpp"

namespace CLI {
class App;
}

namespace deltasync::cli {

struct PagesOptions {
  std::string http;  ///< HOST:PORT; empty: no pages
  bool allow_remote = false;
  bool plain = false;                      ///< no HTTPS, though the process has a certificate
  bool client_certificates = false;        ///< only for those whose certificate the CA has signed
  std::optional<std::uint64_t> ready_lag;  ///< versions; more, and it is not ready
};
/// --http, --http-allow-remote, --http-plain, --http-client-certificates and --ready-lag.
void add_pages_options(CLI::App& app, PagesOptions& options);

/// GET /healthz, /readyz, /v1/status and /metrics, on threads of its own, from the start until its end.
class ReceiverPages {
 public:
  /// `role`: "pull" or "relay"; `from`: the agent's endpoint; `tls`: of the receiver, whose certificate, if it has one,
  /// the pages show. Null without `options.http`. Errors name --http.
  static Result<std::unique_ptr<ReceiverPages>> start(const PagesOptions& options, const std::string& role,
                                                      const std::string& from, const TlsOptions& tls);
  ~ReceiverPages();
  ReceiverPages(const ReceiverPages&) = delete;
  ReceiverPages& operator=(const ReceiverPages&) = delete;

  /// The same, whose doings the pages tell. Must not outlive them.
  Follower watch(Follower follower);

 private:
  struct Impl;
  explicit ReceiverPages(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// As `pages` watches it, if there are any.
Follower watched(ReceiverPages* pages, Follower follower);

}  // namespace deltasync::cli
