#include "receiver/bucket/bucket_session.hpp"

#include <algorithm>

#include "format/handshake.hpp"
#include "format/packed_layout.hpp"
#include "format/wire_bucket.hpp"
#include "net/peer_user.hpp"

namespace deltasync::receiver {
namespace {

constexpr auto kHelloLimit = std::chrono::seconds(30);  // the layout of a large model
constexpr auto kRefusalLimit = std::chrono::milliseconds(200);

struct Heard {
  wire::BucketHello hello;
  wire::UnpackedLayout layout;
  std::unique_ptr<bucket::BucketMemory> memory;
  bucket::Share share;
  std::uint64_t request = 0;
};

Result<Heard> hear(net::MessageSocket& socket, Deadline deadline) {
  Heard heard;
  DS_ASSIGN(const net::Message message, socket.recv(wire::kLayoutBytesMax, deadline));
  if (message.type() != wire::Type::bucket_hello) {
    return Error(Errc::protocol, wire::describe(message.header) + " came where a bucket_hello was due");
  }
  heard.request = message.header.request;
  DS_TRY(wire::check_protocol(message.payload, "the trainer", {5, wire::kProtocolVersion}));
  DS_ASSIGN(heard.hello, wire::decode_handshake<wire::BucketHello>(message.payload, "the trainer"));
  const wire::BucketHello& hello = heard.hello;
  if (hello.ranks == 0 || hello.ranks > wire::kBucketRanksMax || hello.rank >= hello.ranks) {
    return Error(Errc::invalid_argument,
                 "rank " + std::to_string(hello.rank) + " of " + std::to_string(hello.ranks) + " ranks");
  }
  DS_ASSIGN(heard.memory, bucket::open_host_buckets(socket.take_file(), hello.half_bytes));
  DS_ASSIGN(heard.layout, wire::unpack_layout(hello.layout));
  DS_ASSIGN(heard.share, bucket::Share::make(heard.layout.layout, hello.tensors, hello.half_bytes));
  return heard;
}

void say(net::MessageSocket& socket, const Error& why) noexcept {
  // Request 0 is none of the trainer's: whatever it waits for ends with this.
  static_cast<void>(socket.send(0, wire::ErrorMessage{why.code(), why.message()}, Deadline::after(kRefusalLimit)));
}

}  // namespace

BucketSession::BucketSession(net::MessageSocket socket, std::unique_ptr<bucket::BucketMemory> memory,
                             bucket::Share share, std::uint32_t rank, std::string name)
    : socket_(std::move(socket)),
      memory_(std::move(memory)),
      incoming_(std::move(share)),
      rank_(rank),
      name_(std::move(name)) {}

Result<BucketSession::Greeting> BucketSession::greet(UniqueFd connection, const CallContext& until) {
  DS_ASSIGN(auto process, net::watch_peer(connection.get(), "the trainer", "this engine"));
  net::MessageSocket socket(std::move(connection));
  socket.watch(std::move(process));
  socket.accept_files();
  socket.stop_on(until.stop());
  auto heard = hear(socket, until.deadline().earlier(Deadline::after(kHelloLimit)));
  socket.stop_on({});
  if (!heard) {
    say(socket, heard.error());
    return std::move(heard).error();
  }
  Greeting greeting;
  greeting.layout = heard->layout.layout;
  greeting.sidecar = wire::take_sidecar(std::move(heard->layout));
  greeting.ranks = heard->hello.ranks;
  greeting.request = heard->request;
  const std::uint32_t rank = heard->hello.rank;
  greeting.session.reset(new BucketSession(std::move(socket), std::move(heard->memory), std::move(heard->share), rank,
                                           "rank " + std::to_string(rank) + " (" + heard->hello.name + ")"));
  return greeting;
}

Result<net::Message> BucketSession::receive(const CallContext& until) {
  return socket_.recv(wire::kRangesBytesMax, until.deadline());
}

Status BucketSession::answer(std::uint64_t request, const CallContext& until, ByteSpan payload) {
  Status sent = socket_.send(wire::Type::end, request, payload, until.deadline());
  if (!sent && socket_.last_words()) return given_up(*socket_.last_words());
  return sent;
}

Error BucketSession::given_up(const Error& said) {
  return {Errc::aborted, "the trainer gave it up: " + said.message()};
}

void BucketSession::refuse(const Error& why) noexcept {
  say(socket_, why);
  socket_.close();
}

}  // namespace deltasync::receiver
