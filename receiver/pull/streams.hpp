// The data connections of a receiver, kept between pulls. A round runs over all of them: each stream takes items,
// keeps two requests under way, and after a break connects again and goes on with what is missing.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "receiver/connection.hpp"
#include "receiver/peer.hpp"
#include "receiver/pull/fetch_round.hpp"

namespace deltasync::receiver {

/// How the reply to one request went.
struct Outcome {
  enum class Fault : std::uint8_t {
    none,     ///< the whole reply is in
    stream,   ///< the connection broke or its bytes make no sense: another connection may do
    agent,    ///< the agent refused the request
    content,  ///< what came is wrong, though it came through whole
    target,   ///< what came cannot be kept: the pull cannot go on
  };
  Fault fault = Fault::none;
  std::optional<Error> error;

  static Outcome ok() { return {}; }
  static Outcome broken(Error e) { return {Fault::stream, std::move(e)}; }
  static Outcome refused(Error e) { return {Fault::agent, std::move(e)}; }
  static Outcome wrong(Error e) { return {Fault::content, std::move(e)}; }
  static Outcome untakeable(Error e) { return {Fault::target, std::move(e)}; }
};

/// One kind of transfer: how to ask for an item and what to do with the reply. Called by all streams at once.
class Fetch {
 public:
  virtual ~Fetch() = default;
  virtual Status ask(Connection& connection, std::uint64_t request, const Item& item, Deadline deadline) = 0;
  /// Takes in the whole reply and shrinks the item as its parts arrive. `stream` < streams().
  virtual Outcome receive(Connection& connection, std::uint64_t request, Item& item, Deadline deadline,
                          unsigned stream) = 0;
  /// What is still missing of an item, for messages: "step 1 from tile 88 of model.layers.3…".
  virtual std::string describe(const Item& item) const = 0;
};

class Streams {
 public:
  /// `pool` has one thread per stream. Both are borrowed.
  Streams(const Peer& peer, ThreadPool& pool);

  unsigned count() const noexcept { return static_cast<unsigned>(connections_.size()); }
  /// Moves all items. `instance` is the agent process that made the plan: any other one ends the round.
  FetchRoundResult run(Fetch& fetch, std::vector<Item> items, std::uint64_t instance, const CallContext& until);

  /// Between rounds: nothing is expected of them for a while. The next round dials again.
  void close_idle();

  /// Over all connections, those that are closed by now counted too.
  std::uint64_t bytes_received() const;
  /// Likewise: the time that streams waited for bytes, summed.
  std::chrono::nanoseconds waited() const;

 private:
  struct Pending {
    Item item;
    std::uint64_t request = 0;  ///< 0 = not asked for on the present connection
  };
  class Worker;

  /// `rested`: it is an old one that nobody has used for a while.
  Status connect(Connection& connection, FetchRound& round, std::uint64_t instance, bool& rested);
  std::vector<unsigned> connected_first() const;
  std::string transports() const;
  void drop(unsigned stream);

  const Peer& peer_;
  ThreadPool& pool_;
  std::vector<Connection> connections_;
  std::vector<std::chrono::steady_clock::time_point> used_;  // when its last round ended
  std::vector<std::uint64_t> closed_bytes_;                  // per stream, of its earlier connections
  std::vector<std::chrono::nanoseconds> closed_waited_;      // likewise
};

}  // namespace deltasync::receiver
