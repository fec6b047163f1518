#include "net/tls_expiry.hpp"

#include <openssl/x509.h>

#include <algorithm>
#include <ctime>

namespace deltasync::net {
namespace {

constexpr std::chrono::system_clock::duration kSoon = std::chrono::hours(14 * 24);
constexpr std::chrono::system_clock::duration kVerySoon = std::chrono::hours(24);

CertificateTime time_of(const ASN1_TIME* time) {
  std::tm broken_down{};
  if (::ASN1_TIME_to_tm(time, &broken_down) != 1) return CertificateTime::max();
  // A certificate that never ends says year 9999, which a clock in nanoseconds does not reach.
  const auto seconds = std::chrono::seconds(::timegm(&broken_down));
  const auto last = std::chrono::duration_cast<std::chrono::seconds>(CertificateTime::max().time_since_epoch());
  return CertificateTime(std::min(seconds, last));
}

CertificateLife life_of(const X509* certificate) {
  return {time_of(::X509_get0_notBefore(certificate)), time_of(::X509_get0_notAfter(certificate))};
}

}  // namespace

std::optional<CertificateLife> first_to_end(SSL_CTX* context) {
  const X509* const own = ::SSL_CTX_get0_certificate(context);
  if (own == nullptr) return std::nullopt;
  CertificateLife first = life_of(own);
  STACK_OF(X509)* chain = nullptr;
  SSL_CTX_get0_chain_certs(context, &chain);
  for (int i = 0; chain != nullptr && i < sk_X509_num(chain); ++i) {
    const CertificateLife life = life_of(sk_X509_value(chain, i));
    if (life.end < first.end) first = life;
  }
  return first;
}

std::string date_of(CertificateTime time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm broken_down{};
  char text[64] = {};
  ::gmtime_r(&seconds, &broken_down);
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &broken_down);
  return text;
}

ExpiryNotice::Say ExpiryNotice::look(const std::optional<CertificateLife>& life, CertificateTime now) {
  if (life != life_) {
    life_ = life;
    said_ = Say::nothing;
  }
  if (!life) return Say::nothing;
  const auto whole = life->end - life->begin;
  const auto left = life->end - now;
  Say say = Say::nothing;
  if (left <= std::min(kSoon, whole / 4)) say = Say::soon;
  if (left <= std::min(kVerySoon, whole / 16)) say = Say::very_soon;
  if (left <= left.zero()) say = Say::over;
  if (say <= said_) return Say::nothing;
  said_ = say;
  return say;
}

}  // namespace deltasync::net
