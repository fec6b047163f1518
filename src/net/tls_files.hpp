// What OpenSSL is told once for all connections of a side, from the files that options name; and what these files
// looked like, so that a change is seen.
#pragma once

#include <openssl/ssl.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"

namespace deltasync::net {

enum class TlsRole : std::uint8_t { server, client };

struct FreeSsl {
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { ::SSL_free(ssl); }
  void operator()(X509* certificate) const { ::X509_free(certificate); }
  void operator()(STACK_OF(X509) * chain) const { sk_X509_pop_free(chain, ::X509_free); }
};
using SslContextPtr = std::unique_ptr<SSL_CTX, FreeSsl>;

/// Of cert, key and ca, as stat() shows them; a file that is not there is all zero.
struct TlsFilesSeen {
  struct File {
    dev_t device = 0;
    ino_t inode = 0;
    off_t bytes = 0;
    std::int64_t changed_ns = 0;
    bool operator==(const File&) const = default;
  };
  std::array<File, 3> files;

  static TlsFilesSeen look(const TlsOptions& options);
  bool operator==(const TlsFilesSeen&) const = default;
};

/// Errors name the file and what to do about it.
Result<SslContextPtr> load_tls_files(TlsRole role, const TlsOptions& options);

/// "a.example, 10.0.0.1": whom a certificate is for; its common name if it says no others.
std::string names_of(X509* certificate);
/// True if the certificate is for this DNS name, or has it as its common name.
bool has_name(X509* certificate, const std::string& name);
/// "2026-11-24 07:00 UTC"
std::string date_of(const ASN1_TIME* time);
/// The reason of the oldest error in OpenSSL's queue, which is emptied.
std::string take_ssl_reason();

}  // namespace deltasync::net
