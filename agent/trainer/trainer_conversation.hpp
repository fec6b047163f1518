// One connection of a trainer: hello, then requests and answers one after the other (trainer_protocol.md).
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/generic/stream_protocol.hpp>

#include <cstdint>
#include <memory>

#include "agent/trainer/trainer_state.hpp"
#include "net/message_stream.hpp"

namespace deltasync::agent {

/// Everything runs on the server's strand.
class TrainerConversation {
 public:
  TrainerConversation(TrainerState& state, boost::asio::generic::stream_protocol::socket socket,
                      std::uint64_t connection);

  /// Until the trainer leaves, a limit is passed, or the server stops. Its slot stays with its process.
  boost::asio::awaitable<void> run();
  net::MessageStream::Canceller canceller() { return stream_.canceller(); }

 private:
  template <class T>
  using awaitable = boost::asio::awaitable<T>;

  struct Admission;
  /// What an admitted writer is told.
  struct Greeting {
    wire::TrainerWelcome welcome;
    UniqueFd segment;
  };

  /// A failed Status ends the connection.
  awaitable<Status> talk();
  awaitable<Result<TrainerPtr>> admit(const wire::TrainerHello& hello, ProcessWatch peer, Greeting& greeting);
  awaitable<Status> greet(std::uint64_t request, const Greeting& greeting);
  /// The record of a slot that was granted; refused if another hello was admitted meanwhile.
  Result<TrainerPtr> record(const wire::TrainerHello& hello, std::uint64_t generation, ProcessWatch peer);
  /// On the setup thread.
  Result<Admission> open(const wire::TrainerHello& hello, const ProcessId& peer, bool connected_besides);
  /// One request of an attached writer. False: the conversation is over.
  awaitable<Result<bool>> serve(const TrainerPtr& trainer, const net::Message& message);
  /// All that a receiver on this host says.
  awaitable<Status> hand_out_segment(const net::Message& message);
  awaitable<void> take_arrival(std::uint64_t generation, ByteSpan payload);
  void take_delta(std::uint64_t generation, const net::Message& message);
  awaitable<Status> judge_plan(const TrainerPtr& trainer, ByteSpan payload);
  awaitable<Result<wire::TrainerReady>> await_ready(ByteSpan payload);
  awaitable<Status> send_error(std::uint64_t request, const Error& error);

  TrainerState& state_;
  Result<ProcessWatch> peer_;  ///< from the kernel, before the socket is the stream's
  net::MessageStream stream_;
  const std::uint64_t connection_;
  std::uint16_t protocol_ = wire::kProtocolOldest;  ///< the trainer's
  bool relays_ = false;                             ///< the writer said where its versions come from
  std::uint64_t request_ = 0;  ///< what the error that ends the conversation answers, if it answers one: a hello
};

}  // namespace deltasync::agent
