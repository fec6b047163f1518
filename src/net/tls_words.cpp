#include "net/tls_words.hpp"

#include <openssl/err.h>
#include <openssl/x509v3.h>

namespace deltasync::net {

std::string tls_refusal(int error, X509* certificate, int depth, const TlsOptions& options,
                        const std::string& expected) {
  if (certificate == nullptr) return std::string("its certificate: ") + ::X509_verify_cert_error_string(error);
  const std::string whose = depth == 0 ? "its certificate" : "its CA's certificate (" + names_of(certificate) + ")";
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return whose + " expired on " + date_of(::X509_get0_notAfter(certificate)) + ": it has to be renewed";
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return whose + " is not valid before " + date_of(::X509_get0_notBefore(certificate)) +
             ": wait, or look at the clocks of both hosts";
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return whose + " is for " + names_of(certificate) + ", not for " + expected +
             ": dial one of its names, or say by --tls-name which one it must have";
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return whose + (depth == 0 ? " (for " + names_of(certificate) + ")" : "") + " is not signed by a CA in " +
             options.ca.string() + " (--tls-ca)" +
             (error == X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT ? ", but by itself" : "");
    case X509_V_ERR_APPLICATION_VERIFICATION:
      return whose + " is for " + names_of(certificate) + ", whom --tls-allow does not name";
    default: return whose + ": " + ::X509_verify_cert_error_string(error);
  }
}

Error tls_error(unsigned long code, TlsRole role) {
  const char* const text = ::ERR_reason_error_string(code);
  const std::string reason = text != nullptr ? text : "OpenSSL error " + std::to_string(code);
  const std::string mine = role == TlsRole::client ? " (--tls-cert)" : "";
  switch (ERR_GET_REASON(code)) {
    case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED:
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
      return role == TlsRole::client
                 ? Error(Errc::unauthenticated, "the peer wants a certificate: give --tls-cert and --tls-key")
                 : Error(Errc::unauthenticated, "the peer has no certificate, which --tls-ca asks for");
    case SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE:
      return {Errc::unauthenticated,
              "the peer refused the handshake: perhaps its --tls-allow does not name this side's certificate" + mine};
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
      return {Errc::unauthenticated, "the peer refused this side's certificate" + mine + ": " + reason};
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_TLSV1_ALERT_PROTOCOL_VERSION:
    case SSL_R_NO_PROTOCOLS_AVAILABLE: return {Errc::unsupported, "one side does not speak TLS 1.3: " + reason};
    case SSL_R_DECRYPTION_FAILED_OR_BAD_RECORD_MAC:
      return {Errc::corrupt, "what came is not what the peer sent: it was changed, repeated, left out or reordered"};
    case SSL_R_SSLV3_ALERT_BAD_RECORD_MAC:
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
      return {Errc::corrupt, "what the peer got is not what was sent: it was changed on the way"};
    case SSL_R_UNEXPECTED_EOF_WHILE_READING:
      return {Errc::connection, "the connection was cut: it ended without the word that TLS signs"};
    default: return {Errc::protocol, "TLS: " + reason};
  }
}

Error speaks_no_tls() {
  return {Errc::unsupported,
          "it speaks without TLS: give it --tls-cert and --tls-key, or dial it without (no --tls-ca, no https://)"};
}

}  // namespace deltasync::net
