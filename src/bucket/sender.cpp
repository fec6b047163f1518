#include "bucket/sender.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/trace.hpp"
#include "delta/delta.hpp"
#include "format/packed_layout.hpp"
#include "net/peer_user.hpp"

namespace deltasync::bucket {
namespace {

constexpr auto kBackoffMin = std::chrono::milliseconds(5);
constexpr auto kBackoffMax = std::chrono::milliseconds(250);
constexpr auto kGoodbyeLimit = std::chrono::milliseconds(200);

/// Of the piece's tiles, as they lie in the half.
void add_digests(const Layout& layout, const Piece& piece, ByteSpan half, std::vector<std::uint64_t>& digests) {
  for (std::uint64_t t = piece.first_tile; t < piece.first_tile + piece.tiles; ++t) {
    const Tile tile = tile_in(layout, piece, t);
    const Tensor& tensor = layout.tensors()[tile.tensor];
    const std::byte* const first = half.data() + piece.offset + tile.rect.row * tensor.row_bytes() - piece.from +
                                   tile.rect.col * tensor.element_bytes;
    digests.push_back(delta::tile_digest(first, static_cast<std::size_t>(tensor.row_bytes()), tile.rect.rows,
                                         tile.rect.cols * tensor.element_bytes));
  }
}

}  // namespace

Result<std::unique_ptr<Sender>> Sender::open(LayoutPtr layout, const Sidecar& sidecar, SenderOptions options,
                                             const CallContext& until) {
  if (options.ranks == 0 || options.ranks > wire::kBucketRanksMax || options.rank >= options.ranks) {
    return Error(Errc::invalid_argument, "rank " + std::to_string(options.rank) + " of " +
                                             std::to_string(options.ranks) + " ranks; at most " +
                                             std::to_string(wire::kBucketRanksMax) + " are possible");
  }
  DS_ASSIGN(Share share, Share::make(layout, options.tensors, options.half_bytes));
  wire::BucketHello hello;
  hello.rank = options.rank;
  hello.ranks = options.ranks;
  hello.half_bytes = options.half_bytes;
  hello.name = options.name;
  hello.tensors = share.tensors();
  DS_ASSIGN(hello.layout, wire::pack_layout(layout->encode(), sidecar.encode()));
  DS_ASSIGN(auto memory, make_host_buckets(options.half_bytes));
  std::unique_ptr<Sender> sender(
      new Sender(std::move(layout), std::move(options), std::move(share), std::move(memory), hello.encode()));
  DS_TRY(sender->connect(until));
  return sender;
}

Sender::Sender(LayoutPtr layout, SenderOptions options, Share share, std::unique_ptr<BucketMemory> memory,
               std::vector<std::byte> hello)
    : layout_(std::move(layout)),
      options_(std::move(options)),
      memory_(std::move(memory)),
      hello_(std::move(hello)),
      outgoing_(std::move(share)) {}

Sender::~Sender() {
  if (fork_guard_.same_process() && begun_) abort(Error(Errc::aborted, "the trainer gave the version up"));
}

Status Sender::connect_once(const CallContext& until) {
  const Deadline deadline = until.deadline();
  DS_ASSIGN(UniqueFd fd, net::connect_unix(options_.socket, until));
  // A stranger who made the socket first must not be told anything.
  auto process = net::watch_peer(fd.get(), "the engine on " + options_.socket, "this trainer");
  if (!process) return std::move(process).error();
  socket_ = net::MessageSocket(std::move(fd));
  socket_.watch(*std::move(process));
  socket_.stop_on(until.stop());
  DS_TRY(socket_.send_with_file(wire::Type::bucket_hello, ++request_, hello_, memory_->descriptor(), deadline));
  return await(request_, until);
}

/// An engine that starts, or starts again, is waited for.
Status Sender::connect(const CallContext& until) {
  std::chrono::nanoseconds pause = kBackoffMin;
  for (;;) {
    Status connected = connect_once(until);
    if (connected) return {};
    socket_.close();
    if (connected.error().code() != Errc::connection) return connected;
    if (until.stop_requested()) return cancelled_while("waiting for the engine at " + options_.socket);
    if (until.deadline().passed()) {
      return Error(Errc::timed_out, "no engine answered until the deadline: " + connected.error().message());
    }
    until.pause(pause);
    pause = std::min<std::chrono::nanoseconds>(pause * 2, kBackoffMax);
  }
}

Status Sender::connect_if_closed(const CallContext& until) {
  if (!socket_.open() || socket_.peer_closed()) DS_TRY(connect(until));
  socket_.stop_on(until.stop());
  return {};
}

Status Sender::await(std::uint64_t request, const CallContext& until) {
  auto answer = socket_.recv_answer(request, wire::Type::end, until.deadline());
  if (!answer) return std::move(answer).error();
  return {};
}

Error Sender::failed(Error why) {
  if (socket_.last_words()) why = *socket_.last_words();  // rather than that the engine has closed
  socket_.close();
  begun_ = false;
  unanswered_ = 0;
  return why;
}

Status Sender::check_begun() const {
  if (begun_) return {};
  return Error(Errc::invalid_argument, "no version has begun, or it failed");
}

Result<std::uint64_t> Sender::epoch_held(const CallContext& until) {
  if (begun_) return Error(Errc::invalid_argument, "a version has begun already: finish or abort it first");
  DS_TRY(connect_if_closed(until));
  const Status sent = socket_.send(++request_, wire::BucketBegin{}, until.deadline());
  if (!sent) return failed(sent.error());
  auto answer = socket_.recv_answer(request_, wire::Type::end, until.deadline());
  if (!answer) return failed(std::move(answer).error()).with_context("asking the engine what it has");
  DS_ASSIGN(const wire::BucketHeld held, wire::BucketHeld::decode(answer->payload));
  return held.epoch;
}

Status Sender::begin(const Version& version, const CallContext& until) {
  if (begun_) return Error(Errc::invalid_argument, "a version has begun already: finish or abort it first");
  if (!version.id.valid()) return Error(Errc::invalid_argument, "a version with epoch 0");
  DS_TRY(connect_if_closed(until));
  outgoing_.begin();
  Status sent = socket_.send(++request_, wire::BucketBegin{version}, until.deadline());
  if (sent) sent = await(request_, until);
  if (!sent) return failed(std::move(sent).error()).with_context("begin of " + to_string(version));
  begun_ = true;
  return {};
}

/// The chunk goes out before the answer to the one before it is awaited: so the engine copies while the next is filled,
/// and the half that is written next is free.
Status Sender::issue(const CallContext& until) {
  socket_.stop_on(until.stop());
  const ByteSpan half = memory_->half(outgoing_.half());
  const trace::Span span("bucket_issue", {{"tensors", outgoing_.pieces().size()}});
  std::vector<std::uint64_t> digests;
  for (const Piece& piece : outgoing_.pieces()) add_digests(*layout_, piece, half, digests);
  const std::uint64_t before = std::exchange(unanswered_, ++request_);
  Status done = socket_.send(request_, outgoing_.take(std::move(digests)), until.deadline());
  if (done && before != 0) done = await(before, until);
  if (!done) return failed(std::move(done).error());
  return {};
}

Result<Sender::Room> Sender::room(std::uint32_t tensor, const CallContext& until) {
  DS_TRY(check_begun());
  DS_ASSIGN(std::optional<Piece> piece, outgoing_.next(tensor));
  if (!piece) {
    DS_TRY(until.check("filling a bucket"));
    DS_TRY(issue(until));
    DS_ASSIGN(piece, outgoing_.next(tensor));
    if (!piece) return Error(Errc::internal, "an empty bucket has no room");
  }
  const MutByteSpan half = memory_->room(outgoing_.half());
  return Room{half.subspan(static_cast<std::size_t>(piece->offset), static_cast<std::size_t>(piece->bytes)),
              piece->from, outgoing_.is_whole(tensor)};
}

Status Sender::put(std::uint32_t tensor, ByteSpan bytes, const CallContext& until) {
  if (tensor < layout_->tensors().size() && layout_->tensors()[tensor].bytes != bytes.size()) {
    const Tensor& expected = layout_->tensors()[tensor];
    return Error(Errc::invalid_argument, expected.spec.name + " has " + std::to_string(expected.bytes) +
                                             " bytes in the layout, not " + std::to_string(bytes.size()));
  }
  for (;;) {
    DS_ASSIGN(const Room room, this->room(tensor, until));
    if (!room.to.empty()) std::memcpy(room.to.data(), bytes.data() + room.from, room.to.size());
    if (room.last) return {};
  }
}

Status Sender::finish(const CallContext& until) {
  DS_TRY(check_begun());
  socket_.stop_on(until.stop());
  if (Status whole = outgoing_.check_whole(); !whole) {
    abort(whole.error());
    return whole;
  }
  if (!outgoing_.pieces().empty()) DS_TRY(issue(until));
  Status done;
  if (unanswered_ != 0) done = await(unanswered_, until);
  if (done) done = socket_.send(++request_, outgoing_.finish(), until.deadline());
  if (done) done = await(request_, until);
  if (!done) return failed(std::move(done).error()).with_context("finish");
  begun_ = false;
  unanswered_ = 0;
  return {};
}

void Sender::abort(const Error& why) noexcept {
  if (begun_) {
    static_cast<void>(
        socket_.send(++request_, wire::ErrorMessage{why.code(), why.message()}, Deadline::after(kGoodbyeLimit)));
  }
  static_cast<void>(failed(why));
}

}  // namespace deltasync::bucket
