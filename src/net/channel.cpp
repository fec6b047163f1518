#include "net/channel.hpp"

#include <poll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace deltasync::net {
namespace {

class PlainChannel final : public Channel {
 public:
  PlainChannel(int fd, UniqueFd* file) : fd_(fd), file_(file) {}

  Result<Tried> handshake() override { return Tried::moved(0); }
  bool peer_may_be_plain() const override { return false; }

  Result<Tried> receive(std::span<const iovec> to) override {
    msghdr m{};
    m.msg_iov = const_cast<iovec*>(to.data());
    m.msg_iovlen = to.size();
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};  // the kernel closes what does not fit
    for (;;) {
      if (file_ != nullptr) {
        m.msg_control = control.data();
        m.msg_controllen = control.size();
      }
      const ssize_t n = ::recvmsg(fd_, &m, MSG_CMSG_CLOEXEC);
      if (n >= 0 && file_ != nullptr) take_files(m);
      if (n > 0) return Tried::moved(static_cast<std::size_t>(n));
      if (n == 0) return Tried{Tried::Came::ended};
      if (errno == EAGAIN) return Tried{Tried::Came::wants_read};
      if (errno != EINTR) return Error::from_errno("receive", errno);
    }
  }

  Result<Tried> send(std::span<const iovec> from) override {
    msghdr m{};
    m.msg_iov = const_cast<iovec*>(from.data());
    m.msg_iovlen = from.size();
    for (;;) {
      const ssize_t n = ::sendmsg(fd_, &m, MSG_NOSIGNAL);
      if (n >= 0) return Tried::moved(static_cast<std::size_t>(n));
      if (errno == EAGAIN) return Tried{Tried::Came::wants_write};
      if (errno != EINTR) return Error::from_errno("send", errno);
    }
  }

  Result<Tried> send_file(int file, off_t offset, std::size_t bytes) override {
    for (;;) {
      const ssize_t n = ::sendfile(fd_, file, &offset, bytes);
      if (n > 0) return Tried::moved(static_cast<std::size_t>(n));
      if (n == 0) return Error(Errc::io, "sendfile: the file ends early");
      if (errno == EAGAIN) return Tried{Tried::Came::wants_write};
      if (errno != EINTR) return Error::from_errno("sendfile", errno);
    }
  }

  bool has_input() const override { return poll_now(fd_, POLLIN) != 0; }
  void say_end() noexcept override {}

 private:
  /// There is room for more than one. Each takes the place of the one before.
  void take_files(msghdr& m) {
    for (cmsghdr* came = CMSG_FIRSTHDR(&m); came != nullptr; came = CMSG_NXTHDR(&m, came)) {
      if (came->cmsg_level != SOL_SOCKET || came->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t bytes = came->cmsg_len - CMSG_LEN(0);
      for (std::size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
        int file = -1;
        std::memcpy(&file, CMSG_DATA(came) + at, sizeof file);
        file_->reset(file);
      }
    }
  }

  const int fd_;
  UniqueFd* const file_;
};

}  // namespace

std::unique_ptr<Channel> plain_channel(int fd, UniqueFd* file) {
  return std::make_unique<PlainChannel>(fd, file);
}

ssize_t send_with_file(int socket, ByteSpan bytes, int file) noexcept {
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof file)> control{};
  msghdr m{};
  m.msg_iov = &piece;
  m.msg_iovlen = 1;
  m.msg_control = control.data();
  m.msg_controllen = control.size();
  cmsghdr* const along = CMSG_FIRSTHDR(&m);
  along->cmsg_level = SOL_SOCKET;
  along->cmsg_type = SCM_RIGHTS;
  along->cmsg_len = CMSG_LEN(sizeof file);
  std::memcpy(CMSG_DATA(along), &file, sizeof file);
  return ::sendmsg(socket, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Error speaks_tls_only() {
  return {Errc::unsupported, "this port speaks TLS only, and its peer began without: give the peer --tls-ca"};
}

short poll_now(int fd, short events) noexcept {
  pollfd look{fd, events, 0};
  while (::poll(&look, 1, 0) < 0 && errno == EINTR) {
  }
  return look.revents;
}

}  // namespace deltasync::net
