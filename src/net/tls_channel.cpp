#include "net/tls_channel.hpp"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "net/tls.hpp"
#include "net/tls_words.hpp"

namespace deltasync::net {
namespace {

constexpr std::size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
/// Of a file, read at a time where the kernel does not encrypt: they stay in a core's own cache until they are
/// encrypted.
constexpr std::size_t kFilePieceBytes = 64u << 10;
constexpr std::size_t kSendBytesMax = 1u << 20;  ///< of one try, so that deadlines and revocations are seen
constexpr unsigned char kHandshakeRecord = 22;   ///< the first byte of what a TLS peer says
constexpr unsigned char kAlertRecord = 21;

// ---- a socket that raises no SIGPIPE -----------------------------------------------------------------------------

/// OpenSSL's own sockets are written by write(2), which would end a process that has not made it ignored: a library
/// must not ask that of an engine. The kernel's own TLS is told by control messages of OpenSSL's; only servers use it,
/// and the agent ignores the signal.
int write_quietly(BIO* bio, const char* from, int bytes) {
  if (BIO_get_ktls_send(bio)) return ::BIO_meth_get_write(::BIO_s_socket())(bio, from, bytes);
  int fd = -1;
  BIO_get_fd(bio, &fd);
  BIO_clear_retry_flags(bio);
  errno = 0;
  const auto n = static_cast<int>(::send(fd, from, static_cast<std::size_t>(bytes), MSG_NOSIGNAL));
  if (n <= 0 && ::BIO_sock_should_retry(n) != 0) BIO_set_retry_write(bio);
  return n;
}

BIO_METHOD* make_quiet_socket() {
  const BIO_METHOD* const socket = ::BIO_s_socket();
  BIO_METHOD* const quiet = ::BIO_meth_new(BIO_TYPE_SOCKET, "socket without SIGPIPE");
  if (quiet == nullptr) return nullptr;
  ::BIO_meth_set_write(quiet, write_quietly);
  ::BIO_meth_set_read(quiet, ::BIO_meth_get_read(socket));
  ::BIO_meth_set_puts(quiet, ::BIO_meth_get_puts(socket));
  ::BIO_meth_set_ctrl(quiet, ::BIO_meth_get_ctrl(socket));
  ::BIO_meth_set_create(quiet, ::BIO_meth_get_create(socket));
  ::BIO_meth_set_destroy(quiet, ::BIO_meth_get_destroy(socket));
  return quiet;
}

const BIO_METHOD* quiet_socket() {
  static const BIO_METHOD* const method = make_quiet_socket();
  return method;
}

// ---- the channel -------------------------------------------------------------------------------------------------

bool is_address(const std::string& host) {
  unsigned char bytes[sizeof(in6_addr)];
  return ::inet_pton(AF_INET, host.c_str(), bytes) == 1 || ::inet_pton(AF_INET6, host.c_str(), bytes) == 1;
}

/// Of this process, said once.
void log_kernel_tls(bool on) {
  static const bool said = [on] {
    if (on) {
      log::info("tls_kernel on=1");
    } else {
      const std::string why = why_no_kernel_tls();
      log::info("tls_kernel on=0 reason=\"{}\"", why.empty() ? "not for this cipher" : why);
    }
    return true;
  }();
  static_cast<void>(said);
}

class TlsChannel final : public Channel {
 public:
  TlsChannel(TlsSide side, int fd, std::string peer)
      : side_(std::move(side)),
        fd_(fd),
        expected_(side_.options->name.empty() ? peer : side_.options->name),
        peer_(std::move(peer)) {}

  Status open(SSL_CTX* context) {
    ssl_.reset(::SSL_new(context));
    BIO* const bio = quiet_socket() != nullptr ? ::BIO_new(quiet_socket()) : nullptr;
    if (!ssl_ || bio == nullptr) {
      ::BIO_free(bio);
      return Error(Errc::no_space, "TLS: " + take_ssl_reason());
    }
    BIO_set_fd(bio, fd_, BIO_NOCLOSE);
    ::SSL_set_bio(ssl_.get(), bio, bio);
    SSL_set_app_data(ssl_.get(), this);
    if (side_.role == TlsRole::server) {
      ::SSL_set_accept_state(ssl_.get());
      if (side_.asks()) {
        ::SSL_set_verify(ssl_.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, verify);
      }
      return {};
    }
    ::SSL_set_connect_state(ssl_.get());
    ::SSL_set_verify(ssl_.get(), SSL_VERIFY_PEER, verify);
    return expect_name();
  }

  Result<Tried> handshake() override {
    if (done_) return Tried::moved(0);
    if (side_.role == TlsRole::server && !heard_) {
      DS_ASSIGN(const std::optional<Tried> first, look_at_first_byte());
      if (first) return *first;
    }
    ::ERR_clear_error();
    errno = 0;
    const int rc = ::SSL_do_handshake(ssl_.get());
    if (rc == 1) {
      done_ = true;
      if (side_.role == TlsRole::server && side_.asks() && side_.end) {
        known_.emplace(side_.peers, ssl_.get(), peer_, side_.end);
      }
      if (side_.role == TlsRole::server && side_.options->kernel) log_kernel_tls(kernel_sends());
      return Tried::moved(0);
    }
    return come_to(rc);
  }

  bool peer_may_be_plain() const override { return side_.role == TlsRole::server && !heard_; }

  Result<Tried> receive(std::span<const iovec> to) override {
    std::size_t moved = 0;
    for (const iovec& piece : to) {
      auto* at = static_cast<std::byte*>(piece.iov_base);
      for (std::size_t left = piece.iov_len; left > 0;) {
        if (failed_) return *failed_;
        ::ERR_clear_error();
        errno = 0;
        std::size_t n = 0;
        const int rc = ::SSL_read_ex(ssl_.get(), at, left, &n);
        if (rc == 1) {
          at += n;
          left -= n;
          moved += n;
          continue;
        }
        auto tried = come_to(rc);
        // What has come is the caller's; the error is kept for its next try.
        if (moved > 0) return Tried::moved(moved);
        return tried;
      }
    }
    return Tried::moved(moved);
  }

  Result<Tried> send(std::span<const iovec> from) override {
    std::size_t moved = 0;
    std::size_t at = 0;      // in from
    std::size_t offset = 0;  // in from[at]
    while (moved < kSendBytesMax) {
      while (at < from.size() && offset == from[at].iov_len) {
        ++at;
        offset = 0;
      }
      if (at == from.size()) break;
      const ByteSpanOf record = next_record(from.subspan(at), offset);
      auto tried = write(record.data, record.bytes);
      if (!tried || tried->came != Tried::Came::moved) {
        if (moved > 0) break;
        return tried;
      }
      moved += tried->bytes;
      for (std::size_t left = tried->bytes; left > 0;) {
        const std::size_t taken = std::min(left, from[at].iov_len - offset);
        offset += taken;
        left -= taken;
        if (offset == from[at].iov_len && left > 0) {
          ++at;
          offset = 0;
        }
      }
    }
    return Tried::moved(moved);
  }

  Result<Tried> send_file(int file, off_t offset, std::size_t bytes) override {
    if (kernel_sends()) return send_file_in_kernel(file, offset, bytes);
    if (file_from_ == file_end_) {
      file_piece_.resize(kFilePieceBytes);
      const ssize_t n = ::pread(file, file_piece_.data(), std::min(bytes, file_piece_.size()), offset);
      if (n < 0 && errno == EINTR) return Tried{Tried::Came::wants_write};
      if (n < 0) return Error::from_errno("read what is to be sent", errno);
      if (n == 0) return Error(Errc::io, "read what is to be sent: the file ends early");
      file_from_ = 0;
      file_end_ = static_cast<std::size_t>(n);
    }
    const std::size_t wanted = std::min(bytes, file_end_ - file_from_);
    const iovec piece{file_piece_.data() + file_from_, wanted};
    auto tried = send({&piece, 1});
    if (tried && tried->came == Tried::Came::moved) file_from_ += tried->bytes;
    return tried;
  }

  bool has_input() const override { return ::SSL_has_pending(ssl_.get()) == 1 || poll_now(fd_, POLLIN) != 0; }

  void say_end() noexcept override {
    if (!done_ || failed_ || said_end_) return;
    said_end_ = true;
    ::ERR_clear_error();
    ::SSL_shutdown(ssl_.get());
    ::ERR_clear_error();
  }

 private:
  struct ByteSpanOf {
    const void* data;
    std::size_t bytes;
  };

  /// What a record is made of: a run of one piece, or, where that is short, what follows it too, so that a message's
  /// header and its payload leave as one. For the same bytes it comes to the same record, as a repeated try must.
  ByteSpanOf next_record(std::span<const iovec> from, std::size_t offset) {
    const auto* const first = static_cast<const std::byte*>(from[0].iov_base) + offset;
    const std::size_t rest = from[0].iov_len - offset;
    if (rest >= kRecordBytes || from.size() == 1) return {first, std::min(rest, kRecordBytes)};
    gathered_.assign(first, first + rest);
    for (const iovec& piece : from.subspan(1)) {
      const auto* const more = static_cast<const std::byte*>(piece.iov_base);
      const std::size_t taken = std::min(piece.iov_len, kRecordBytes - gathered_.size());
      gathered_.insert(gathered_.end(), more, more + taken);
    }
    return {gathered_.data(), gathered_.size()};
  }

  Result<Tried> write(const void* from, std::size_t bytes) {
    if (failed_) return *failed_;
    ::ERR_clear_error();
    errno = 0;
    std::size_t n = 0;
    const int rc = ::SSL_write_ex(ssl_.get(), from, bytes, &n);
    if (rc == 1) return Tried::moved(n);
    const int why = ::SSL_get_error(ssl_.get(), rc);
    if (why != SSL_ERROR_SYSCALL) return come_to(rc);
    const int system_error = errno;
    hear_last_word();
    return fail(system_failure(system_error));
  }

  /// A peer that closed may have said why, in an alert that is still to be read. What OpenSSL says of the last call is
  /// then of this one.
  void hear_last_word() {
    std::byte ignored{};
    std::size_t n = 0;
    const int rc = ::SSL_read_ex(ssl_.get(), &ignored, 1, &n);
    if (rc != 1 && ::SSL_get_error(ssl_.get(), rc) == SSL_ERROR_SSL) static_cast<void>(come_to(rc));
  }

  static Error system_failure(int number) { return Error::from_errno("TLS", number != 0 ? number : ECONNRESET); }

  bool kernel_sends() const { return done_ && BIO_get_ktls_send(::SSL_get_wbio(ssl_.get())); }

  Result<Tried> send_file_in_kernel(int file, off_t offset, std::size_t bytes) {
    if (failed_) return *failed_;
    ::ERR_clear_error();
    errno = 0;
    const ossl_ssize_t n = ::SSL_sendfile(ssl_.get(), file, offset, bytes, 0);
    if (n > 0) return Tried::moved(static_cast<std::size_t>(n));
    if (n == 0) return Error(Errc::io, "sendfile: the file ends early");
    return come_to(static_cast<int>(n));
  }

  /// What a call that did not succeed came to.
  Result<Tried> come_to(int rc) {
    const int system_error = errno;
    switch (::SSL_get_error(ssl_.get(), rc)) {
      case SSL_ERROR_WANT_READ: return Tried{Tried::Came::wants_read};
      case SSL_ERROR_WANT_WRITE: return Tried{Tried::Came::wants_write};
      case SSL_ERROR_ZERO_RETURN: return Tried{Tried::Came::ended};
      case SSL_ERROR_SYSCALL: return fail(system_failure(system_error));
      default: break;
    }
    const unsigned long code = ::ERR_peek_error();
    ::ERR_clear_error();
    if (side_.role == TlsRole::client && !done_ && ERR_GET_REASON(code) == SSL_R_WRONG_VERSION_NUMBER) {
      return fail(speaks_no_tls());
    }
    if (!refusal_.empty()) return fail(Error(Errc::unauthenticated, refusal_));
    return fail(tls_error(code, side_.role));
  }

  Error fail(Error error) {
    if (!failed_) failed_.emplace(std::move(error).with_context("TLS with " + peer_));
    return *failed_;
  }

  /// A client that speaks no TLS is told from one that does by the first byte that it sends. Nothing if it is TLS's.
  Result<std::optional<Tried>> look_at_first_byte() {
    unsigned char byte = 0;
    const ssize_t n = ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return std::optional(Tried{Tried::Came::wants_read});
    if (n < 0) return fail(Error::from_errno("receive", errno));
    if (n == 0) return fail(Error(Errc::connection, "the peer closed the connection before the handshake"));
    if (byte == kHandshakeRecord || byte == kAlertRecord) {
      heard_ = true;
      return std::optional<Tried>();
    }
    return fail(speaks_tls_only());
  }

  Status expect_name() {
    const bool address = is_address(expected_);
    X509_VERIFY_PARAM* const param = ::SSL_get0_param(ssl_.get());
    ::X509_VERIFY_PARAM_set_hostflags(param,
                                      X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
    const int set = address ? ::X509_VERIFY_PARAM_set1_ip_asc(param, expected_.c_str())
                            : ::X509_VERIFY_PARAM_set1_host(param, expected_.c_str(), 0);
    if (set != 1 || (!address && SSL_set_tlsext_host_name(ssl_.get(), expected_.c_str()) != 1)) {
      return Error(Errc::invalid_argument, "TLS: \"" + expected_ + "\" cannot be the name of a certificate");
    }
    return {};
  }

  static int verify(int preverified, X509_STORE_CTX* store) {
    const auto* const ssl =
        static_cast<const SSL*>(::X509_STORE_CTX_get_ex_data(store, ::SSL_get_ex_data_X509_STORE_CTX_idx()));
    auto* const self = static_cast<TlsChannel*>(SSL_get_app_data(ssl));
    return self->verify_one(preverified == 1, store) ? 1 : 0;
  }

  bool verify_one(bool good, X509_STORE_CTX* store) {
    X509* const certificate = ::X509_STORE_CTX_get_current_cert(store);
    const int depth = ::X509_STORE_CTX_get_error_depth(store);
    const auto& allow = side_.options->allow;
    if (good && depth == 0 && side_.by_name() && !allow.empty() &&
        std::none_of(allow.begin(), allow.end(),
                     [&](const std::string& name) { return has_name(certificate, name); })) {
      ::X509_STORE_CTX_set_error(store, X509_V_ERR_APPLICATION_VERIFICATION);
      good = false;
    }
    if (!good && refusal_.empty()) {
      refusal_ = tls_refusal(::X509_STORE_CTX_get_error(store), certificate, depth, *side_.options, expected_);
    }
    return good;
  }

  const TlsSide side_;
  const int fd_;
  const std::string expected_;  ///< whom the peer's certificate must be for
  const std::string peer_;
  std::unique_ptr<SSL, FreeSsl> ssl_;
  std::optional<TlsPeers::Peer> known_;  ///< from the handshake's end, where its certificate was asked for
  bool heard_ = false;                   ///< the first byte of the peer's
  bool done_ = false;
  bool said_end_ = false;
  std::string refusal_;          ///< of the peer's certificate
  std::optional<Error> failed_;  ///< nothing goes any more
  std::vector<std::byte> gathered_;
  std::vector<std::byte> file_piece_;  ///< read, and as far as [file_from_, file_end_) not yet sent
  std::size_t file_from_ = 0;
  std::size_t file_end_ = 0;
};

}  // namespace

Result<std::unique_ptr<Channel>> make_tls_channel(SSL_CTX* context, TlsSide side, int fd, std::string peer) {
  auto channel = std::make_unique<TlsChannel>(std::move(side), fd, std::move(peer));
  DS_TRY(channel->open(context));
  return std::unique_ptr<Channel>(std::move(channel));
}

}  // namespace deltasync::net
