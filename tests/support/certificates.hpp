// Certificates for tests, made by OpenSSL's own functions: P-256 keys, a CA, and what it signs.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "deltasync/tls.hpp"

namespace deltasync::test {

struct FreeCertificate {
  void operator()(X509* certificate) const { ::X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { ::EVP_PKEY_free(key); }
};

struct CertificateFiles {
  std::filesystem::path cert;
  std::filesystem::path key;
};

/// What a certificate says. Times from now.
struct Wanted {
  std::vector<std::string> dns;
  std::vector<std::string> addresses;
  std::string common_name = "deltasync test";
  std::chrono::seconds from{-3600};
  std::chrono::seconds to{30 * 86400};
};

class TestCa {
 public:
  /// Its certificate is `dir`/`name`.pem.
  TestCa(std::filesystem::path dir, const std::string& name);

  const std::filesystem::path& file() const noexcept { return file_; }
  /// Writes `dir`/`name`.pem and .key, by a rename, so that a reader finds the old or the new one.
  CertificateFiles issue(const std::string& name, const Wanted& wanted) const;
  /// One that signs itself.
  static CertificateFiles self_signed(const std::filesystem::path& dir, const std::string& name, const Wanted& wanted);

 private:
  std::filesystem::path dir_;
  std::filesystem::path file_;
  std::unique_ptr<EVP_PKEY, FreeCertificate> key_;
  std::unique_ptr<X509, FreeCertificate> certificate_;
};

/// For localhost, agent.example and 127.0.0.1.
Wanted local_server();
/// For nobody but the common name.
Wanted named(const std::string& name);

/// A CA, and options of ends that it signed.
class TestTls {
 public:
  explicit TestTls(const std::filesystem::path& dir) : ca(dir, "ca") {}

  TlsOptions server(const Wanted& wanted = local_server()) const;
  /// One that lets in only whom the CA signed.
  TlsOptions asking_server(const Wanted& wanted = local_server()) const;
  /// A client without a certificate of its own.
  TlsOptions client() const;
  TlsOptions client(const std::string& name) const;

  TestCa ca;
};
/// `options` with another certificate.
TlsOptions with(TlsOptions options, const CertificateFiles& files);

}  // namespace deltasync::test
