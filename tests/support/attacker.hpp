// Somebody on the path between two ends on loopback: sees every chunk, and passes on what it likes.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "net/blocking.hpp"
#include "net/listener.hpp"

namespace deltasync::test {

enum class Way { to_server, to_client };

class Attacker {
 public:
  using Bytes = std::vector<std::byte>;
  /// What goes on in place of a chunk, the nth of its connection in this direction; nothing cuts the connection. Called
  /// by several threads.
  using Deed = std::function<std::optional<std::vector<Bytes>>(Way way, std::size_t nth, Bytes chunk)>;

  Attacker(std::uint16_t server, Deed deed)
      : server_(server), deed_(std::move(deed)), listener_(*net::Listener::bind({"127.0.0.1", 0}, false)) {
    acceptor_ = std::jthread([this](const std::stop_token& stop) { accept_all(stop); });
  }
  ~Attacker() {
    acceptor_.request_stop();
    acceptor_.join();
    for (auto& path : paths_) path.request_stop();
  }

  std::uint16_t port() const { return listener_.port(); }
  static Deed honest() {
    return [](Way, std::size_t, Bytes chunk) { return std::optional(std::vector<Bytes>{std::move(chunk)}); };
  }

 private:
  void accept_all(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      auto client = listener_.accept(CallContext(Deadline::after(std::chrono::seconds(60)), stop));
      if (!client) continue;
      auto server =
          net::connect_tcp("127.0.0.1", server_, CallContext(Deadline::after(std::chrono::seconds(60)), stop));
      if (!server) continue;
      paths_.emplace_back([this, c = std::move(*client), s = std::move(*server)](const std::stop_token& ending) {
        carry(c.get(), s.get(), ending);
      });
    }
  }

  void carry(int client, int server, const std::stop_token& stop) {
    std::size_t nth[2] = {0, 0};
    const int from[] = {client, server};
    const int to[] = {server, client};
    bool open[] = {true, true};
    while ((open[0] || open[1]) && !stop.stop_requested()) {
      pollfd look[] = {{open[0] ? client : -1, POLLIN, 0}, {open[1] ? server : -1, POLLIN, 0}};
      if (::poll(look, 2, 20) <= 0) continue;
      for (int i = 0; i < 2; ++i) {
        if (look[i].revents == 0) continue;
        Bytes chunk(16384);
        const ssize_t n = ::recv(from[i], chunk.data(), chunk.size(), 0);
        if (n < 0 && errno == EAGAIN) continue;
        if (n <= 0) {
          open[i] = false;
          ::shutdown(to[i], SHUT_WR);
          continue;
        }
        chunk.resize(static_cast<std::size_t>(n));
        const auto instead = deed_(i == 0 ? Way::to_server : Way::to_client, nth[i]++, std::move(chunk));
        if (!instead) return;
        for (const Bytes& bytes : *instead) {
          if (!send_all(to[i], bytes, stop)) return;
        }
      }
    }
  }

  static bool send_all(int fd, const Bytes& bytes, const std::stop_token& stop) {
    for (std::size_t at = 0; at < bytes.size() && !stop.stop_requested();) {
      const ssize_t n = ::send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (n > 0) {
        at += static_cast<std::size_t>(n);
        continue;
      }
      if (errno != EAGAIN) return false;
      pollfd look{fd, POLLOUT, 0};
      ::poll(&look, 1, 20);
    }
    return true;
  }

  const std::uint16_t server_;
  const Deed deed_;
  net::Listener listener_;         // used by acceptor_
  std::list<std::jthread> paths_;  // used by acceptor_, and by the destructor after it
  std::jthread acceptor_;
};

}  // namespace deltasync::test
