// The requests that move bytes: digests, extents, frames, raw tiles.
#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "agent/pull_conversation.hpp"
#include "base/hash.hpp"
#include "net/coroutine.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;

namespace {

constexpr std::uint64_t kExtentBytes = 8u << 20;  ///< of one extent message; a revocation between two is told
constexpr std::uint64_t kFlushBytes = 1u << 20;   ///< frames are gathered up to this for one send
constexpr std::size_t kFlushFrames = 64;
constexpr std::uint64_t kRawFrameBytes = 4u << 20;  ///< of half bytes in one frame of raw tiles
constexpr std::size_t kRawFrameTiles = 4096;

std::string describe(const wire::TileRange& range) {
  return "tiles " + std::to_string(range.first) + " to " + std::to_string(range.end);
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
  const Tile first = layout.tile(range.first);
  const Tile last = layout.tile(range.end - 1);
  const Tensor& first_tensor = layout.tensors()[first.tensor];
  const Tensor& last_tensor = layout.tensors()[last.tensor];
  if (first.rect.col != 0 || last.rect.col + last.rect.cols != last_tensor.cols) {
    return Error(Errc::invalid_argument, describe(range) + " do not begin and end at whole bands");
  }
  return ByteRange{first_tensor.offset + first.rect.row * first_tensor.row_bytes(),
                   last_tensor.offset + (last.rect.row + last.rect.rows) * last_tensor.row_bytes()};
}

Status check_ranges(const Layout& layout, const std::vector<wire::TileRange>& ranges) {
  if (!ranges.empty() && ranges.back().end > layout.tile_count()) {
    return Error(Errc::out_of_range, describe(ranges.back()) + " of " + std::to_string(layout.tile_count()));
  }
  return {};
}

std::vector<delta::Batch> to_batches(const std::vector<wire::TileRange>& ranges) {
  std::vector<delta::Batch> batches;
  batches.reserve(ranges.size());
  for (const wire::TileRange& range : ranges) batches.push_back({range.first, range.end});
  return batches;
}

/// The header of a frame message whose payload hash is known: a ring's frames are hashed once for all receivers.
wire::Header frame_header(std::uint64_t request, std::uint64_t payload_bytes, std::uint64_t payload_hash) {
  wire::Header header;
  header.type = static_cast<std::uint16_t>(wire::Type::frame);
  header.request = request;
  header.payload_bytes = payload_bytes;
  header.payload_hash = payload_hash;
  header.header_hash = xxh3_64(bytes_of(header).first(offsetof(wire::Header, header_hash)));
  return header;
}

/// Messages gathered for one send. Holds headers and cut frames; whole frames are sent from where the ring keeps them.
class Outbox {
 public:
  Outbox() { headers_.reserve(kFlushFrames); }

  void add(std::uint64_t request, ByteSpan payload, std::uint64_t payload_hash) {
    headers_.push_back(frame_header(request, payload.size(), payload_hash));
    pieces_.push_back(bytes_of(headers_.back()));
    pieces_.push_back(payload);
    bytes_ += payload.size();
  }
  bool full() const { return headers_.size() == kFlushFrames || bytes_ >= kFlushBytes; }
  std::span<const ByteSpan> pieces() const { return pieces_; }
  std::uint64_t bytes() const { return bytes_; }
  void clear() {
    headers_.clear();
    pieces_.clear();
    cut_.clear();
    bytes_ = 0;
  }
  ByteSpan keep(std::vector<std::byte> bytes) {
    cut_.push_back(std::move(bytes));
    return cut_.back();
  }

 private:
  std::vector<wire::Header> headers_;  // never grows beyond its reserve: pieces_ point into it
  std::vector<ByteSpan> pieces_;
  std::vector<std::vector<std::byte>> cut_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

asio::awaitable<Status> PullConversation::on_get_digests(const Request& request) {
  DS_CO_ASSIGN(const wire::GetDigests wanted, wire::GetDigests::decode(request.payload));
  auto plan = core_.find_plan(wanted.plan);
  if (!plan) co_return co_await refuse(request, std::move(plan).error());
  if (!(*plan)->served) {
    co_return co_await refuse(request, Error(Errc::invalid_argument, "digests belong to full plans"));
  }
  const auto digests = (*plan)->served->digests;
  const auto bytes = std::as_bytes(std::span(*digests));
  Metrics::add(core_.metrics().bytes_digests, bytes.size());
  co_return co_await stream_.write(wire::Type::digests, request.header.request, bytes, limits_.progress);
}

asio::awaitable<Status> PullConversation::on_get_extent(const Request& request) {
  DS_CO_ASSIGN(const wire::GetExtent wanted, wire::GetExtent::decode(request.payload));
  auto plan = core_.find_plan(wanted.plan);
  if (!plan) co_return co_await refuse(request, std::move(plan).error());
  if (!(*plan)->lease) {
    co_return co_await refuse(request, Error(Errc::invalid_argument, "extents belong to full plans"));
  }
  const auto range = extent_bytes(*(*plan)->layout, wanted.tiles);
  if (!range) co_return co_await refuse(request, range.error());
  co_return co_await send_extents(request, **plan, range->first, range->end);
}

/// Pages go from the segment to the socket by sendfile. A revocation is told between two extents; within one the
/// connection is closed, since its header has promised more.
asio::awaitable<Status> PullConversation::send_extents(const Request& request, const OpenPlan& plan,
                                                       std::uint64_t first, std::uint64_t end) {
  const auto inside = std::make_shared<bool>(true);
  auto reader =
      core_.leases().enter(plan.lease, [canceller = stream_.canceller(), inside] { canceller.cancel_while(inside); });
  if (!reader) co_return co_await refuse(request, std::move(reader).error());
  const shm::Segment& segment = *plan.served->generation->segment;
  const std::uint64_t half_begin = segment.half_file_offset(plan.served->half.half);

  Status status;
  std::uint64_t sent = 0;
  for (std::uint64_t at = first; at < end && status;) {
    if (!reader->may_send()) {
      status = Error(Errc::lease_revoked, "the half is needed by a writer; plan anew");
      break;
    }
    const std::uint64_t bytes = std::min(end - at, kExtentBytes);
    const wire::Header header = wire::make_header(wire::Type::extent, request.header.request, {}, bytes);
    const std::array<ByteSpan, 1> pieces{bytes_of(header)};
    mid_message_ = true;
    status = co_await stream_.write_pieces(pieces, limits_.progress);
    if (!status) break;
    status = co_await stream_.send_file(segment.file(), half_begin + at, bytes, *reader, limits_.progress, &sent);
    if (!status) break;
    mid_message_ = false;
    at += bytes;
  }
  *inside = false;
  Metrics::add(core_.metrics().bytes_extent, sent);
  if (!status && status.error().code() == Errc::lease_revoked && !mid_message_) {
    co_return co_await refuse(request, std::move(status).error());
  }
  if (!status) co_return status;
  co_return co_await send_end(request);
}

asio::awaitable<Status> PullConversation::on_get_frames(const Request& request) {
  DS_CO_ASSIGN(const wire::GetFrames wanted, wire::GetFrames::decode(request.payload));
  auto plan = core_.find_plan(wanted.plan);
  if (!plan) co_return co_await refuse(request, std::move(plan).error());
  if (wanted.step >= (*plan)->steps.size()) {
    co_return co_await refuse(request, Error(Errc::out_of_range, "step " + std::to_string(wanted.step) + " of " +
                                                                     std::to_string((*plan)->steps.size())));
  }
  if (auto checked = check_ranges(*(*plan)->layout, wanted.ranges); !checked) {
    co_return co_await refuse(request, std::move(checked).error());
  }
  const RingEntryPtr entry = (*plan)->steps[wanted.step];
  const std::vector<delta::Frame>& frames = entry->delta->frames;
  const std::vector<delta::Batch> ranges = to_batches(wanted.ranges);
  Outbox outbox;
  auto frame = frames.begin();
  auto range = ranges.begin();
  while (range != ranges.end()) {
    frame = std::lower_bound(frame, frames.end(), range->first,
                             [](const delta::Frame& f, std::uint64_t tile) { return f.last_tile < tile; });
    if (frame == frames.end()) break;
    if (range->end <= frame->first_tile) {
      ++range;
      continue;
    }
    // The ranges that touch this frame: from `range` up to `beyond`.
    const auto beyond = std::lower_bound(range, ranges.end(), frame->last_tile + 1,
                                         [](const delta::Batch& r, std::uint64_t tile) { return r.first < tile; });
    if (range->first <= frame->first_tile && range->end > frame->last_tile) {
      const auto index = static_cast<std::size_t>(frame - frames.begin());
      outbox.add(request.header.request, frame->bytes, entry->frame_hashes[index]);
    } else {
      delta::Frame cut = delta::cut_frame(*frame, std::span<const delta::Batch>(range, beyond));
      if (!cut.bytes.empty()) {
        const ByteSpan kept = outbox.keep(std::move(cut.bytes));
        outbox.add(request.header.request, kept, xxh3_64(kept));
      }
    }
    // A range that goes on past the frame stays; those inside are done.
    while (range != ranges.end() && range->end <= frame->last_tile + 1) ++range;
    ++frame;
    if (!outbox.full()) continue;
    Metrics::add(core_.metrics().bytes_frames, outbox.bytes());
    DS_CO_TRY(co_await stream_.write_pieces(outbox.pieces(), limits_.progress));
    outbox.clear();
  }
  Metrics::add(core_.metrics().bytes_frames, outbox.bytes());
  DS_CO_TRY(co_await stream_.write_pieces(outbox.pieces(), limits_.progress));
  co_return co_await send_end(request);
}

asio::awaitable<Status> PullConversation::on_get_raw_tiles(const Request& request) {
  DS_CO_ASSIGN(const wire::GetRawTiles wanted, wire::GetRawTiles::decode(request.payload));
  auto found = core_.find_plan(wanted.plan);
  if (!found) co_return co_await refuse(request, std::move(found).error());
  const OpenPlan& plan = **found;
  if (!plan.lease) co_return co_await refuse(request, Error(Errc::invalid_argument, "raw tiles belong to full plans"));
  const Layout& layout = *plan.layout;
  if (auto checked = check_ranges(layout, wanted.ranges); !checked) {
    co_return co_await refuse(request, std::move(checked).error());
  }
  const HalfKey& key = plan.served->half;
  const ByteSpan half = plan.served->generation->segment->half(key.half);
  std::vector<std::uint64_t> tiles;
  auto range = wanted.ranges.begin();
  std::uint64_t next = range == wanted.ranges.end() ? 0 : range->first;
  while (range != wanted.ranges.end()) {
    tiles.clear();
    for (std::uint64_t bytes = 0; range != wanted.ranges.end() && tiles.size() < kRawFrameTiles;) {
      const Tile tile = layout.tile(next);
      const std::uint64_t tile_bytes = tile.rect.elements() * layout.tensors()[tile.tensor].element_bytes;
      if (!tiles.empty() && bytes + tile_bytes > kRawFrameBytes) break;
      bytes += tile_bytes;
      tiles.push_back(next);
      if (++next == range->end && ++range != wanted.ranges.end()) next = range->first;
    }
    // The copy is the only reading: nothing of the half is touched once it is made.
    delta::Frame frame;
    {
      const auto reader = core_.leases().enter(plan.lease, [] {});
      if (!reader) co_return co_await refuse(request, reader.error());
      frame = delta::raw_frame(layout, half, tiles, *plan.served->digests);
    }
    Metrics::add(core_.metrics().bytes_raw_tiles, frame.bytes.size());
    DS_CO_TRY(co_await stream_.write(wire::Type::frame, request.header.request, frame.bytes, limits_.progress));
  }
  co_return co_await send_end(request);
}

}  // namespace deltasync::agent
