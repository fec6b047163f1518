// How long a certificate still lasts, and when that is worth a line in the log.
#pragma once

#include <openssl/ssl.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace deltasync::net {

using CertificateTime = std::chrono::system_clock::time_point;

struct CertificateLife {
  CertificateTime begin;
  CertificateTime end;
  bool operator==(const CertificateLife&) const = default;
};

/// Of that of a side's certificates which ends first (its own, or one between it and its CA); nothing if it has none.
std::optional<CertificateLife> first_to_end(SSL_CTX* context);

/// "2026-11-24 07:00 UTC"
std::string date_of(CertificateTime time);

/// Says each thing once for each certificate: `soon` 14 days before its end, or when a quarter of its life is left if
/// that is later, as of those that are renewed every day; `very_soon` one day before, or a sixteenth of its life; that
/// it is over.
class ExpiryNotice {
 public:
  enum class Say : std::uint8_t { nothing, soon, very_soon, over };

  /// `life` is another one after a reload: then what there is to say is said again.
  Say look(const std::optional<CertificateLife>& life, CertificateTime now);

 private:
  std::optional<CertificateLife> life_;
  Say said_ = Say::nothing;
};

}  // namespace deltasync::net
