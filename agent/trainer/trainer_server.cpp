// The socket: accepting and ending. What is said on a connection is trainer_conversation's, what all share is
// trainer_state's.
#include "agent/trainer/trainer_server.hpp"

#include <sys/stat.h>

#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>

#include <map>
#include <utility>

#include "agent/trainer/trainer_conversation.hpp"
#include "agent/trainer/trainer_state.hpp"
#include "base/log_limit.hpp"
#include "net/coroutine.hpp"
#include "net/unix_listener.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;
using asio::awaitable;
using net::kAsTuple;

namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(50);  ///< after accept failed, e.g. for lack of descriptors

}  // namespace

struct TrainerServer::Impl : std::enable_shared_from_this<TrainerServer::Impl> {
  Impl(asio::io_context& io, TrainerHooks& hooks, TrainerServerOptions options)
      : state(std::make_shared<TrainerState>(io, hooks, std::move(options))), acceptor(state->strand) {}

  const std::shared_ptr<TrainerState> state;
  std::pair<dev_t, ino_t> socket_file{};  // constant once it listens

  // Used on the strand only.
  asio::local::stream_protocol::acceptor acceptor;
  std::map<std::uint64_t, net::MessageStream::Canceller> connections;
  std::uint64_t next_connection = 1;
  log::LineLimit refusal_lines;

  awaitable<void> converse(asio::generic::stream_protocol::socket socket) {
    const std::uint64_t connection = next_connection++;
    TrainerConversation conversation(*state, std::move(socket), connection);
    connections.emplace(connection, conversation.canceller());
    co_await conversation.run();
    connections.erase(connection);
  }

  awaitable<void> accept_all() {
    while (!state->stopped) {
      auto [ec, socket] = co_await acceptor.async_accept(kAsTuple);
      if (state->stopped) co_return;
      if (ec) {
        log::warn(refusal_lines, "trainer_accept_failed error=\"{}\"", ec.message());
        co_await state->change(Deadline::after(kAcceptPause));
        continue;
      }
      if (connections.size() >= state->options.connections_max) {
        log::warn(refusal_lines, "trainer_connections_full limit={}", state->options.connections_max);
        continue;
      }
      state->spawn([self = shared_from_this(),
                    s = asio::generic::stream_protocol::socket(std::move(socket))]() mutable -> awaitable<void> {
        co_await self->converse(std::move(s));
      });
    }
  }

  /// The file, if it is still ours. Any thread.
  void remove_socket_file() const {
    struct stat now {};
    if (::lstat(state->options.socket_path.c_str(), &now) == 0 && std::pair(now.st_dev, now.st_ino) == socket_file) {
      ::unlink(state->options.socket_path.c_str());
    }
  }

  void stop_on_strand() {
    if (state->stopped.exchange(true)) return;
    boost::system::error_code ignored;
    acceptor.close(ignored);
    for (const auto& [id, canceller] : connections) canceller.cancel();
    state->stop();
  }
};

TrainerServer::TrainerServer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

TrainerServer::~TrainerServer() {
  impl_->remove_socket_file();
  impl_->state->setup.join();
}

Result<std::unique_ptr<TrainerServer>> TrainerServer::listen(asio::io_context& io, TrainerHooks& hooks,
                                                             TrainerServerOptions options) {
  auto impl = std::make_shared<Impl>(io, hooks, std::move(options));
  DS_ASSIGN(UniqueFd fd, net::listen_unix(impl->state->options.socket_path));  // from here on there is a file to remove
  struct stat file {};
  if (::lstat(impl->state->options.socket_path.c_str(), &file) == 0) impl->socket_file = {file.st_dev, file.st_ino};
  boost::system::error_code ec;
  impl->acceptor.assign(asio::local::stream_protocol(), fd.get(), ec);
  if (ec) {
    impl->remove_socket_file();
    return Error(Errc::io, "listen on " + impl->state->options.socket_path + ": " + ec.message());
  }
  static_cast<void>(fd.release());  // the acceptor's now
  impl->state->spawn([impl]() -> awaitable<void> { co_await impl->accept_all(); });
  return std::unique_ptr<TrainerServer>(new TrainerServer(std::move(impl)));
}

void TrainerServer::version_served() {
  asio::post(impl_->state->strand, [state = impl_->state] { state->wake_all(); });
}

void TrainerServer::stop() {
  impl_->remove_socket_file();
  asio::post(impl_->state->strand, [impl = impl_] { impl->stop_on_strand(); });
}

std::vector<TrainerStatus> TrainerServer::status() const {
  return impl_->state->status();
}

const std::string& TrainerServer::socket_path() const noexcept {
  return impl_->state->options.socket_path;
}

}  // namespace deltasync::agent
