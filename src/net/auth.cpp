#include "net/auth.hpp"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "base/fd.hpp"
#include "base/user.hpp"

namespace deltasync::net {
namespace {

void fill_random(void* to, std::size_t bytes) {
  auto* at = static_cast<unsigned char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::getrandom(at, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) detail::die_on_wrong_result("getrandom", "the system has no random source");
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

/// Collects what a proof covers.
class Message {
 public:
  explicit Message(std::string_view domain) : bytes_(domain.begin(), domain.end()) {}
  Message& add(const Nonce& nonce) {
    bytes_.insert(bytes_.end(), nonce.begin(), nonce.end());
    return *this;
  }
  Message& add(std::uint8_t byte) {
    bytes_.push_back(byte);
    return *this;
  }
  Proof sign(std::string_view token) const {
    Proof proof{};
    unsigned int size = 0;
    if (HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()), bytes_.data(), bytes_.size(), proof.data(),
             &size) == nullptr ||
        size != proof.size()) {
      detail::die_on_wrong_result("HMAC", "OpenSSL has no SHA-256");
    }
    return proof;
  }

 private:
  std::vector<unsigned char> bytes_;
};

bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

}  // namespace

Nonce make_nonce() {
  Nonce nonce;
  fill_random(nonce.data(), nonce.size());
  return nonce;
}

std::uint64_t make_random_id() {
  std::uint64_t id = 0;
  while (id == 0) fill_random(&id, sizeof id);
  return id;
}

Proof client_proof(std::string_view token, const Nonce& server_nonce, const Nonce& client_nonce, wire::Role role) {
  if (token.empty()) return Proof{};
  return Message("deltasync-client-1")
      .add(server_nonce)
      .add(client_nonce)
      .add(static_cast<std::uint8_t>(role))
      .sign(token);
}

Proof server_proof(std::string_view token, const Nonce& client_nonce, const Nonce& server_nonce) {
  if (token.empty()) return Proof{};
  return Message("deltasync-server-1").add(client_nonce).add(server_nonce).sign(token);
}

bool equal_proofs(const Proof& a, const Proof& b) noexcept {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Status check_token(std::string_view token) {
  if (token.size() >= kTokenBytesMin) return {};
  return Error(Errc::invalid_argument, "the token has " + std::to_string(token.size()) + " bytes, at least " +
                                           std::to_string(kTokenBytesMin) +
                                           " are needed; `openssl rand -hex 32` makes a good one");
}

Result<std::string> read_token_file(const std::filesystem::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return Error::from_errno("token file " + path.string(), errno);
  return read_token(fd.get(), path);
}

Result<std::string> read_token(int fd, const std::filesystem::path& path) {
  const std::string what = "token file " + path.string();
  struct stat info {};
  if (::fstat(fd, &info) != 0) return Error::from_errno(what, errno);
  if (!S_ISREG(info.st_mode)) return Error(Errc::invalid_argument, what + ": not a regular file");
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return Error(Errc::permission, what + ": belongs to " + describe_user(info.st_uid));
  }
  // Of root it is the system's: a Kubernetes secret for one who is not root is root's, and read through a group.
  const mode_t strangers = info.st_uid != ::geteuid() ? S_IWGRP | S_IXGRP | S_IRWXO : S_IRWXG | S_IRWXO;
  if ((info.st_mode & strangers) != 0) {
    return Error(Errc::permission, what + ": group or others may access it; make it mode 0600");
  }
  std::string text(kTokenFileBytesMax + 1, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t n = ::read(fd, text.data() + size, text.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Error::from_errno(what, errno);
    if (n == 0) break;
    size += static_cast<std::size_t>(n);
  }
  if (size > kTokenFileBytesMax) {
    return Error(Errc::invalid_argument, what + ": longer than " + std::to_string(kTokenFileBytesMax) + " bytes");
  }
  std::string_view token(text.data(), size);
  while (!token.empty() && is_space(token.front())) token.remove_prefix(1);
  while (!token.empty() && is_space(token.back())) token.remove_suffix(1);
  DS_TRY(check_token(token).with_context(what));
  return std::string(token);
}

}  // namespace deltasync::net
