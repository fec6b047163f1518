#include "net/tls_files.hpp"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <strings.h>
#include <sys/stat.h>

#include <cerrno>
#include <ctime>
#include <vector>

namespace deltasync::net {
namespace {

constexpr mode_t kOthers = 07;
/// The fastest first where processors have AES instructions. Which one both sides have is the client's to choose.
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
/// A receiver's next records are read together with the one that it wants.
constexpr std::size_t kReadAheadBytes = 64u << 10;

struct FreeNames {
  void operator()(GENERAL_NAMES* names) const { ::GENERAL_NAMES_free(names); }
};
using NamesPtr = std::unique_ptr<GENERAL_NAMES, FreeNames>;

NamesPtr alternative_names(X509* certificate) {
  return NamesPtr(static_cast<GENERAL_NAMES*>(::X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
}

std::string text_of(const ASN1_STRING* text) {
  return {reinterpret_cast<const char*>(::ASN1_STRING_get0_data(text)),
          static_cast<std::size_t>(::ASN1_STRING_length(text))};
}

std::string address_text(const ASN1_OCTET_STRING* address) {
  char text[INET6_ADDRSTRLEN] = {};
  const int family = ::ASN1_STRING_length(address) == 4 ? AF_INET : AF_INET6;
  if (family == AF_INET6 && ::ASN1_STRING_length(address) != 16) return "?";
  ::inet_ntop(family, ::ASN1_STRING_get0_data(address), text, sizeof text);
  return text;
}

std::string common_name(X509* certificate) {
  X509_NAME* subject = ::X509_get_subject_name(certificate);
  const int at = ::X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at < 0) return {};
  return text_of(::X509_NAME_ENTRY_get_data(::X509_NAME_get_entry(subject, at)));
}

std::vector<std::string> dns_names(X509* certificate) {
  std::vector<std::string> names;
  const NamesPtr list = alternative_names(certificate);
  for (int i = 0; list && i < sk_GENERAL_NAME_num(list.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(list.get(), i);
    if (name->type == GEN_DNS) names.push_back(text_of(name->d.dNSName));
  }
  return names;
}

/// That it is there and can be read, and that nobody else can read a key.
Status check_file(const std::filesystem::path& path, const std::string& what, bool secret) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return Error::from_errno(what, errno);
  if (!S_ISREG(info.st_mode)) return Error(Errc::invalid_argument, what + ": not a regular file");
  if (secret && (info.st_mode & kOthers) != 0) {
    return Error(Errc::permission, what + ": everybody may access it; make it mode 0600 (or 0640)");
  }
  return {};
}

/// A key with a passphrase is refused; OpenSSL would ask for it on the terminal.
int no_passphrase(char*, int, int, void*) {
  return 0;
}

Status load_certificate(SSL_CTX* context, const TlsOptions& options) {
  const std::string cert = "TLS certificate file " + options.cert.string();
  const std::string key = "TLS key file " + options.key.string();
  DS_TRY(check_file(options.cert, cert, false));
  DS_TRY(check_file(options.key, key, true));
  if (::SSL_CTX_use_certificate_chain_file(context, options.cert.c_str()) != 1) {
    return Error(Errc::invalid_argument, cert + ": no certificate in PEM form: " + take_ssl_reason());
  }
  if (::SSL_CTX_use_PrivateKey_file(context, options.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    const auto reason = ::ERR_GET_REASON(::ERR_peek_last_error());
    if (reason == X509_R_KEY_VALUES_MISMATCH || reason == X509_R_KEY_TYPE_MISMATCH) {
      static_cast<void>(take_ssl_reason());
      return Error(Errc::invalid_argument, key + ": not the key of the certificate in " + options.cert.string());
    }
    return Error(Errc::invalid_argument,
                 key + ": no private key in PEM form without a passphrase: " + take_ssl_reason());
  }
  X509* const certificate = ::SSL_CTX_get0_certificate(context);
  if (::X509_cmp_current_time(::X509_get0_notAfter(certificate)) < 0) {
    return Error(Errc::invalid_argument,
                 cert + ": it expired on " + date_of(::X509_get0_notAfter(certificate)) + "; put a new one there");
  }
  return {};
}

Status load_ca(SSL_CTX* context, TlsRole role, const TlsOptions& options) {
  const std::string ca = "TLS CA file " + options.ca.string();
  DS_TRY(check_file(options.ca, ca, false));
  if (::SSL_CTX_load_verify_locations(context, options.ca.c_str(), nullptr) != 1) {
    return Error(Errc::invalid_argument, ca + ": no certificate in PEM form: " + take_ssl_reason());
  }
  if (role == TlsRole::server) ::SSL_CTX_set_client_CA_list(context, ::SSL_load_client_CA_file(options.ca.c_str()));
  return {};
}

}  // namespace

TlsFilesSeen TlsFilesSeen::look(const TlsOptions& options) {
  TlsFilesSeen seen;
  const std::filesystem::path* paths[] = {&options.cert, &options.key, &options.ca};
  for (std::size_t i = 0; i < seen.files.size(); ++i) {
    struct stat info {};
    if (paths[i]->empty() || ::stat(paths[i]->c_str(), &info) != 0) continue;
    // The change time: a file that is replaced by an older one has a new one all the same.
    seen.files[i] = {info.st_dev, info.st_ino, info.st_size,
                     std::int64_t{info.st_ctim.tv_sec} * 1'000'000'000 + info.st_ctim.tv_nsec};
  }
  return seen;
}

Result<SslContextPtr> load_tls_files(TlsRole role, const TlsOptions& options) {
  ::ERR_clear_error();
  SslContextPtr context(::SSL_CTX_new(role == TlsRole::server ? ::TLS_server_method() : ::TLS_client_method()));
  if (!context) return Error(Errc::no_space, "TLS: " + take_ssl_reason());
  SSL_CTX* const c = context.get();
  SSL_CTX_set_min_proto_version(c, TLS1_3_VERSION);
  SSL_CTX_set_options(c, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
  ::SSL_CTX_set_num_tickets(c, 0);
  SSL_CTX_set_session_cache_mode(c, SSL_SESS_CACHE_OFF);
  // Who dials may be a library in a process that a SIGPIPE would end; see write_quietly.
  if (options.kernel && role == TlsRole::server) SSL_CTX_set_options(c, SSL_OP_ENABLE_KTLS);
  SSL_CTX_set_mode(c, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_read_ahead(c, 1);
  ::SSL_CTX_set_default_read_buffer_len(c, kReadAheadBytes);
  ::SSL_CTX_set_default_passwd_cb(c, no_passphrase);
  if (::SSL_CTX_set_ciphersuites(c, kCiphers) != 1) return Error(Errc::unsupported, "TLS 1.3: " + take_ssl_reason());
  if (!options.cert.empty()) DS_TRY(load_certificate(c, options));
  if (!options.ca.empty()) DS_TRY(load_ca(c, role, options));
  ::ERR_clear_error();
  return context;
}

std::string names_of(X509* certificate) {
  std::string names;
  const NamesPtr list = alternative_names(certificate);
  for (int i = 0; list && i < sk_GENERAL_NAME_num(list.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(list.get(), i);
    if (name->type != GEN_DNS && name->type != GEN_IPADD) continue;
    if (!names.empty()) names += ", ";
    names += name->type == GEN_DNS ? text_of(name->d.dNSName) : address_text(name->d.iPAddress);
  }
  if (names.empty()) names = common_name(certificate);
  return names.empty() ? "nobody" : names;
}

bool has_name(X509* certificate, const std::string& name) {
  const auto same = [&name](const std::string& other) {
    return other.size() == name.size() && ::strncasecmp(other.data(), name.data(), name.size()) == 0;
  };
  for (const std::string& dns : dns_names(certificate)) {
    if (same(dns)) return true;
  }
  return same(common_name(certificate));
}

std::string date_of(const ASN1_TIME* time) {
  std::tm broken_down{};
  char text[64] = {};
  if (::ASN1_TIME_to_tm(time, &broken_down) != 1 ||
      std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &broken_down) == 0) {
    return "an unknown date";
  }
  return text;
}

std::string take_ssl_reason() {
  const unsigned long code = ::ERR_get_error();
  ::ERR_clear_error();
  if (code == 0) return "no reason given";
  const char* reason = ::ERR_reason_error_string(code);
  return reason != nullptr ? reason : "OpenSSL error " + std::to_string(code);
}

}  // namespace deltasync::net
