#include "agent/serve/pull_server.hpp"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>

#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "agent/serve/admission.hpp"
#include "agent/serve/pull_conversation.hpp"
#include "base/log_limit.hpp"
#include "net/acceptor.hpp"
#include "net/auth.hpp"
#include "net/coroutine.hpp"
#include "net/local_token.hpp"
#include "net/log_exception.hpp"
#include "net/tls.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using net::kAsTuple;

namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(50);  ///< after accept failed, e.g. for lack of descriptors

}  // namespace

struct PullServer::Impl : std::enable_shared_from_this<PullServer::Impl> {
  Impl(asio::io_context& i, AgentCore& core, PullServerOptions options, tcp::acceptor a,
       std::optional<net::LocalToken> made)
      : io(i),
        context{core, std::move(options), false, {}, {}},
        acceptor(std::move(a)),
        pause(acceptor.get_executor()),
        local_token(std::move(made)),
        admission(context.options.limits.admission) {
    error_code ignored;
    port = acceptor.local_endpoint(ignored).port();
    context.note = [this](std::uint64_t id, const std::function<void(PeerStatus&)>& change) {
      const std::lock_guard lock(mutex);
      if (const auto found = peers.find(id); found != peers.end()) change(found->second.status);
    };
    if (context.options.ucx) context.ucx_setup = std::make_unique<net::WorkThread>("ucx-setup");
    context.settle = [this](std::uint64_t id, wire::Role role) { return settle(id, role); };
  }

  struct Peer {
    PeerStatus status;
    net::MessageStream::Canceller canceller;
  };

  asio::io_context& io;
  PullContext context;
  tcp::acceptor acceptor;  // used on its strand
  asio::steady_timer pause;
  std::uint16_t port = 0;

  mutable std::mutex mutex;
  std::optional<net::LocalToken> local_token;  // protected by mutex; gone before the address is free again
  std::map<std::uint64_t, Peer> peers;         // protected by mutex
  std::uint64_t next_connection = 1;           // protected by mutex
  Admission admission;                         // protected by mutex
  log::LineLimit accept_lines{};

  asio::awaitable<void> accept_loop() {
    while (!context.stopping) {
      auto [ec, socket] = co_await acceptor.async_accept(asio::make_strand(io), kAsTuple);
      if (context.stopping || ec == asio::error::operation_aborted) co_return;
      if (ec) {
        log::warn(accept_lines, "accept_failed error=\"{}\"", ec.message());
        pause.expires_after(kAcceptPause);
        co_await pause.async_wait(kAsTuple);
        continue;
      }
      admit(std::move(socket));
    }
  }

  void admit(tcp::socket socket) {
    error_code gone;
    const auto from = socket.remote_endpoint(gone);
    if (gone) return;  // it has left already
    Metrics::add(context.core.metrics().connections, 1);
    net::MessageStream stream{net::MessageStream::Socket(std::move(socket))};
    const std::uint64_t id = enter(stream, from.address());
    stream.tune_tcp(context.options.limits.keepalive_idle_s);
    const auto executor = stream.executor();
    auto conversation = std::make_unique<PullConversation>(context, std::move(stream), id);
    asio::co_spawn(executor, run(std::move(conversation)),
                   [self = shared_from_this(), id](const std::exception_ptr& thrown) {
                     net::log_exception("conversation")(thrown);
                     self->forget(id);
                   });
  }

  /// The number of a new connection. Others may have to leave for it.
  std::uint64_t enter(const net::MessageStream& stream, const asio::ip::address& from) {
    const std::lock_guard lock(mutex);
    const std::uint64_t id = next_connection++;
    Peer peer;
    peer.status.connection = id;
    peer.status.address = stream.peer_name();
    peer.status.connected_at = std::chrono::steady_clock::now();
    peer.canceller = stream.canceller();
    peers.emplace(id, std::move(peer));
    if (const auto leaves = admission.come(id, from)) {
      Metrics::add(context.core.metrics().connections_evicted, 1);
      if (const auto found = peers.find(*leaves); found != peers.end()) found->second.canceller.close();
    }
    return id;
  }

  Status settle(std::uint64_t id, wire::Role role) {
    const bool data = role == wire::Role::data;
    const auto kind = data ? Admission::Kind::data : Admission::Kind::receiver;
    const std::lock_guard lock(mutex);
    switch (admission.settle(id, kind)) {
      case Admission::Verdict::admitted: return {};
      case Admission::Verdict::left: return Error(Errc::aborted, "others came before it had authenticated");
      case Admission::Verdict::busy: break;
    }
    Metrics::add(context.core.metrics().connections_refused, 1);
    return Error(Errc::connection, "busy: " + std::to_string(admission.count(kind)) +
                                       (data ? " data connections of at most " : " connections of at most ") +
                                       std::to_string(admission.most(kind)) + "; try another agent or a relay");
  }

  static asio::awaitable<void> run(std::unique_ptr<PullConversation> conversation) { co_await conversation->run(); }

  void forget(std::uint64_t id) {
    context.core.open_plans().connection_closed(id);
    context.receivers.left(id);
    context.children.left(id);
    const std::lock_guard lock(mutex);
    peers.erase(id);
    admission.leave(id);
  }

  void stop() {
    context.stopping = true;
    {
      const std::lock_guard lock(mutex);
      local_token.reset();
    }
    asio::post(acceptor.get_executor(), [self = shared_from_this()] {
      error_code ignored;
      self->acceptor.close(ignored);
      self->pause.cancel();
    });
    const std::lock_guard lock(mutex);
    for (const auto& entry : peers) entry.second.canceller.cancel();
  }
};

Result<std::unique_ptr<PullServer>> PullServer::listen(asio::io_context& io, AgentCore& core,
                                                       PullServerOptions options) {
  DS_ASSIGN(tcp::acceptor acceptor, net::bind_acceptor(io, options.listen));
  error_code ec;
  // By the address that was bound: a name may stand for anything.
  const bool asks = !options.token.empty() || (options.tls && options.tls->asks_for_certificates());
  if (!asks && !acceptor.local_endpoint(ec).address().is_loopback()) {
    return Error(Errc::unauthenticated, "listen on " + net::to_string(options.listen) +
                                            ": a bind beyond loopback needs a token (--token-file), or TLS that asks "
                                            "for certificates (--tls-ca)");
  }
  std::optional<net::LocalToken> made;
  if (!options.token.empty()) {
    DS_TRY(net::check_token(options.token));
  } else if (options.make_token) {
    options.token = net::make_token();
    const tcp::endpoint bound = acceptor.local_endpoint(ec);
    DS_ASSIGN(net::LocalToken published,
              net::LocalToken::publish({bound.address().to_string(), bound.port()}, options.token));
    log::info("token_made file={}", published.file().string());
    made.emplace(std::move(published));
  }
  auto impl = std::make_shared<Impl>(io, core, std::move(options), std::move(acceptor), std::move(made));
  asio::co_spawn(
      impl->acceptor.get_executor(), [impl]() { return impl->accept_loop(); }, net::log_exception("pull_server"));
  return std::unique_ptr<PullServer>(new PullServer(std::move(impl)));
}

PullServer::PullServer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

PullServer::~PullServer() {
  impl_->stop();
}

std::uint16_t PullServer::port() const noexcept {
  return impl_->port;
}

void PullServer::stop() {
  impl_->stop();
}

std::size_t PullServer::connections() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->peers.size();
}

std::vector<ReceiverRow> PullServer::receivers() const {
  return impl_->context.receivers.rows();
}

const Children& PullServer::children() const {
  return impl_->context.children;
}

std::vector<PeerStatus> PullServer::peers() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<PeerStatus> list;
  list.reserve(impl_->peers.size());
  for (const auto& entry : impl_->peers) list.push_back(entry.second.status);
  return list;
}

}  // namespace deltasync::agent
