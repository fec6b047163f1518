#include "receiver/pull/streams.hpp"

#include <algorithm>
#include <new>
#include <numeric>
#include <string>
#include <utility>

#include "base/trace.hpp"
#include "net/ucx/transports.hpp"

namespace deltasync::receiver {
namespace {

/// Another connection to the same agent cannot help.
bool hopeless(Errc code) {
  return code == Errc::unauthenticated || code == Errc::unsupported;
}

/// Not the network's fault: tolerated a few times, since a proxy or a half-dead peer may send anything.
bool nonsense(Errc code) {
  return code == Errc::protocol || code == Errc::corrupt;
}

}  // namespace

/// One stream's part in one round, on one thread.
class Streams::Worker {
 public:
  Worker(Streams& streams, unsigned stream, Fetch& fetch, FetchRound& round, std::uint64_t instance)
      : streams_(streams),
        stream_(stream),
        fetch_(fetch),
        round_(round),
        instance_(instance),
        backoff_(streams.peer_.tuning) {}

  void run() {
    while (refill()) {
      const Outcome outcome = exchange();
      if (connection().turned_away()) {
        bow_out(*outcome.error);
        return;
      }
      if (outcome.fault == Outcome::Fault::stream && closed_while_idle(*outcome.error)) {
        redial();
        continue;
      }
      if (outcome.fault == Outcome::Fault::none) {
        pending_.pop_front();
        round_.done();
        backoff_.reset();
        strikes_ = 0;
        continue;
      }
      fail(outcome);
    }
    // The round is over. Replies that nobody will read are under way on this connection.
    if (!pending_.empty()) streams_.drop(stream_);
    connection().stop_on({});
    streams_.used_[stream_] = std::chrono::steady_clock::now();
  }

 private:
  static constexpr std::size_t kRequestsUnderWay = 2;

  Connection& connection() { return streams_.connections_[stream_]; }

  /// True while there is something to do, and the round is not over.
  bool refill() {
    while (pending_.size() < kRequestsUnderWay) {
      auto item = pending_.empty() ? round_.take() : round_.take_ahead(streams_.count());
      if (!item) break;
      pending_.push_back({std::move(*item), 0});
    }
    return !pending_.empty() && !round_.over();
  }

  /// Receives the first pending item.
  Outcome exchange() {
    trace::Span span("fetch", {{"stream", stream_}});
    const std::uint64_t before = received();
    Outcome outcome = exchange_one();
    span.set({"bytes", received() - before});
    return outcome;
  }

  Outcome exchange_one() {
    if (!connected_) {
      if (auto status = streams_.connect(connection(), round_, instance_, rested_); !status) {
        const bool restarted = status.error().code() == Errc::peer_died;
        return restarted ? Outcome::refused(std::move(status).error()) : Outcome::broken(std::move(status).error());
      }
      connected_ = true;
      received_before_ = received();
      connection().skip_next_wait();
    }
    for (Pending& p : pending_) {
      if (p.request != 0) continue;
      const std::uint64_t request = connection().next_request();
      if (auto status = fetch_.ask(connection(), request, p.item, io_deadline()); !status) {
        return Outcome::broken(std::move(status).error());
      }
      p.request = request;
    }
    return fetch_.receive(connection(), pending_.front().request, pending_.front().item, round_.deadline(), stream_);
  }

  /// The agent closes connections that are idle for long, perhaps just as we ask: a request that nobody answers on one
  /// that has rested is asked again on a new one, and nothing has gone wrong.
  bool closed_while_idle(const Error& error) {
    return connected_ && rested_ && received() == received_before_ && error.code() == Errc::connection;
  }
  void redial() {
    streams_.drop(stream_);
    connected_ = false;
    for (Pending& p : pending_) p.request = 0;
  }
  /// No place for this stream; perhaps the others have theirs.
  void bow_out(const Error& said) {
    streams_.drop(stream_);
    while (!pending_.empty()) {
      round_.give_back(std::move(pending_.back().item));
      pending_.pop_back();
    }
    round_.left(said);
  }

  /// And there is another one, which has what is missing. Of an agent that is there a stream may break.
  bool agent_is_gone(const Error& error) const {
    const auto& pulse = streams_.peer_.pulse;
    if (!pulse || (error.code() != Errc::timed_out && error.code() != Errc::connection)) return false;
    return !connected_ || (error.code() == Errc::timed_out && pulse->is_gone());
  }

  std::uint64_t received() { return streams_.closed_bytes_[stream_] + connection().bytes_received(); }
  Deadline io_deadline() const { return round_.deadline().earlier(Deadline::after(streams_.peer_.tuning.silence)); }

  void fail(const Outcome& outcome) {
    const Item& item = pending_.front().item;
    const Error error =
        item.ranges.empty() ? *outcome.error : Error(*outcome.error).with_context(fetch_.describe(item));
    const bool gone = outcome.fault == Outcome::Fault::stream && agent_is_gone(error);
    streams_.drop(stream_);
    connected_ = false;
    if (gone) {
      round_.finish(FetchRoundEnd::replan, error);
    } else if (outcome.fault == Outcome::Fault::agent) {
      round_.finish(error.code() == Errc::layout_mismatch || hopeless(error.code()) ? FetchRoundEnd::failed
                                                                                    : FetchRoundEnd::replan,
                    error);
    } else if (outcome.fault == Outcome::Fault::content && ++pending_.front().item.bad_content >= 2) {
      round_.finish(FetchRoundEnd::bad_content, error);
    } else if (outcome.fault == Outcome::Fault::target || hopeless(error.code()) ||
               (nonsense(error.code()) && ++strikes_ >= streams_.peer_.tuning.stream_strikes)) {
      round_.finish(FetchRoundEnd::failed, error);
    } else {
      round_.restarted(error);
    }
    while (!pending_.empty()) {
      round_.give_back(std::move(pending_.back().item));
      pending_.pop_back();
    }
    round_.pause(backoff_.next());
  }

  Streams& streams_;
  const unsigned stream_;
  Fetch& fetch_;
  FetchRound& round_;
  const std::uint64_t instance_;
  Backoff backoff_;
  std::deque<Pending> pending_;
  std::uint32_t strikes_ = 0;
  bool connected_ = false;             // the connection is open and checked, and ends with the round
  bool rested_ = false;                // it is of an earlier round
  std::uint64_t received_before_ = 0;  // until it was connected
};

Streams::Streams(const Peer& peer, ThreadPool& pool)
    : peer_(peer),
      pool_(pool),
      connections_(pool.size()),
      used_(pool.size()),
      closed_bytes_(pool.size()),
      closed_waited_(pool.size()) {}

Status Streams::connect(Connection& connection, FetchRound& round, std::uint64_t instance, bool& rested) {
  const auto stream = static_cast<unsigned>(&connection - connections_.data());
  rested = std::chrono::steady_clock::now() - used_[stream] >= peer_.tuning.rested;
  if (!connection.open() || connection.stale() || connection.instance() != instance) {
    drop(stream);
    rested = false;
    const Deadline deadline = round.deadline().earlier(Deadline::after(peer_.handshake()));
    DS_ASSIGN(connection, Connection::dial(peer_, {deadline, round.stop()}));
    DS_TRY(connection.handshake(peer_, wire::Role::data, deadline).with_context("handshake of a data stream"));
  } else {
    connection.stop_on(round.stop());
  }
  if (connection.instance() == instance) return {};
  return Error(Errc::peer_died, "the agent is another process than the one that made the plan");
}

void Streams::drop(unsigned stream) {
  Connection& connection = connections_[stream];
  closed_bytes_[stream] += connection.bytes_received();
  closed_waited_[stream] += connection.waited();
  connection = Connection();
}

void Streams::close_idle() {
  for (unsigned stream = 0; stream < count(); ++stream) drop(stream);
}

/// A round of few items takes the connections that there are: another one would cost a dial, and where this receiver's
/// own idle ones have the agent's last places it would be refused for as long as they stay.
std::vector<unsigned> Streams::connected_first() const {
  std::vector<unsigned> order(count());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_partition(order.begin(), order.end(),
                        [&](unsigned stream) { return connections_[stream].open() && !connections_[stream].stale(); });
  return order;
}

FetchRoundResult Streams::run(Fetch& fetch, std::vector<Item> items, std::uint64_t instance, const CallContext& until) {
  const std::size_t workers = std::min<std::size_t>(items.size(), count());
  const std::vector<unsigned> order = connected_first();
  FetchRound round(std::move(items), until, workers);
  const std::uint64_t bytes_before = bytes_received();
  const std::chrono::nanoseconds waited_before = waited();
  const auto work = [&](std::uint64_t place, unsigned) {
    const unsigned stream = order[static_cast<std::size_t>(place)];
    try {
      Worker(*this, stream, fetch, round, instance).run();
    } catch (const std::bad_alloc&) {
      drop(stream);
      round.finish(FetchRoundEnd::failed, Error(Errc::no_space, "out of memory"));
    }
  };
  if (workers == 1) {
    work(0, 0);  // a small delta wakes nobody
  } else {
    pool_.run(workers, work);
  }
  FetchRoundResult result = round.result();
  result.bytes = bytes_received() - bytes_before;
  result.transports = transports();
  if (workers != 0) {
    result.waited_s = std::chrono::duration<double>(waited() - waited_before).count() / static_cast<double>(workers);
  }
  return result;
}

std::chrono::nanoseconds Streams::waited() const {
  std::chrono::nanoseconds sum{0};
  for (std::size_t i = 0; i < connections_.size(); ++i) sum += closed_waited_[i] + connections_[i].waited();
  return sum;
}

std::string Streams::transports() const {
  std::string names;
  for (const Connection& connection : connections_) net::ucx::add_names(names, connection.transports());
  return names;
}

std::uint64_t Streams::bytes_received() const {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < connections_.size(); ++i) sum += closed_bytes_[i] + connections_[i].bytes_received();
  return sum;
}

}  // namespace deltasync::receiver
