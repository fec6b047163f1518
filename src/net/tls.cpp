#include "net/tls.hpp"

#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <mutex>
#include <optional>
#include <utility>

#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "base/log.hpp"
#include "net/tls_channel.hpp"
#include "net/tls_expiry.hpp"
#include "net/tls_files.hpp"
#include "net/tls_peers.hpp"

namespace deltasync::net {
namespace {

constexpr auto kLookAgain = std::chrono::seconds(1);

class OpenSslTls final : public Tls {
 public:
  OpenSslTls(TlsRole role, TlsOptions options, TlsFilesSeen seen, SslContextPtr context)
      : role_(role),
        options_(std::make_shared<const TlsOptions>(std::move(options))),
        seen_(seen),
        context_(std::move(context)) {
    look_at_dates();
  }

  using Tls::channel;
  Result<std::unique_ptr<Channel>> channel(int fd, const std::string& peer, LetsIn lets_in,
                                           std::function<void()> end) override {
    const std::lock_guard lock(mutex_);
    look();
    return make_tls_channel(context_.get(), {role_, options_, lets_in, peers_, std::move(end)}, fd, peer);
  }

  bool asks_for_certificates() const override { return role_ == TlsRole::server && !options_->ca.empty(); }

  std::optional<CertificateTime> certificates_end() override {
    const std::lock_guard lock(mutex_);
    const auto life = first_to_end(context_.get());
    return life ? std::optional(life->end) : std::nullopt;
  }

  void run_maintenance() override {
    const std::lock_guard lock(mutex_);
    look();
  }

 private:
  void look() {
    if (!look_again_.passed()) return;
    look_again_ = Deadline::after(kLookAgain);
    look_at_files();
    look_at_dates();
  }

  void look_at_dates() {
    const auto life = first_to_end(context_.get());
    const auto now = std::chrono::system_clock::now();
    const auto say = notice_.look(life, now);
    if (say == ExpiryNotice::Say::nothing) return;
    const std::string cert = options_->cert.string();
    if (say == ExpiryNotice::Say::over) {
      log::error("tls_certificate_expired cert=\"{}\" at=\"{}\"", cert, date_of(life->end));
    } else {
      log::warn("tls_certificate_expires cert=\"{}\" at=\"{}\" left_h={}", cert, date_of(life->end),
                std::chrono::duration_cast<std::chrono::hours>(life->end - now).count());
    }
  }

  /// Certificate and key are two files, and may be seen when only one is new, or half of it; or there is no descriptor
  /// left to read them. So what fails is tried again at each look, whether the files have changed since or not.
  void look_at_files() {
    const TlsFilesSeen now = TlsFilesSeen::look(*options_);
    if (now == seen_) return;
    auto loaded = load_tls_files(role_, *options_);
    if (!loaded) {
      if (std::exchange(told_, now) == now) return;
      log::warn("tls_reload_failed error=\"{}\" in_use=\"what was read before\" then=\"trying again\"",
                loaded.error().to_string());
      return;
    }
    seen_ = now;
    context_ = std::move(*loaded);
    peers_->verify_by(context_.get());
    log::info("tls_reloaded cert=\"{}\" ca=\"{}\"", options_->cert.string(), options_->ca.string());
  }

  const TlsRole role_;
  const std::shared_ptr<const TlsOptions> options_;
  const std::shared_ptr<TlsPeers> peers_ = std::make_shared<TlsPeers>();
  std::mutex mutex_;
  Deadline look_again_{Deadline::after(kLookAgain)};  // protected by mutex_, as all that follows
  TlsFilesSeen seen_;                                 // when context_ was made of them
  std::optional<TlsFilesSeen> told_;                  // of which it has been said that they cannot be used
  SslContextPtr context_;
  ExpiryNotice notice_;
};

Result<std::shared_ptr<Tls>> make(TlsRole role, TlsOptions options) {
  if (options.cert.empty() != options.key.empty()) {
    return Error(Errc::invalid_argument, "TLS: a certificate and its key belong together (--tls-cert, --tls-key)");
  }
  // Looked at first: what changes while it is read is read again.
  const TlsFilesSeen seen = TlsFilesSeen::look(options);
  DS_ASSIGN(SslContextPtr context, load_tls_files(role, options));
  return std::shared_ptr<Tls>(std::make_shared<OpenSslTls>(role, std::move(options), seen, std::move(context)));
}

/// The first option that a client without a CA has been given.
const char* client_option(const TlsOptions& options) {
  if (!options.cert.empty()) return "--tls-cert";
  if (!options.key.empty()) return "--tls-key";
  if (!options.name.empty()) return "--tls-name";
  return options.allow.empty() ? "who dials" : "--tls-allow";
}

}  // namespace

Result<std::shared_ptr<Tls>> Tls::server(TlsOptions options) {
  if (!options.allow.empty() && options.ca.empty()) {
    return Error(Errc::invalid_argument,
                 "TLS: --tls-allow needs --tls-ca, which says who has to sign the certificates with these names");
  }
  if (options.cert.empty()) {
    return Error(Errc::invalid_argument, "TLS: who is dialled needs a certificate (--tls-cert, --tls-key)");
  }
  return make(TlsRole::server, std::move(options));
}

Result<std::shared_ptr<Tls>> Tls::client(TlsOptions options) {
  if (options.ca.empty()) {
    return Error(Errc::invalid_argument, std::string("TLS: ") + client_option(options) +
                                             " needs --tls-ca, which says who has to sign the other's certificate");
  }
  return make(TlsRole::client, std::move(options));
}

Result<std::shared_ptr<Tls>> Tls::server_if_wanted(const TlsOptions& options) {
  if (!options.wanted()) return std::shared_ptr<Tls>();
  return server(options);
}

Result<std::shared_ptr<Tls>> Tls::client_if_wanted(const TlsOptions& options) {
  if (!options.wanted()) return std::shared_ptr<Tls>();
  return client(options);
}

std::string why_no_kernel_tls() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return Error::from_errno("socket", errno).message();
  constexpr char kName[] = "tls";
  // Of a socket that is not connected the kernel says so only if it knows the protocol.
  if (::setsockopt(fd.get(), SOL_TCP, TCP_ULP, kName, sizeof kName) == 0 || errno == ENOTCONN) return {};
  return errno == ENOENT ? "the kernel has no module tls" : Error::from_errno("TCP_ULP", errno).message();
}

}  // namespace deltasync::net
