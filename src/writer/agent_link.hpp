// A writer's conversation with the agent over the Unix socket (trainer_protocol.md). The segment alone carries
// begin, write and commit; this link attaches, registers plans, says "look" and asks what is served. It reconnects
// by itself: the agent may have been restarted.
#pragma once

#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "base/deadline.hpp"
#include "base/fork_guard.hpp"
#include "deltasync/result.hpp"
#include "deltasync/writer.hpp"
#include "format/wire.hpp"
#include "format/wire_report.hpp"
#include "net/blocking.hpp"

namespace deltasync {

/// What the agent answers to a hello.
struct Attached {
  wire::TrainerWelcome welcome;
  UniqueFd segment;  ///< its file, open; its name in `welcome` is for messages
};

/// Not thread-safe.
class AgentLink {
 public:
  /// `hello` is said at every connect.
  AgentLink(std::string socket_path, const wire::TrainerHello& hello);
  /// Says goodbye if it is connected, or was until a stop, so that the slot is free at once; the fill must have been
  /// left. A forked child's copy says nothing: the slot is its parent's.
  ~AgentLink();
  AgentLink(const AgentLink&) = delete;
  AgentLink& operator=(const AgentLink&) = delete;

  /// From now on this stop ends what waits for the agent, and closes the connection: cancelled.
  void stop_on(const std::stop_token& stop);

  /// One attempt: connection if nobody listens, permission if another user does, or what the agent answers.
  Result<Attached> connect(Deadline deadline);
  /// Attempts until the deadline while nobody listens or the agent closes; then `connection`, and the message says so.
  /// Any other error ends it at once.
  Result<Attached> reconnect(Deadline deadline);
  /// False once the agent closed its end, or was never there. Cheap.
  bool connected() const { return socket_.open() && !socket_.peer_closed(); }
  /// Without a goodbye: the slot stays this process's.
  void close() { socket_.close(); }

  /// "Look at the segment", and how long the offload took. Best effort: the agent's own look comes a little later.
  void notify(const wire::TrainerNotify& offload, Deadline deadline);
  /// Of a relay, now and again after each connect. Best effort.
  void tell_parents(wire::TrainerParents parents, Deadline deadline);
  /// Of a relay: what comes to it, and where. Told again after each connect, until one of the next two. Best effort.
  void tell_arrival(const wire::TrainerArrival& arrival, UniqueFd memory, Deadline deadline);
  /// It does not come any more.
  void end_arrival(Deadline deadline);
  /// Of a relay: a delta that comes to it, or a part of that. connection: this agent does not hear it.
  template <class Message>
  Status tell(const Message& message, Deadline deadline) {
    if (!connected()) return Error(Errc::connection, "the agent is away");
    return socket_.send(++request_, message, deadline);
  }
  /// It is told to nobody else.
  void forget_arrival() noexcept { arrival_memory_.reset(); }
  /// A plan that an agent has accepted, told to another one: answered at once, whatever the other writers do.
  Status restore_plan(std::span<const TensorSlice> plan, Deadline deadline);
  /// connection: the agent went away meanwhile; reconnect and ask again.
  Status register_plan(std::span<const TensorSlice> plan, Deadline deadline);
  Result<wire::TrainerReady> wait_ready(const VersionId& version, Deadline deadline);

 private:
  template <class Message, class Receive>
  auto ask(Message& message, Deadline deadline, Receive&& receive) -> decltype(receive(std::uint64_t{}));
  void say_arrival(Deadline deadline);
  Status send_plan(std::span<const TensorSlice> plan, bool agreed, Deadline deadline);

  const ForkGuard fork_guard_;
  const std::string socket_path_;
  const std::vector<std::byte> hello_;  ///< encoded: it holds the layout and is the same each time
  std::optional<wire::TrainerParents> parents_;
  std::vector<std::byte> arrival_;  ///< encoded: it holds digests
  UniqueFd arrival_memory_;         ///< of it; none: nothing comes
  net::MessageSocket socket_;
  std::stop_token stop_;
  bool cut_ = false;  ///< a stop closed the connection, of which the agent still expects the goodbye
  std::uint64_t request_ = 0;
};

}  // namespace deltasync
