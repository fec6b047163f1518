// A port of loopback for processes that are started again at the same place.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/fd.hpp"

namespace deltasync::test {

/// Nobody else gets this port for as long as this object lives: it is bound, and not listened on. Connections to it are
/// refused until a server listens there, which may do so as often as it likes (with SO_REUSEADDR, as agents
/// have it). A port that was only seen to be free is another process's a moment later.
class HeldPort {
 public:
  HeldPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const raw = reinterpret_cast<sockaddr*>(&address);
    if (::setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 || ::bind(fd_.get(), raw, size) != 0 ||
        ::getsockname(fd_.get(), raw, &size) != 0) {
      std::perror("holding a port");
      std::abort();
    }
    number_ = ntohs(address.sin_port);
  }

  std::uint16_t number() const noexcept { return number_; }
  std::string endpoint() const { return "127.0.0.1:" + std::to_string(number_); }

 private:
  UniqueFd fd_;
  std::uint16_t number_ = 0;
};

}  // namespace deltasync::test
