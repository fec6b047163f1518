// How a connection is encrypted, and who may be at its other end. security.md says what that gives, and how
// certificates are made and renewed.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace deltasync {

/// The files of one side of TLS, in PEM. All empty: no TLS. They are read again when they have changed, which is looked
/// at when a connection begins, at most once a second. If what is new cannot be used, what was read before stays in
/// use, and the log says so once.
///
/// ```cpp
/// auto made = Receiver::connect({.endpoint = "trainer:7070", .tls = {.ca = "ca.pem"}});
/// ```
struct TlsOptions {
  /// This side's certificate, followed by those between it and its CA. A server needs one; a client that has one shows
  /// it to servers that ask.
  std::filesystem::path cert = {};
  /// Its private key, without a passphrase. Others than the owner and the group must not be able to read the file.
  std::filesystem::path key = {};
  /// Certificates of the CAs that may have signed the peer's. A client needs them; a server that has them lets in only
  /// clients with such a certificate (mutual TLS), and then a token is not needed beyond loopback.
  std::filesystem::path ca = {};
  /// Client: the name (or address) that the server's certificate must be for, in place of the endpoint's host.
  std::string name = {};
  /// Server: names of clients that may connect, as DNS names or as the common name of their certificates; empty: all
  /// that `ca` signed. Needs `ca`.
  std::vector<std::string> allow = {};
  /// Server: let the kernel encrypt where it can (kTLS), so that full transfers go on without a copy in user space. The
  /// process has to ignore SIGPIPE.
  bool kernel = true;

  /// Whether TLS was asked for. Names alone do nothing, but who gives them believes that they guard something: they are
  /// refused for lack of files.
  bool wanted() const noexcept {
    return !cert.empty() || !key.empty() || !ca.empty() || !name.empty() || !allow.empty();
  }
};

}  // namespace deltasync
