// The requests that move bytes: digests, extents, frames, raw tiles.
#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>

#include "agent/serve/pull_conversation.hpp"
#include "agent/serve/raw_tiles.hpp"
#include "base/hash.hpp"
#include "delta/frame.hpp"
#include "format/tiling.hpp"
#include "net/coroutine.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;

namespace {

constexpr std::uint64_t kExtentBytes = 8u << 20;        ///< of one extent message; a revocation between two is told
constexpr std::uint64_t kCopiedExtentBytes = 1u << 20;  ///< the same where it is copied out of the half first
constexpr std::uint64_t kFlushBytes = 1u << 20;         ///< frames are gathered up to this for one send
constexpr std::size_t kFlushFrames = 64;
constexpr auto kPackSlice = std::chrono::milliseconds(250);  ///< between looks at a peer whose tiles are being packed

std::string describe(const wire::TileRange& range) {
  return "tiles " + std::to_string(range.first) + " to " + std::to_string(range.end);
}

std::uint64_t tiles_in(const std::vector<wire::TileRange>& ranges) {
  std::uint64_t tiles = 0;
  for (const wire::TileRange& range : ranges) tiles += range.end - range.first;
  return tiles;
}

Error plan_over() {
  return {Errc::lease_revoked, "this plan is over; plan again"};
}
Error half_needed() {
  return {Errc::lease_revoked, "the half is needed by a writer; plan again"};
}

/// Byte range of a half that an extent covers.
struct ByteRange {
  std::uint64_t first = 0;
  std::uint64_t end = 0;
};

Result<ByteRange> extent_bytes(const Layout& layout, const wire::TileRange& range) {
  if (range.first >= range.end || range.end > layout.tile_count()) {
    return Error(Errc::out_of_range, describe(range) + " of " + std::to_string(layout.tile_count()));
  }
  const Tile first = tile_of(layout, range.first);
  const Tile last = tile_of(layout, range.end - 1);
  const Tensor& first_tensor = layout.tensors()[first.tensor];
  const Tensor& last_tensor = layout.tensors()[last.tensor];
  if (first.rect.col != 0 || last.rect.col + last.rect.cols != last_tensor.cols) {
    return Error(Errc::invalid_argument, describe(range) + " do not begin and end at whole bands");
  }
  return ByteRange{first_tensor.offset + first.rect.row * first_tensor.row_bytes(),
                   last_tensor.offset + (last.rect.row + last.rect.rows) * last_tensor.row_bytes()};
}

/// Where the bytes end before the tile that begins a band, which may be the one after the last: `range.end`.
std::uint64_t end_of_bands(const Layout& layout, const wire::TileRange& rest, const ByteRange& range) {
  if (rest.first == rest.end) return range.end;
  const Tile tile = tile_of(layout, rest.first);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  return tensor.offset + tile.rect.row * tensor.row_bytes();
}

Status check_ranges(const Layout& layout, const std::vector<wire::TileRange>& ranges) {
  if (!ranges.empty() && ranges.back().end > layout.tile_count()) {
    return Error(Errc::out_of_range, describe(ranges.back()) + " of " + std::to_string(layout.tile_count()));
  }
  return {};
}

/// On a packing thread. It is no Reader: no writer waits for a thread of low priority. What it copied counts if the
/// half still had that content afterwards.
Result<PackedFrame> pack_tiles(const AgentCore& core, const OpenPlan& plan, std::span<const std::uint64_t> tiles) {
  const trace::Span span("pack", plan.target());
  if (!plan.lease->live()) return half_needed();
  std::vector<std::byte> copy(delta::tile_bytes(*plan.layout, tiles));
  if (!copy_while_served(*plan.served, tiles, copy.data())) return half_needed();
  if (core.options().before_pack) core.options().before_pack();
  PackedFrame made{delta::packed_frame_of_copy(*plan.layout, copy, tiles, *plan.served->digests), 0};
  made.hash = xxh3_64(made.frame.bytes);
  return made;
}

/// Wakes the conversation's sending as long as it lives. Its strand's.
class Waker {
 public:
  Waker() = default;
  ~Waker() { *inside_ = false; }
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;
  std::function<void()> of(const net::MessageStream& stream) const {
    return [canceller = stream.canceller(), inside = inside_] { canceller.cancel_while(inside); };
  }

 private:
  const std::shared_ptr<bool> inside_ = std::make_shared<bool>(true);
};

/// Messages gathered for one send. Holds headers and cut frames; whole frames are sent from where the ring keeps them.
class Outbox {
 public:
  explicit Outbox(std::uint64_t request) : request_(request) { headers_.reserve(kFlushFrames + 1); }

  void add(ByteSpan payload, std::uint64_t payload_hash) {
    end_joined();
    put(payload, payload_hash);
  }
  /// The wanted tiles of one of our own frames, with those of the frames before it in one. `held`: for its bytes.
  void add_part(const delta::Frame& frame, std::span<const delta::Batch> wanted, Room::Share held) {
    const std::size_t before = joined_.bytes();
    delta::cut_into(joined_, frame, wanted);
    held.shrink(joined_.bytes() - before + sizeof(delta::FrameHeader));
    joined_held_.push_back(std::move(held));
    if (joined_.bytes() >= delta::kJoinedBytes) end_joined();
  }
  bool full() const { return headers_.size() >= kFlushFrames || bytes_ >= kFlushBytes; }
  /// Nothing more is joined to what is.
  void end_joined() {
    if (joined_.tiles() != 0) {
      cut_.push_back(joined_.finish().bytes);
      put(cut_.back(), xxh3_64(cut_.back()));
    }
    std::move(joined_held_.begin(), joined_held_.end(), std::back_inserter(held_));
    joined_held_.clear();
  }
  std::span<const ByteSpan> pieces() const { return pieces_; }
  std::uint64_t bytes() const { return bytes_; }
  void clear() {
    headers_.clear();
    pieces_.clear();
    cut_.clear();
    held_.clear();
    bytes_ = 0;
  }

 private:
  void put(ByteSpan payload, std::uint64_t payload_hash) {
    headers_.push_back(frame_header(request_, payload.size(), payload_hash));
    pieces_.push_back(bytes_of(headers_.back()));
    pieces_.push_back(payload);
    bytes_ += payload.size();
  }

  const std::uint64_t request_;
  std::vector<wire::Header> headers_;  // never grows beyond its reserve: pieces_ point into it
  std::vector<ByteSpan> pieces_;
  delta::FrameBuilder joined_;
  std::vector<std::vector<std::byte>> cut_;
  std::vector<Room::Share> joined_held_;
  std::vector<Room::Share> held_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

Damage::Target target_of(const OpenPlan& plan) {
  return {*plan.layout, plan.target(), plan.target_root()};
}

Result<OpenPlanPtr> PullConversation::find_plan(std::uint64_t id) {
  DS_ASSIGN(OpenPlanPtr plan, core_.open_plans().find(id));
  context_.children.heard(plan->connection);
  return plan;
}

Result<OpenPlanPtr> PullConversation::find_plan(const wire::RangesHead& head) {
  DS_ASSIGN(OpenPlanPtr plan, find_plan(head.plan));
  if (head.ranges > plan->layout->tile_count()) {
    return Error(Errc::out_of_range,
                 std::to_string(head.ranges) + " ranges of " + std::to_string(plan->layout->tile_count()) + " tiles");
  }
  return plan;
}

asio::awaitable<Status> PullConversation::send(std::span<const ByteSpan> pieces,
                                               const net::MessageStream::MaySend& permit) {
  if (!permit.may_send()) co_return plan_over();
  mid_message_ = true;
  DS_CO_TRY(co_await stream_.write_pieces(pieces, limits_.progress, &permit));
  mid_message_ = false;
  co_return Status();
}

asio::awaitable<Status> PullConversation::on_get_digests(Request& request) {
  DS_CO_ASSIGN(const wire::GetDigests wanted, wire::GetDigests::decode(request.payload));
  std::shared_ptr<const std::vector<std::uint64_t>> digests;
  Room::Share held;
  {
    const auto plan = find_plan(wanted.plan);
    if (!plan) co_return co_await refuse(request, plan.error());
    asked_ = (*plan)->target();
    if (const ServedPtr& served = (*plan)->served) digests = served->digests;
    if (const SubsetPtr& subset = (*plan)->subset; digests && subset) {
      auto room = co_await hold(subset->tiles().tiles() * sizeof(std::uint64_t));
      if (!room) co_return co_await refuse(request, std::move(room).error());
      held = *std::move(room);
      digests = std::make_shared<const std::vector<std::uint64_t>>(subset->tiles().gather(*digests));
    }
  }
  if (!digests) co_return co_await refuse(request, Error(Errc::invalid_argument, "digests belong to full plans"));
  const auto bytes = std::as_bytes(std::span(*digests));
  DS_CO_TRY(co_await stream_.write(wire::Type::digests, request.header.request, bytes, limits_.progress));
  Metrics::add(core_.metrics().bytes_digests, bytes.size());
  co_return Status();
}

asio::awaitable<Status> PullConversation::on_get_extent(Request& request) {
  DS_CO_ASSIGN(const wire::GetExtent wanted, wire::GetExtent::decode(request.payload));
  auto plan = find_plan(wanted.plan);
  if (!plan) co_return co_await refuse(request, std::move(plan).error());
  const Status sent = co_await send_extents(request.header.request, std::move(plan).value(), wanted.tiles);
  co_return co_await conclude(request, sent);
}

/// A revocation is told between two extents.
asio::awaitable<Status> PullConversation::send_extents(std::uint64_t request, OpenPlanPtr plan, wire::TileRange tiles) {
  if (!plan->lease) co_return Error(Errc::invalid_argument, "extents belong to full plans");
  asked_ = plan->target();
  DS_CO_ASSIGN(const ByteRange range, extent_bytes(*plan->layout, tiles));
  const Waker waker;
  DS_CO_ASSIGN(const auto permit, core_.open_plans().enter(*plan, waker.of(stream_)));
  std::uint64_t end = plan->served->arriving ? range.first : range.end;  // of what is there
  for (std::uint64_t at = range.first; at < range.end;) {
    if (at == end) {
      DS_CO_ASSIGN(tiles.first, co_await wait_for_tiles(*plan, tiles, permit));
      end = end_of_bands(*plan->layout, tiles, range);
    }
    const std::uint64_t copied = std::min(end - at, kCopiedExtentBytes);
    const auto room = plan->copied ? core_.copy_room().take(copied) : std::nullopt;
    if (room) {
      DS_CO_TRY(co_await send_extent_copy(request, *plan, at, copied, permit));
      at += copied;
      continue;
    }
    const std::uint64_t bytes = std::min(end - at, kExtentBytes);
    DS_CO_ASSIGN(const auto reader, core_.leases().enter(plan->lease, waker.of(stream_)));
    DS_CO_TRY(co_await send_extent(request, *plan, at, bytes, reader));
    at += bytes;
  }
  co_return Status();
}

/// Pages go from the segment to the socket by sendfile. After a revocation the connection is closed, since the extent's
/// header has promised more.
asio::awaitable<Status> PullConversation::send_extent(std::uint64_t request, const OpenPlan& plan, std::uint64_t at,
                                                      std::uint64_t bytes, const LeaseTable::Reader& reader) {
  const wire::Header header = wire::make_header(wire::Type::extent, request, {}, bytes);
  const std::array<ByteSpan, 1> pieces{bytes_of(header)};
  DS_CO_TRY(co_await send(pieces, reader));
  mid_message_ = true;
  std::uint64_t sent = 0;
  const Status status = co_await stream_.send_file(plan.served->file(), plan.served->file_offset() + at, bytes, reader,
                                                   limits_.progress, &sent);
  Metrics::add(core_.metrics().bytes_extent, sent);
  if (!status) co_return status;
  mid_message_ = false;
  co_return Status();
}

/// For peers that are too slow for the trainer's steps, or do not read at all: what was copied once is sent whatever
/// becomes of the half.
asio::awaitable<Status> PullConversation::send_extent_copy(std::uint64_t request, const OpenPlan& plan,
                                                           std::uint64_t at, std::uint64_t bytes,
                                                           const net::MessageStream::MaySend& permit) {
  std::vector<std::byte> copy;
  {
    DS_CO_ASSIGN(const auto reader, core_.leases().enter(plan.lease, [] {}));
    const ByteSpan from = plan.served->bytes().subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(bytes));
    copy.assign(from.begin(), from.end());
  }
  const wire::Header header = wire::make_header(wire::Type::extent, request, {}, bytes);
  const std::array<ByteSpan, 2> pieces{bytes_of(header), copy};
  DS_CO_TRY(co_await send(pieces, permit));
  Metrics::add(core_.metrics().bytes_extent, bytes);
  co_return Status();
}

asio::awaitable<Status> PullConversation::on_get_frames(Request& request) {
  DS_CO_ASSIGN(const wire::RangesHead head, wire::GetFrames::decode_head(request.payload));
  auto plan = find_plan(head);
  if (!plan) co_return co_await refuse(request, std::move(plan).error());
  DS_CO_ASSIGN(wire::GetFrames wanted, wire::GetFrames::decode(request.payload));
  std::vector<std::byte>().swap(request.payload);
  const Status sent = co_await send_frames(request.header.request, std::move(plan).value(), std::move(wanted));
  co_return co_await conclude(request, sent);
}

asio::awaitable<Status> PullConversation::send_frames(std::uint64_t request, OpenPlanPtr plan, wire::GetFrames wanted) {
  if (wanted.step >= plan->steps.size()) {
    co_return Error(Errc::out_of_range,
                    "step " + std::to_string(wanted.step) + " of " + std::to_string(plan->steps.size()));
  }
  DS_CO_TRY(check_ranges(*plan->layout, wanted.ranges));
  asked_ = plan->steps[wanted.step]->to.id;
  const Waker waker;
  DS_CO_ASSIGN(const auto reader, core_.open_plans().enter(*plan, waker.of(stream_)));
  if (plan->subset) wanted.ranges = plan->subset->tiles().intersect(wanted.ranges);
  const RingEntryPtr entry = plan->steps[wanted.step];
  if (entry->arriving) co_return co_await send_arriving_frames(request, *plan, *entry, wanted.ranges, reader);
  const std::vector<delta::Frame>& frames = entry->delta->frames;
  const std::vector<wire::TileRange>& ranges = wanted.ranges;
  std::vector<delta::Batch> inside;
  Outbox outbox(request);
  auto frame = frames.begin();
  auto range = ranges.begin();
  for (;;) {
    if (range != ranges.end()) {
      frame = std::lower_bound(frame, frames.end(), range->first,
                               [](const delta::Frame& f, std::uint64_t tile) { return f.last_tile < tile; });
    }
    const bool last = range == ranges.end() || frame == frames.end();
    if (last) outbox.end_joined();
    if (last || outbox.full()) {
      DS_CO_TRY(co_await send(outbox.pieces(), reader));
      Metrics::add(core_.metrics().bytes_frames, outbox.bytes());
      outbox.clear();
    }
    if (last) co_return Status();
    if (range->end <= frame->first_tile) {
      ++range;
      continue;
    }
    // The ranges that touch this frame: from `range` up to `beyond`.
    const auto beyond = std::lower_bound(range, ranges.end(), frame->last_tile + 1,
                                         [](const wire::TileRange& r, std::uint64_t tile) { return r.first < tile; });
    if (range->first <= frame->first_tile && range->end > frame->last_tile) {
      const auto index = static_cast<std::size_t>(frame - frames.begin());
      outbox.add(frame->bytes, entry->frame_hashes[index]);
    } else {
      auto held = core_.peer_room().take(frame->bytes.size());
      if (!held) {
        // What waits to be sent goes first: nobody waits for memory with some of an answer's in hand.
        outbox.end_joined();
        DS_CO_TRY(co_await send(outbox.pieces(), reader));
        Metrics::add(core_.metrics().bytes_frames, outbox.bytes());
        outbox.clear();
        DS_CO_ASSIGN(held, co_await hold(frame->bytes.size(), &reader));
      }
      inside.clear();
      for (auto r = range; r != beyond; ++r) inside.push_back({r->first, r->end});
      outbox.add_part(*frame, inside, *std::move(held));
    }
    // A range that goes on past the frame stays; those inside are done.
    while (range != ranges.end() && range->end <= frame->last_tile + 1) ++range;
    ++frame;
  }
}

asio::awaitable<Status> PullConversation::on_get_raw_tiles(Request& request) {
  DS_CO_ASSIGN(const wire::RangesHead head, wire::GetRawTiles::decode_head(request.payload));
  auto plan = find_plan(head);
  if (!plan) co_return co_await refuse(request, std::move(plan).error());
  DS_CO_ASSIGN(wire::GetRawTiles wanted, wire::GetRawTiles::decode(request.payload));
  std::vector<std::byte>().swap(request.payload);
  const Status sent = co_await send_raw_tiles(request.header.request, std::move(plan).value(), std::move(wanted));
  co_return co_await conclude(request, sent);
}

asio::awaitable<Status> PullConversation::send_raw_tiles(std::uint64_t request, OpenPlanPtr plan,
                                                         wire::GetRawTiles wanted) {
  if (!plan->lease) co_return Error(Errc::invalid_argument, "raw tiles belong to full plans");
  asked_ = plan->target();
  const Layout& layout = *plan->layout;
  DS_CO_TRY(check_ranges(layout, wanted.ranges));
  const Waker waker;
  DS_CO_ASSIGN(const auto sender, core_.open_plans().enter(*plan, waker.of(stream_)));
  if (plan->subset) wanted.ranges = plan->subset->tiles().intersect(wanted.ranges);
  // Few tiles are asked for when others did not verify: better found here than by each receiver.
  constexpr std::uint64_t kFewTiles = 64;
  if (tiles_in(wanted.ranges) <= kFewTiles) {
    const std::string who = "a repair of \"" + name_ + "\" at " + address_;
    if (plan->served->arriving) {
      static_cast<void>(core_.arrival().check(*plan->served, wanted.ranges, who));
    } else {
      static_cast<void>(core_.damage().check(target_of(*plan), wanted.ranges, who));
    }
  }
  RawTileRuns runs(layout, plan->served->generation->batches, std::move(wanted.ranges));
  if (wanted.form == wire::RawForm::packed) co_return co_await send_packed(request, plan, runs, sender);
  while (runs.more()) {
    const std::vector<std::uint64_t> tiles = runs.next();
    DS_CO_TRY(co_await wait_for_tiles(*plan, tiles, sender));
    DS_CO_ASSIGN(const Room::Share held, co_await hold(delta::tile_bytes(layout, tiles), &sender));
    DS_CO_ASSIGN(const PackedFramePtr made, make_raw(*plan, tiles));
    DS_CO_TRY(co_await send_tiles(request, *made, sender));
  }
  co_return Status();
}

asio::awaitable<Status> PullConversation::send_tiles(std::uint64_t request, const PackedFrame& made,
                                                     const net::MessageStream::MaySend& permit) {
  const wire::Header header = frame_header(request, made.frame.bytes.size(), made.hash);
  const std::array<ByteSpan, 2> pieces{bytes_of(header), made.frame.bytes};
  DS_CO_TRY(co_await send(pieces, permit));
  Metrics::add(core_.metrics().bytes_raw_tiles, made.frame.bytes.size());
  co_return Status();
}

/// The copy is the only reading: nothing of the half is touched once it is made.
Result<PackedFramePtr> PullConversation::make_raw(const OpenPlan& plan, std::span<const std::uint64_t> tiles) {
  auto made = std::make_shared<PackedFrame>();
  {
    DS_ASSIGN(const auto reader, core_.leases().enter(plan.lease, [] {}));
    made->frame = delta::raw_frame(*plan.layout, plan.served->bytes(), tiles, *plan.served->digests);
  }
  made->hash = xxh3_64(made->frame.bytes);
  return PackedFramePtr(std::move(made));
}

/// Packed on the packing threads, some frames ahead. A job that outlasts the answer has its own hold on the plan.
asio::awaitable<Status> PullConversation::send_packed(std::uint64_t request, OpenPlanPtr plan, RawTileRuns& runs,
                                                      const net::MessageStream::MaySend& permit) {
  if (core_.packers().threads() == 0) co_return Error(Errc::unsupported, "this agent packs no tiles");
  if (plan->served->arriving) co_return Error(Errc::unsupported, "what arrives is not packed");
  PackAhead ahead(core_.packers(), plan->packed_frames, stream_.executor());
  std::shared_ptr<const PackAhead::Tiles> next;
  std::deque<Room::Share> held;  // of each frame that is ahead
  for (;;) {
    while ((next || runs.more()) && ahead.may_begin()) {
      if (!next) next = std::make_shared<const PackAhead::Tiles>(runs.next());
      const std::uint64_t bytes = delta::tile_bytes(*plan->layout, *next);
      auto share = core_.peer_room().take(bytes);
      if (!share && !ahead.empty()) break;  // what is ahead goes first, as above
      if (!share) {
        DS_CO_ASSIGN(share, co_await hold(bytes, &permit));
      }
      held.push_back(*std::move(share));
      ahead.begin(next, [&core = core_, plan, tiles = next] { return pack_tiles(core, *plan, *tiles); });
      next.reset();
    }
    if (ahead.empty()) co_return Status();
    const Room::Share sent = std::move(held.front());
    held.pop_front();
    DS_CO_ASSIGN(const PackedFramePtr made, co_await next_packed(ahead, *plan, permit));
    DS_CO_TRY(co_await send_tiles(request, *made, permit));
  }
}

/// The oldest of `ahead`; raw if the packing threads do not get to it in time: a receiver gives up a stream that is
/// silent for long, and asks again.
asio::awaitable<Result<PackedFramePtr>> PullConversation::next_packed(PackAhead& ahead, const OpenPlan& plan,
                                                                      const net::MessageStream::MaySend& permit) {
  for (;;) {
    const std::chrono::nanoseconds left = limits_.pack - ahead.age();
    if (co_await ahead.wait(std::min<std::chrono::nanoseconds>(kPackSlice, left))) co_return ahead.take();
    if (context_.stopping) co_return Error(Errc::connection, "the agent is shutting down");
    if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer left while its tiles were packed");
    if (!permit.may_send()) co_return plan_over();
    if (!plan.lease->live()) co_return half_needed();
    if (ahead.age() < limits_.pack) continue;
    Result<PackedFramePtr> raw = make_raw(plan, ahead.front_tiles());
    ahead.drop();
    co_return raw;
  }
}

}  // namespace deltasync::agent
