// One trainer's process at an engine's bucket channel: its connection, its buckets, and how far its version is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bucket/chunk.hpp"
#include "bucket/memory.hpp"
#include "deltasync/layout.hpp"
#include "deltasync/version.hpp"
#include "net/blocking.hpp"

namespace deltasync::receiver {

class BucketSession {
 public:
  /// Hears the hello of a connection that has just been made. An error is for the log: the peer has been told.
  struct Greeting {
    std::unique_ptr<BucketSession> session;
    LayoutPtr layout;
    Sidecar sidecar;
    std::uint32_t ranks = 1;
    std::uint64_t request = 0;
  };
  static Result<Greeting> greet(UniqueFd connection, const CallContext& until);

  int fd() const noexcept { return socket_.fd(); }
  /// Readable once the trainer's process is dead; -1 if it cannot be watched.
  int process_fd() const noexcept { return socket_.process_fd(); }
  std::uint32_t rank() const noexcept { return rank_; }
  const std::string& name() const noexcept { return name_; }  ///< "rank 3 (trainer)"
  const bucket::Share& share() const noexcept { return incoming_.share(); }
  bool peer_closed() const { return socket_.peer_closed(); }
  std::uint64_t bytes_received() const noexcept { return socket_.bytes_received(); }

  /// While a version comes a stop ends the conversation.
  void stop_on(const std::stop_token& stop) { socket_.stop_on(stop); }
  Result<net::Message> receive(const CallContext& until);
  Status answer(std::uint64_t request, const CallContext& until, ByteSpan payload = {});
  /// What a version ends with whose trainer says an error.
  static Error given_up(const Error& said);
  /// Tells the trainer why, and closes.
  void refuse(const Error& why) noexcept;

  /// The version that it wants to send, and the request to be answered once that begins.
  struct Offer {
    Version version;
    std::uint64_t request = 0;
  };
  std::optional<Offer> offer;
  /// Of the finish that is to be answered; 0: it has not come.
  std::uint64_t finish = 0;
  /// Whether it has the side files of the first one.
  Status same_files;

  ByteSpan half(unsigned index) const noexcept { return memory_->half(index); }
  bucket::Incoming& incoming() noexcept { return incoming_; }

 private:
  BucketSession(net::MessageSocket socket, std::unique_ptr<bucket::BucketMemory> memory, bucket::Share share,
                std::uint32_t rank, std::string name);

  net::MessageSocket socket_;
  const std::unique_ptr<bucket::BucketMemory> memory_;
  bucket::Incoming incoming_;
  const std::uint32_t rank_;
  const std::string name_;
};

}  // namespace deltasync::receiver
