#include "tests/support/certificates.hpp"

#include <openssl/ec.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>

#include "net/auth.hpp"

namespace deltasync::test {
namespace {

using KeyPtr = std::unique_ptr<EVP_PKEY, FreeCertificate>;
using CertificatePtr = std::unique_ptr<X509, FreeCertificate>;

void must(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "certificates for tests: %s failed\n", what);
  std::abort();
}

KeyPtr make_key() {
  KeyPtr key(EVP_EC_gen("P-256"));
  must(key != nullptr, "making a key");
  return key;
}

void extend(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* const extension = ::X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  must(extension != nullptr && ::X509_add_ext(certificate, extension, -1) == 1, value.c_str());
  ::X509_EXTENSION_free(extension);
}

/// Not yet signed. Without an issuer it is its own.
CertificatePtr make_certificate(const Wanted& wanted, EVP_PKEY* key, X509* issuer, bool is_ca) {
  CertificatePtr certificate(::X509_new());
  X509* const c = certificate.get();
  must(c != nullptr && ::X509_set_version(c, X509_VERSION_3) == 1, "making a certificate");
  const std::uint64_t serial = net::make_random_id() >> 1;
  must(::ASN1_INTEGER_set_uint64(::X509_get_serialNumber(c), serial) == 1, "the serial number");
  ::X509_gmtime_adj(X509_getm_notBefore(c), wanted.from.count());
  ::X509_gmtime_adj(X509_getm_notAfter(c), wanted.to.count());
  ::X509_set_pubkey(c, key);
  X509_NAME* const subject = ::X509_get_subject_name(c);
  const auto* const name = reinterpret_cast<const unsigned char*>(wanted.common_name.c_str());
  must(::X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_UTF8, name, -1, -1, 0) == 1, "the common name");
  if (issuer == nullptr) issuer = c;
  ::X509_set_issuer_name(c, ::X509_get_subject_name(issuer));
  extend(c, issuer, NID_basic_constraints, is_ca ? "critical,CA:TRUE" : "CA:FALSE");
  std::string names;
  for (const std::string& dns : wanted.dns) names += (names.empty() ? "DNS:" : ",DNS:") + dns;
  for (const std::string& address : wanted.addresses) names += (names.empty() ? "IP:" : ",IP:") + address;
  if (!names.empty()) extend(c, issuer, NID_subject_alt_name, names);
  return certificate;
}

void write_key(const std::filesystem::path& path, EVP_PKEY* key) {
  const std::filesystem::path fresh = path.string() + ".new";
  std::FILE* const file = std::fopen(fresh.c_str(), "w");
  must(file != nullptr && ::fchmod(::fileno(file), 0600) == 0 &&
           ::PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr) == 1,
       path.c_str());
  std::fclose(file);
  std::filesystem::rename(fresh, path);
}

void write_certificate(const std::filesystem::path& path, X509* certificate) {
  const std::filesystem::path fresh = path.string() + ".new";
  std::FILE* const file = std::fopen(fresh.c_str(), "w");
  must(file != nullptr && ::PEM_write_X509(file, certificate) == 1, path.c_str());
  std::fclose(file);
  std::filesystem::rename(fresh, path);
}

CertificateFiles write_both(const std::filesystem::path& dir, const std::string& name, X509* certificate,
                            EVP_PKEY* key) {
  CertificateFiles files{dir / (name + ".pem"), dir / (name + ".key")};
  write_certificate(files.cert, certificate);
  write_key(files.key, key);
  return files;
}

}  // namespace

TestCa::TestCa(std::filesystem::path dir, const std::string& name)
    : dir_(std::move(dir)), file_(dir_ / (name + ".pem")), key_(make_key()) {
  Wanted wanted;
  wanted.common_name = name;
  certificate_ = make_certificate(wanted, key_.get(), nullptr, true);
  must(::X509_sign(certificate_.get(), key_.get(), ::EVP_sha256()) != 0, "signing");
  write_certificate(file_, certificate_.get());
}

CertificateFiles TestCa::issue(const std::string& name, const Wanted& wanted) const {
  const KeyPtr key = make_key();
  const CertificatePtr certificate = make_certificate(wanted, key.get(), certificate_.get(), false);
  must(::X509_sign(certificate.get(), key_.get(), ::EVP_sha256()) != 0, "signing");
  return write_both(dir_, name, certificate.get(), key.get());
}

CertificateFiles TestCa::self_signed(const std::filesystem::path& dir, const std::string& name, const Wanted& wanted) {
  const KeyPtr key = make_key();
  const CertificatePtr certificate = make_certificate(wanted, key.get(), nullptr, false);
  must(::X509_sign(certificate.get(), key.get(), ::EVP_sha256()) != 0, "signing");
  return write_both(dir, name, certificate.get(), key.get());
}

Wanted local_server() {
  Wanted wanted;
  wanted.dns = {"localhost", "agent.example"};
  wanted.addresses = {"127.0.0.1"};
  return wanted;
}

Wanted named(const std::string& name) {
  Wanted wanted;
  wanted.common_name = name;
  return wanted;
}

TlsOptions with(TlsOptions options, const CertificateFiles& files) {
  options.cert = files.cert;
  options.key = files.key;
  return options;
}

TlsOptions TestTls::server(const Wanted& wanted) const {
  return with(TlsOptions(), ca.issue("server", wanted));
}

TlsOptions TestTls::asking_server(const Wanted& wanted) const {
  return with(client(), ca.issue("server", wanted));
}

TlsOptions TestTls::client() const {
  TlsOptions options;
  options.ca = ca.file();
  return options;
}

TlsOptions TestTls::client(const std::string& name) const {
  return with(client(), ca.issue(name, named(name)));
}

}  // namespace deltasync::test
