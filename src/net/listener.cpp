#include "net/listener.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <arpa/inet.h>

#include <cerrno>
#include <ctime>
#include <memory>

#include "net/blocking.hpp"

namespace deltasync::net {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};

std::string address_of(const sockaddr_storage& a) {
  char text[INET6_ADDRSTRLEN] = {};
  if (a.ss_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(a).sin_addr, text, sizeof text);
  } else if (a.ss_family == AF_INET6) {
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6&>(a).sin6_addr, text, sizeof text);
  }
  return text;
}

std::uint16_t port_of(const sockaddr_storage& a) {
  return ntohs(a.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(a).sin6_port
                                       : reinterpret_cast<const sockaddr_in&>(a).sin_port);
}

}  // namespace

Result<Listener> Listener::bind(const Endpoint& where, bool knows_peers) {
  const std::string what = "listen on " + to_string(where);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* found = nullptr;
  const int rc = ::getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &found);
  if (rc != 0) return Error(Errc::invalid_argument, what + ": " + ::gai_strerror(rc));
  const std::unique_ptr<addrinfo, FreeAddresses> list(found);
  UniqueFd fd(::socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, list->ai_protocol));
  if (!fd) return Error::from_errno(what, errno);
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), list->ai_addr, list->ai_addrlen) != 0) {
    if (errno == EADDRINUSE)
      return Error(Errc::already_exists, what + ": the port is taken: choose another, or 0 for a free one");
    return Error::from_errno(what, errno);
  }
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0) return Error::from_errno(what, errno);
  // By the address that was bound: a name may stand for anything.
  if (!knows_peers && !is_loopback(address_of(bound))) {
    return Error(Errc::unauthenticated,
                 what + ": a bind beyond loopback needs a token, or TLS that asks for certificates");
  }
  if (::listen(fd.get(), SOMAXCONN) != 0) return Error::from_errno(what, errno);
  return Listener(std::move(fd), port_of(bound));
}

Result<UniqueFd> Listener::accept(const CallContext& until) {
  const ShutDown wake(until.stop(), fd_.get());
  for (;;) {
    DS_TRY(until.check("waiting for a connection"));
    UniqueFd fd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      const int on = 1;
      ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      return fd;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (until.stop_requested()) continue;
    if (errno != EAGAIN) return Error::from_errno("accept", errno);
    pollfd look{fd_.get(), POLLIN, 0};
    const auto left = until.deadline().remaining();
    const timespec t{static_cast<std::time_t>(left.count() / 1'000'000'000),
                     static_cast<long>(left.count() % 1'000'000'000)};
    if (::ppoll(&look, 1, &t, nullptr) < 0 && errno != EINTR) return Error::from_errno("poll", errno);
  }
}

}  // namespace deltasync::net
