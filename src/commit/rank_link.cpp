#include "commit/rank_link.hpp"

#include "format/wire_commit.hpp"
#include "net/auth.hpp"

namespace deltasync::commit {
namespace {

constexpr auto kJoinLimit = std::chrono::seconds(5);

/// The answer, or the error that the coordinator sent in its place, whatever request it names: it ends the connection.
template <class M>
Result<M> receive(net::MessageSocket& socket, std::uint64_t request, Deadline deadline) {
  DS_ASSIGN(const net::Message message, socket.recv(wire::kRankMessageBytesMax, deadline));
  if (message.type() == wire::Type::error) {
    DS_ASSIGN(const auto said, wire::ErrorMessage::decode(message.payload));
    return Error(said.code, "the coordinator says: " + said.message);
  }
  if (message.type() != M::kType || message.header.request != request) {
    return Error(Errc::protocol, "a message of type " + wire::type_name(message.header.type) + " for request " +
                                     std::to_string(message.header.request) + " came where the answer to request " +
                                     std::to_string(request) + " was due");
  }
  if constexpr (M::kType == wire::Type::hello) {
    DS_TRY(wire::check_protocol(message.payload, "the coordinator", {wire::kCommitProtocol, wire::kCommitProtocol}));
  }
  return M::decode(message.payload);
}

}  // namespace

Result<Order> RankLink::exchange(const Report& report, Deadline deadline, const std::stop_token& stop) {
  if (socket_.open() && incarnation_ != report.incarnation) socket_.close();
  if (!socket_.open()) {
    const CallContext until(deadline.earlier(Deadline::after(kJoinLimit)), stop);
    if (auto joined = join(report, until); !joined) {
      socket_.close();
      return std::move(joined).error().with_context("coordinator at " + net::to_string(where_));
    }
  }
  auto order = ask(report, deadline);
  if (order) return order;
  socket_.close();
  if (order.error().code() == Errc::version_conflict && latest_ > report.incarnation) {
    Order to_later;  // as Coordinator::exchange says it: the order is for the later process
    to_later.log = log_;
    to_later.incarnation = latest_;
    return to_later;
  }
  return std::move(order).error().with_context("coordinator at " + net::to_string(where_));
}

Status RankLink::join(const Report& report, const CallContext& until) {
  DS_ASSIGN(UniqueFd fd, net::connect_tcp(where_.host, where_.port, until));
  socket_ = net::MessageSocket(std::move(fd));
  socket_.stop_on(until.stop());
  const Deadline deadline = until.deadline();
  if (tls_) {
    DS_ASSIGN(auto channel, tls_->channel(socket_.fd(), where_.host));
    DS_TRY(socket_.secure(std::move(channel), deadline));
  }
  DS_ASSIGN(const auto hello, receive<wire::Hello>(socket_, 0, deadline));
  if (hello.auth_required != 0 && token_.empty()) {
    return Error(Errc::unauthenticated, "the coordinator wants a token and none was given: all ranks need its own");
  }
  wire::RankJoin join;
  join.rank = report.rank;
  join.ranks = ranks_;
  join.incarnation = report.incarnation;
  join.nonce = net::make_nonce();
  join.proof = net::rank_proof(token_, hello.nonce, join.nonce, join.rank, join.ranks, join.incarnation);
  join.name = name_;
  DS_TRY(socket_.send(0, join, deadline));
  DS_ASSIGN(const auto welcome, receive<wire::RankWelcome>(socket_, 0, deadline));
  if (!token_.empty() && !net::equal_proofs(welcome.proof, net::coordinator_proof(token_, join.nonce, hello.nonce))) {
    return Error(Errc::unauthenticated, "the coordinator did not prove that it knows the token");
  }
  incarnation_ = report.incarnation;
  latest_ = welcome.incarnation;
  log_ = welcome.log;
  return {};
}

Result<Order> RankLink::ask(const Report& report, Deadline deadline) {
  DS_TRY(socket_.send(++request_, wire::RankReport{report}, deadline));
  DS_ASSIGN(auto answer, receive<wire::RankOrder>(socket_, request_, deadline));
  return std::move(answer.order);
}

}  // namespace deltasync::commit
