#include "commit/coordinator_server.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/log.hpp"
#include "format/wire_commit.hpp"
#include "net/auth.hpp"

namespace deltasync::commit {
namespace {

constexpr auto kHold = std::chrono::seconds(1);  ///< an answer that has nothing to say
constexpr auto kLastWords = std::chrono::seconds(1);
constexpr auto kAcceptPause = std::chrono::milliseconds(50);
constexpr std::uint64_t kJoinBytesMax = 4096;  ///< before a peer has proved anything
constexpr std::size_t kMoreConnections = 64;   ///< than ranks
constexpr auto kSayAgain = std::chrono::seconds(1);

/// Closing with unread bytes would reset the connection, and a reset throws away what was said.
void say_why(net::MessageSocket& socket, const Error& why) {
  if (!socket.open()) return;
  const Deadline deadline = Deadline::after(kLastWords);
  wire::ErrorMessage words;
  words.code = why.code() == Errc::cancelled ? Errc::connection : why.code();
  words.message = why.message();
  if (!socket.send(0, words, deadline)) return;
  socket.end_sending();
  std::byte ignored{};
  while (socket.recv_payload({&ignored, 1}, deadline)) {
  }
}

}  // namespace

Result<std::unique_ptr<Coordinator>> Coordinator::start(CoordinatorOptions options) {
  DS_ASSIGN(auto server, CoordinatorServer::start(std::move(options)));
  return std::unique_ptr<Coordinator>(std::move(server));
}

Result<std::unique_ptr<CoordinatorServer>> CoordinatorServer::start(CoordinatorOptions options, Points points,
                                                                    Limits limits) {
  DS_ASSIGN(const net::Endpoint where, net::parse_endpoint(options.listen));
  TlsOptions tls_options = options.tls;
  tls_options.kernel = false;  // its messages are small, and the engine's process need not ignore SIGPIPE
  DS_ASSIGN(std::shared_ptr<net::Tls> tls, net::Tls::server_if_wanted(tls_options));
  // The port first: a coordinator that cannot be reached begins no term.
  if (!options.token.empty()) DS_TRY(net::check_token(options.token));
  DS_ASSIGN(net::Listener listener,
            net::Listener::bind(where, !options.token.empty() || (tls && tls->asks_for_certificates())));
  DS_ASSIGN(std::unique_ptr<CoordinatorCore> core, CoordinatorCore::open(options, std::move(points)));
  std::unique_ptr<CoordinatorServer> server(
      new CoordinatorServer(std::move(options), limits, std::move(core), std::move(listener), std::move(tls)));
  server->seats_.resize(server->options_.ranks);
  try {
    server->acceptor_ = std::jthread([s = server.get()](const std::stop_token& stop) { s->accept_all(stop); });
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "the coordinator's threads: " + e.code().message());
  }
  return server;
}

CoordinatorServer::~CoordinatorServer() {
  acceptor_.request_stop();
  if (acceptor_.joinable()) acceptor_.join();
  for (Peer& peer : peers_) peer.thread.request_stop();
  peers_.clear();  // joins
}

void CoordinatorServer::reap() {
  peers_.remove_if([](const Peer& peer) { return peer.done.load(); });
}

/// For one more: who has been there longest without having joined has to go, so that those who only connect keep out no
/// rank. False if all have joined.
bool CoordinatorServer::make_room() {
  if (peers_.size() < options_.ranks + kMoreConnections) return true;
  const auto oldest = std::find_if(peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.joined.load(); });
  ++closed_for_room_;
  if (say_closed_.passed()) {
    log::warn("commit_connections_full connections={} closed={} which={}", peers_.size(), closed_for_room_,
              oldest == peers_.end() ? "new" : "oldest");
    closed_for_room_ = 0;
    say_closed_ = Deadline::after(kSayAgain);
  }
  if (oldest == peers_.end()) return false;
  peers_.erase(oldest);  // its stop shuts the socket down; joins
  return true;
}

void CoordinatorServer::accept_all(const std::stop_token& stop) {
  ::pthread_setname_np(::pthread_self(), "ds-commit-port");
  std::uint64_t connections = 0;
  while (!stop.stop_requested()) {
    auto fd = listener_.accept(CallContext(Deadline::after(limits_.silence), stop));
    reap();
    if (tls_) tls_->run_maintenance();
    if (!fd) {
      if (fd.error().code() == Errc::timed_out || fd.error().code() == Errc::cancelled) continue;
      log::warn("commit_accept_failed error=\"{}\"", fd.error().to_string());
      CallContext(Deadline::after(kAcceptPause), stop).pause(kAcceptPause);
      continue;
    }
    if (!make_room()) continue;  // closed without a word
    Peer& peer = peers_.emplace_back();
    try {
      peer.thread = std::jthread(
          [this, &peer, connection = ++connections, taken = *std::move(fd)](const std::stop_token& ending) mutable {
            ::pthread_setname_np(::pthread_self(), "ds-commit-rank");
            converse(peer, std::move(taken), connection, ending);
            peer.done = true;
          });
    } catch (const std::system_error& e) {
      log::warn("commit_accept_failed error=\"no thread: {}\"", e.code().message());
      peers_.pop_back();
    }
  }
}

void CoordinatorServer::converse(Peer& peer, UniqueFd fd, std::uint64_t connection, const std::stop_token& stop) {
  net::MessageSocket socket(std::move(fd));
  socket.stop_on(stop);
  const Deadline deadline = Deadline::after(limits_.join);
  const Status secured = secure(socket, deadline);
  auto who = secured ? join(socket, connection, deadline) : Result<Joined>(secured.error());
  peer.joined = who.ok();
  Status status = who ? serve(socket, *who, stop) : Status(who.error());
  peer.joined = false;
  if (who) leave_seat(*who);
  if (status.error().code() != Errc::connection && status.error().code() != Errc::cancelled) {
    log::warn("commit_peer_dropped connection={} error=\"{}\"", connection, status.error().to_string());
    say_why(socket, status.error());
  }
}

Status CoordinatorServer::secure(net::MessageSocket& socket, Deadline deadline) {
  if (!tls_) return {};
  DS_ASSIGN(auto channel, tls_->channel(socket.fd(), "a rank"));
  return socket.secure(std::move(channel), deadline);
}

Result<CoordinatorServer::Joined> CoordinatorServer::join(net::MessageSocket& socket, std::uint64_t connection,
                                                          Deadline deadline) {
  wire::Hello hello;
  hello.protocol = wire::kCommitProtocol;
  hello.auth_required = options_.token.empty() ? 0 : 1;
  hello.instance = core_->log();
  hello.nonce = net::make_nonce();
  DS_TRY(socket.send(0, hello, deadline));
  DS_ASSIGN(const net::Message message, socket.recv(kJoinBytesMax, deadline));
  if (message.type() != wire::Type::rank_join) {
    return Error(Errc::protocol, "the first message is of type " + wire::type_name(message.header.type));
  }
  DS_TRY(wire::check_protocol(message.payload, "the rank", {wire::kCommitProtocol, wire::kCommitProtocol}));
  DS_ASSIGN(const wire::RankJoin asked, wire::RankJoin::decode(message.payload));
  const auto proof =
      net::rank_proof(options_.token, hello.nonce, asked.nonce, asked.rank, asked.ranks, asked.incarnation);
  if (!options_.token.empty() && !net::equal_proofs(asked.proof, proof)) {
    return Error(Errc::unauthenticated, "no token or a wrong one: coordinator and ranks need the same");
  }
  if (asked.ranks != options_.ranks || asked.rank >= asked.ranks || asked.incarnation == 0) {
    return Error(Errc::invalid_argument, "rank " + std::to_string(asked.rank) + " of " + std::to_string(asked.ranks) +
                                             " wants to join a group of " + std::to_string(options_.ranks));
  }
  const Joined who{asked.rank, asked.incarnation, connection};
  DS_TRY(take_seat(who, socket.fd()));
  wire::RankWelcome welcome;
  welcome.proof = net::coordinator_proof(options_.token, asked.nonce, hello.nonce);
  welcome.log = core_->log();
  welcome.term = core_->term();
  welcome.incarnation = std::max(core_->incarnation(asked.rank), asked.incarnation);
  if (auto sent = socket.send(0, welcome, deadline); !sent) {
    leave_seat(who);
    return std::move(sent).error();
  }
  log::debug("commit_rank_joined connection={} rank={} name=\"{}\"", connection, asked.rank, asked.name);
  return who;
}

Status CoordinatorServer::take_seat(const Joined& who, int fd) {
  const std::lock_guard lock(mutex_);
  Seat& seat = seats_[who.rank];
  if (seat.connection != 0 && who.incarnation < seat.incarnation) {
    return Error(Errc::version_conflict,
                 "rank " + std::to_string(who.rank) + ": this process has been replaced by a later one");
  }
  if (seat.connection != 0 && seat.incarnation != who.incarnation) {
    return Error(Errc::already_exists, "rank " + std::to_string(who.rank) + " is connected, by another process");
  }
  if (seat.connection != 0) ::shutdown(seat.fd.get(), SHUT_RDWR);  // its own earlier connection
  seat = {who.connection, who.incarnation, UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0))};
  return {};
}

void CoordinatorServer::leave_seat(const Joined& who) {
  const std::lock_guard lock(mutex_);
  Seat& seat = seats_[who.rank];
  if (seat.connection == who.connection) seat = {};
}

Status CoordinatorServer::serve(net::MessageSocket& socket, const Joined& who, const std::stop_token& stop) {
  for (;;) {
    DS_ASSIGN(const net::Message message, socket.recv(wire::kRankMessageBytesMax, Deadline::after(limits_.silence)));
    if (message.type() != wire::Type::rank_report) {
      return Error(Errc::protocol,
                   "a message of type " + wire::type_name(message.header.type) + " in place of a report");
    }
    DS_ASSIGN(const wire::RankReport said, wire::RankReport::decode(message.payload));
    if (said.report.rank != who.rank || said.report.incarnation != who.incarnation) {
      return Error(Errc::protocol, "rank " + std::to_string(who.rank) + " reports for rank " +
                                       std::to_string(said.report.rank) + ", or for another process");
    }
    DS_ASSIGN(const Order order, core_->exchange(said.report, Deadline::after(kHold), stop));
    if (order.incarnation != who.incarnation) {
      return Error(Errc::version_conflict, "this process has been replaced by a later one of the same rank");
    }
    DS_TRY(socket.send(message.header.request, wire::RankOrder{order}, Deadline::after(limits_.silence)));
  }
}

std::vector<RankStatus> CoordinatorServer::ranks() const {
  std::vector<RankStatus> list;
  for (auto& report : core_->reports()) list.push_back({false, std::move(report)});
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < seats_.size(); ++i) list[i].connected = seats_[i].connection != 0;
  return list;
}

}  // namespace deltasync::commit
