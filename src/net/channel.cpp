#include "net/channel.hpp"

#include <poll.h>
#include <sys/sendfile.h>
#include <sys/socket.h>

#include <cerrno>

namespace deltasync::net {
namespace {

class PlainChannel final : public Channel {
 public:
  explicit PlainChannel(int fd) : fd_(fd) {}

  Result<Tried> handshake() override { return Tried::moved(0); }
  bool peer_may_be_plain() const override { return false; }

  Result<Tried> receive(std::span<const iovec> to) override {
    msghdr m{};
    m.msg_iov = const_cast<iovec*>(to.data());
    m.msg_iovlen = to.size();
    for (;;) {
      const ssize_t n = ::recvmsg(fd_, &m, 0);
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
  const int fd_;
};

}  // namespace

std::unique_ptr<Channel> plain_channel(int fd) {
  return std::make_unique<PlainChannel>(fd);
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
