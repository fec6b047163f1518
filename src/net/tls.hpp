// TLS 1.3 over the sockets of conversations, by OpenSSL: one side's configuration, from which a channel is made for
// each connection. There are no tickets, no resumption and no early data: every connection proves everything again, and
// nothing that was recorded can be played again. Needs no Boost. What is linked into a trainer has no part of this.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"
#include "net/channel.hpp"

namespace deltasync::net {

/// Whose connection a server's side goes on with.
enum class LetsIn : std::uint8_t {
  as_options_say,  ///< with `ca`: whom it has signed and `allow` names; without: everybody
  signed_by_ca,    ///< whom `ca`, which there has to be, has signed, whatever their names
  everybody,       ///< nobody is asked for a certificate
};

/// Thread-safe. Reads its files again when they have changed, and warns in the log before its certificate ends
/// (net/tls_expiry.hpp).
class Tls {
 public:
  /// For who accepts. Errors name the file: invalid_argument (cert or key is missing, what a file holds cannot be used,
  /// or the certificate has expired), not_found, permission (others may read the key).
  static Result<std::shared_ptr<Tls>> server(TlsOptions options);
  /// For who dials. Needs `ca`; likewise.
  static Result<std::shared_ptr<Tls>> client(TlsOptions options);
  /// Null without any file: no TLS.
  static Result<std::shared_ptr<Tls>> server_if_wanted(const TlsOptions& options);
  static Result<std::shared_ptr<Tls>> client_if_wanted(const TlsOptions& options);

  virtual ~Tls() = default;
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  /// For a connected TCP socket, which it borrows. `peer` is the host that was dialled, or the address of who came; a
  /// client wants a certificate for it, unless options name another, and has no use for `lets_in` and `end`. `end`
  /// (empty: none) is called by any thread, at most once and not after the channel's end, when a peer that was let in
  /// would be no more, since the files have changed: it ends the connection, and must not wait.
  virtual Result<std::unique_ptr<Channel>> channel(int fd, const std::string& peer, LetsIn lets_in,
                                                   std::function<void()> end) = 0;
  Result<std::unique_ptr<Channel>> channel(int fd, const std::string& peer, std::function<void()> end = {}) {
    return channel(fd, peer, LetsIn::as_options_say, std::move(end));
  }
  /// A server that can verify its peers' certificates: unless told otherwise, it lets in no others.
  virtual bool asks_for_certificates() const = 0;
  /// When the first of this side's certificates ends (its own, or one between it and its CA), as they were last read;
  /// nothing if it has none.
  virtual std::optional<std::chrono::system_clock::time_point> certificates_end() = 0;
  /// Looks at files and dates as a new connection does, for who meets none for long; at most once a second.
  virtual void run_maintenance() = 0;

 protected:
  Tls() = default;
};

/// Whether the kernel can encrypt for sockets, and what is missing if not: "" or "the kernel has no module tls".
std::string why_no_kernel_tls();

}  // namespace deltasync::net
