#include "bench/transfers.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "bench/bench.hpp"
#include "delta/kernels.hpp"
#include "net/blocking.hpp"

namespace deltasync::bench {
namespace {

constexpr std::uint64_t kSendBytes = 1u << 20;  ///< in one call, as the next ones
constexpr std::uint64_t kReceiveBytes = 4u << 20;
constexpr std::uint64_t kDigestedBytes = 256u << 10;
constexpr int kCannot = 77;  ///< how a sender ends that cannot send so

/// One range of the file; in the forked child. Each returns what it has sent, or −1.
ssize_t send_file(int socket, int file, std::uint64_t at, std::uint64_t bytes) {
  auto offset = static_cast<off_t>(at);
  return ::sendfile(socket, file, &offset, static_cast<std::size_t>(std::min<std::uint64_t>(bytes, 16u << 20)));
}
ssize_t send_mapped(int socket, const std::byte* from, std::uint64_t bytes, int flags) {
  return ::send(socket, from, static_cast<std::size_t>(std::min(bytes, kSendBytes)), MSG_NOSIGNAL | flags);
}
ssize_t send_spliced(int socket, const std::array<UniqueFd, 2>& pipe, int file, std::uint64_t at, std::uint64_t bytes) {
  auto offset = static_cast<off_t>(at);
  const ssize_t in = ::splice(file, &offset, pipe[1].get(), nullptr,
                              static_cast<std::size_t>(std::min(bytes, kSendBytes)), SPLICE_F_MOVE);
  for (ssize_t out = 0; out < in;) {
    const ssize_t n =
        ::splice(pipe[0].get(), nullptr, socket, nullptr, static_cast<std::size_t>(in - out), SPLICE_F_MOVE);
    if (n <= 0) return -1;
    out += n;
  }
  return in;
}

/// Takes the notices that sent pages are free again. Too many of them, unread, end the sending with ENOBUFS.
void take_notices(int socket) {
  std::array<char, 256> control;
  for (;;) {
    msghdr message{};
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(socket, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
  }
}

class Sender {
 public:
  Sender(SendBy by, int socket, int file, std::uint64_t at, std::uint64_t bytes)
      : by_(by), socket_(socket), file_(file), at_(at), end_(at + bytes) {}
  ~Sender() {
    if (mapped_ != MAP_FAILED) ::munmap(mapped_, mapped_bytes_);
  }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  /// An exit status.
  int run() {
    if (!prepare()) return kCannot;
    for (std::uint64_t at = at_; at < end_;) {
      const ssize_t n = send(at, end_ - at);
      if (n > 0) at += static_cast<std::uint64_t>(n);
      const int error = n < 0 ? errno : 0;
      if (error == ENOBUFS && !notice_comes()) return kCannot;  // no page may be pinned, and none is
      if (by_ == SendBy::zerocopy) take_notices(socket_);
      if (n == 0 || (error != 0 && error != EINTR && error != ENOBUFS)) return 1;
    }
    char ack;
    return receive_ack(&ack) ? 0 : 1;
  }

 private:
  bool prepare() {
    if (by_ == SendBy::splice) {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) return false;
      pipe_ = {UniqueFd(ends[0]), UniqueFd(ends[1])};
      ::fcntl(ends[1], F_SETPIPE_SZ, static_cast<int>(kSendBytes));
    }
    const int on = 1;
    if (by_ == SendBy::zerocopy && ::setsockopt(socket_, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof(on)) != 0) return false;
    if (by_ != SendBy::send && by_ != SendBy::zerocopy) return true;
    const std::uint64_t page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    mapped_from_ = at_ / page * page;
    mapped_bytes_ = static_cast<std::size_t>(end_ - mapped_from_);
    mapped_ = ::mmap(nullptr, mapped_bytes_, PROT_READ, MAP_SHARED, file_, static_cast<off_t>(mapped_from_));
    return mapped_ != MAP_FAILED;
  }
  ssize_t send(std::uint64_t at, std::uint64_t bytes) {
    switch (by_) {
      case SendBy::sendfile: return send_file(socket_, file_, at, bytes);
      case SendBy::splice: return send_spliced(socket_, pipe_, file_, at, bytes);
      default:
        return send_mapped(socket_, static_cast<const std::byte*>(mapped_) + (at - mapped_from_), bytes,
                           by_ == SendBy::zerocopy ? MSG_ZEROCOPY : 0);
    }
  }
  bool notice_comes() const {
    pollfd waiting{socket_, 0, 0};  // POLLERR needs not be asked for
    return ::poll(&waiting, 1, 1000) > 0;
  }
  /// Notices make the socket readable, too.
  bool receive_ack(char* ack) {
    for (;;) {
      take_notices(socket_);
      const ssize_t n = ::recv(socket_, ack, 1, 0);
      if (n == 1) return true;
      if (n == 0 || (errno != EINTR && errno != EAGAIN)) return false;
    }
  }

  const SendBy by_;
  const int socket_;
  const int file_;
  const std::uint64_t at_;
  const std::uint64_t end_;
  std::array<UniqueFd, 2> pipe_;
  void* mapped_ = MAP_FAILED;
  std::uint64_t mapped_from_ = 0;
  std::size_t mapped_bytes_ = 0;
};

/// Keeps the optimiser from dropping them.
std::atomic<std::uint64_t> g_digests{0};

bool receive_all(int socket, std::span<std::byte> to, OnPiece on_piece) {
  const std::uint64_t most = on_piece == OnPiece::digest ? kDigestedBytes : kReceiveBytes;
  std::uint64_t digest = 0;
  for (std::size_t got = 0; got < to.size();) {
    const ssize_t n = ::recv(socket, to.data() + got, std::min<std::size_t>(to.size() - got, most), 0);
    if (n <= 0) return false;
    if (on_piece == OnPiece::digest) {
      digest += delta::active_kernels().digest_run(to.data() + got, static_cast<std::size_t>(n), got);
    }
    got += static_cast<std::size_t>(n);
  }
  g_digests += digest;
  return ::send(socket, "k", 1, MSG_NOSIGNAL) == 1;
}

}  // namespace

Result<double> transfer_once(int file, std::uint64_t offset, std::span<std::byte> to, unsigned streams, SendBy by,
                             OnPiece on_piece) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (!listener || ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), 64) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return Error::from_errno("listen on loopback", errno);
  }
  const std::uint64_t part = (to.size() / streams + 4095) / 4096 * 4096;
  const auto range = [&](unsigned i) {
    const std::uint64_t begin = std::min<std::uint64_t>(to.size(), i * part);
    return std::pair(begin, std::min<std::uint64_t>(to.size(), begin + part) - begin);
  };
  const pid_t child = ::fork();
  if (child < 0) return Error::from_errno("fork", errno);
  if (child == 0) {
    std::vector<std::thread> threads;
    std::atomic<int> status{0};
    for (unsigned i = 0; i < streams; ++i) {
      threads.emplace_back([&, i] {
        const UniqueFd s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        net::use_no_pacing(s.get());
        const auto [begin, bytes] = range(i);
        // The first byte says which range follows, so that accept order does not matter.
        const auto index = static_cast<std::uint8_t>(i);
        int ended = 1;
        if (::connect(s.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
            ::send(s.get(), &index, 1, MSG_NOSIGNAL) == 1) {
          ended = Sender(by, s.get(), file, offset + begin, bytes).run();
        }
        if (ended != 0) status = ended;
      });
    }
    for (auto& t : threads) t.join();
    ::_exit(status);
  }
  const Stopwatch watch;
  std::vector<std::thread> threads;
  std::atomic<bool> ok{true};
  for (unsigned i = 0; i < streams; ++i) {
    threads.emplace_back([&] {
      const UniqueFd s(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      std::uint8_t index = 0;
      if (!s || ::recv(s.get(), &index, 1, 0) != 1 || index >= streams) {
        ok = false;
        return;
      }
      const auto [begin, bytes] = range(index);
      if (!receive_all(s.get(), to.subspan(begin, bytes), on_piece)) ok = false;
    });
  }
  for (auto& t : threads) t.join();
  const double seconds = watch.seconds();
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kCannot)
    return Error(Errc::unsupported, "this kernel cannot send so");
  if (!ok || status != 0) return Error(Errc::io, "a plain transfer over loopback failed");
  return seconds;
}

}  // namespace deltasync::bench
