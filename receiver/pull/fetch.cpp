#include "receiver/pull/fetch.hpp"

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/trace.hpp"
#include "format/tiling.hpp"

namespace deltasync::receiver {
namespace {

/// The `error` message that stands where a reply was due.
Outcome agent_refused(Connection& connection, const wire::Header& header, Deadline deadline) {
  auto payload = connection.recv_payload(header, deadline);
  if (!payload) return Outcome::broken(std::move(payload).error());
  return Outcome::refused(agent_error(*payload));
}

bool is(const wire::Header& header, wire::Type type) {
  return header.type == static_cast<std::uint16_t>(type);
}

/// A header that may not come for `silence`; the deadline of the pull is longer.
Result<wire::Header> next_header(Connection& connection, Deadline deadline) {
  return connection.recv_header(deadline.earlier(Deadline::after(connection.silence())));
}

/// The `end` that closes a reply whose parts are all in.
Outcome receive_end(Connection& connection, std::uint64_t request, Deadline deadline) {
  auto header = next_header(connection, deadline);
  if (!header) return Outcome::broken(std::move(header).error());
  if (is(*header, wire::Type::error)) return agent_refused(connection, *header, deadline);
  if (!is(*header, wire::Type::end) || header->request != request || header->payload_bytes != 0) {
    return Outcome::broken(unexpected(*header, request));
  }
  return Outcome::ok();
}

/// Whether it says that the target could not be read or written, and nothing about what came.
bool is_the_targets(Errc code) {
  return code == Errc::io || code == Errc::timed_out || code == Errc::cancelled || code == Errc::no_space;
}

}  // namespace

double thread_cpu_s() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::uint64_t frame_bytes_bound(const wire::DeltaStep& step) {
  return 2 * std::min(step.frame_bytes, kModelBytesMax) + (1u << 20);
}

std::uint64_t raw_bytes_bound(std::uint64_t tiles) {
  return tiles * (std::uint64_t{kTileElementsMax} * 8 + 256) * 2 + (1u << 20);
}

std::uint64_t frame_parts(std::uint64_t frame_bytes, const Tuning& tuning) {
  return 1 + frame_bytes / tuning.frame_item_bytes;
}

std::string tile_name(const Layout& layout, std::uint64_t tile) {
  return "tile " + std::to_string(tile) + " of " + layout.tensors()[layout.tensor_of_tile(tile)].spec.name;
}

// ---- extents -------------------------------------------------------------------------------------------------

bool bands_are_too_long(const Layout& layout, Target& target, std::uint32_t tensor) {
  CanLendRows* const lender = target.capabilities().rows;
  if (lender != nullptr && lender->full_rows(tensor) != nullptr) return false;
  return grid_of(layout, tensor).band_rows * layout.tensors()[tensor].row_bytes() > kBandBytesMax;
}

void HalfScatter::seek(std::uint32_t tensor, std::uint64_t half_offset) {
  tensor_ = tensor;
  position_ = half_offset;
}

std::uint64_t HalfScatter::next(std::uint64_t bytes_max, std::vector<iovec>& pieces) {
  pieces.clear();
  const auto tensors = layout_.tensors();
  std::uint64_t covered = 0;
  while (covered < bytes_max && pieces.size() < kPiecesMax) {
    // The caller never goes past the last tile, so there is a tensor at or after the position.
    while (tensors[tensor_].offset + tensors[tensor_].bytes <= position_) ++tensor_;
    const Tensor& tensor = tensors[tensor_];
    const bool padding = position_ < tensor.offset;
    std::uint64_t bytes = padding ? tensor.offset - position_ : tensor.offset + tensor.bytes - position_;
    if (padding) bytes = std::min<std::uint64_t>(bytes, sizeof scratch_);
    bytes = std::min(bytes, bytes_max - covered);
    std::byte* const to = padding ? scratch_ : place(tensor, bytes);
    pieces.push_back({to, static_cast<std::size_t>(bytes)});
    position_ += bytes;
    covered += bytes;
    if (!padding && position_ == band_end_) break;
  }
  return covered;
}

std::byte* HalfScatter::place(const Tensor& tensor, std::uint64_t& bytes) {
  if (std::byte* const rows = rows_of(tensor_)) return rows + (position_ - tensor.offset);
  if (position_ < band_begin_ || position_ >= band_end_) enter_band(tensor);
  bytes = std::min(bytes, band_end_ - position_);
  return band_.data() + (position_ - band_begin_);
}

void HalfScatter::enter_band(const Tensor& tensor) {
  if (grid_.bands() == 0 || grid_tensor_ != tensor_) grid_ = grid_of(layout_, tensor_);
  grid_tensor_ = tensor_;
  const auto [row, rows] = grid_.band(grid_.band_of((position_ - tensor.offset) / tensor.row_bytes()));
  band_begin_ = tensor.offset + row * tensor.row_bytes();
  band_end_ = band_begin_ + rows * tensor.row_bytes();
  band_.resize(static_cast<std::size_t>(band_end_ - band_begin_));
}

TileRows HalfScatter::tile(const Tile& tile) {
  const Tensor& tensor = layout_.tensors()[tile.tensor];
  delta::TensorMemory memory{rows_of(tile.tensor), static_cast<std::size_t>(tensor.row_bytes())};
  if (memory.base == nullptr) {  // as if the whole tensor lay where its band does
    const std::uint64_t in_band = tensor.offset + tile.rect.row * memory.row_stride - band_begin_;
    return {band_.data() + in_band + tile.rect.col * tensor.element_bytes, memory.row_stride};
  }
  return {delta::tile_address(memory, tile, tensor.element_bytes), memory.row_stride};
}

Status HalfScatter::put(const Tile& tile, const TileRows& rows) {
  const bool buffered = rows.first >= band_.data() && rows.first < band_.data() + band_.size();
  if (!buffered) return {};
  return target_.put_tile(tile, rows);
}

/// Where the reception of one item stands.
struct ExtentFetch::Progress {
  HalfScatter scatter;
  std::vector<iovec> pieces;
  std::uint64_t position;   ///< next byte of the half to arrive
  std::uint64_t end;        ///< of the item, in bytes of the half
  std::uint64_t next_tile;  ///< first one not verified
  std::uint64_t end_tile;
  StreamTally& tally;
};

ExtentFetch::ExtentFetch(const Layout& layout, Target& target, std::span<const std::uint64_t> digests,
                         std::span<std::uint8_t> have, std::uint64_t plan, const Tuning& tuning, TransferMeter& meter,
                         unsigned streams)
    : layout_(layout),
      target_(target),
      relay_(target.capabilities().hand_on),
      digests_(digests),
      have_(have),
      plan_(plan),
      tuning_(tuning),
      meter_(meter),
      tallies_(streams) {}

Status ExtentFetch::ask(Connection& connection, std::uint64_t request, const Item& item, Deadline deadline) {
  return connection.send(request, wire::GetExtent{plan_, item.ranges.front()}, deadline);
}

Outcome ExtentFetch::receive(Connection& connection, std::uint64_t request, Item& item, Deadline deadline,
                             unsigned stream) {
  wire::TileRange& range = item.ranges.front();
  const Tile first = tile_of(layout_, range.first);
  const std::uint64_t begin = band_first_byte(layout_, first);
  Progress progress{HalfScatter(layout_, target_),
                    {},
                    begin,
                    band_end_byte(layout_, tile_of(layout_, range.end - 1)),
                    range.first,
                    range.end,
                    tallies_[stream]};
  progress.scatter.seek(first.tensor, begin);
  for (;;) {
    auto header = next_header(connection, deadline);
    if (!header) return Outcome::broken(std::move(header).error());
    if (is(*header, wire::Type::error)) return agent_refused(connection, *header, deadline);
    if (header->request != request) return Outcome::broken(unexpected(*header, request));
    if (!is(*header, wire::Type::extent)) return Outcome::broken(unexpected(*header, request));
    if (header->payload_bytes == 0 || header->payload_bytes > progress.end - progress.position) {
      return Outcome::broken(Error(Errc::protocol, "an extent of " + std::to_string(header->payload_bytes) +
                                                       " bytes where " +
                                                       std::to_string(progress.end - progress.position) + " are due"));
    }
    Outcome outcome = receive_extent(connection, header->payload_bytes, progress, deadline);
    range.first = progress.next_tile;  // verified, or known to be wrong: not asked for again here
    const bool whole = range.first == range.end;
    if (whole) item.ranges.clear();
    if (outcome.error) return outcome;
    if (whole) return receive_end(connection, request, deadline);
  }
}

std::string ExtentFetch::describe(const Item& item) const {
  return "extent from " + tile_name(layout_, item.ranges.front().first);
}

Outcome ExtentFetch::receive_extent(Connection& connection, std::uint64_t bytes, Progress& progress,
                                    Deadline deadline) {
  while (bytes > 0) {
    const std::uint64_t n = progress.scatter.next(std::min(bytes, tuning_.piece_bytes), progress.pieces);
    if (auto status = connection.recv_scattered(progress.pieces, deadline); !status) {
      return Outcome::broken(std::move(status).error());
    }
    progress.position += n;
    progress.tally.payload_bytes += n;
    bytes -= n;
    if (auto status = verify_up_to(progress); !status) return Outcome::untakeable(std::move(status).error());
  }
  return Outcome::ok();
}

Status ExtentFetch::verify_up_to(Progress& progress) {
  const double before = thread_cpu_s();
  std::uint64_t verified_bytes = 0;
  std::vector<std::uint64_t> verified;  // for who hands them on
  while (progress.next_tile < progress.end_tile) {
    const Tile tile = tile_of(layout_, progress.next_tile);
    if (band_end_byte(layout_, tile) > progress.position) break;
    const Tensor& tensor = layout_.tensors()[tile.tensor];
    const TileRows rows = progress.scatter.tile(tile);
    const std::uint64_t digest =
        delta::tile_digest(rows.first, rows.row_stride, tile.rect.rows, tile.rect.cols * tensor.element_bytes);
    const bool right = digest == digests_[progress.next_tile];
    if (right) DS_TRY(progress.scatter.put(tile, rows));
    if (right) verified_bytes += std::uint64_t{tile.rect.rows} * tile.rect.cols * tensor.element_bytes;
    have_[progress.next_tile] = right ? 1 : 0;
    if (right && relay_ != nullptr) verified.push_back(progress.next_tile);
    ++progress.next_tile;
    ++progress.tally.tiles;
  }
  progress.tally.verify_s += thread_cpu_s() - before;
  if (!verified.empty()) relay_->came(verified);
  if (verified_bytes > 0) meter_.add(verified_bytes);
  return {};
}

// ---- frames --------------------------------------------------------------------------------------------------

FrameFetch::FrameFetch(const Layout& layout, const TileSet& tiles, Kind kind, std::uint64_t plan,
                       std::uint64_t bytes_max, Sink sink, unsigned streams)
    : layout_(layout),
      tiles_(tiles),
      kind_(kind),
      plan_(plan),
      bytes_max_(bytes_max),
      sink_(std::move(sink)),
      tallies_(streams) {}

/// The agent cuts what it sends to the subscription: however many ranges that has, few are named.
Status FrameFetch::ask(Connection& connection, std::uint64_t request, const Item& item, Deadline deadline) {
  const Ranges named = tiles_.is_whole() ? item.ranges : tiles_.windows(item.ranges);
  if (kind_ == Kind::raw_tiles || kind_ == Kind::packed_tiles) {
    const auto form = kind_ == Kind::packed_tiles ? wire::RawForm::packed : wire::RawForm::plain;
    return connection.send(request, wire::GetRawTiles{plan_, named, form}, deadline);
  }
  return connection.send(request, wire::GetFrames{plan_, item.step, named}, deadline);
}

std::string FrameFetch::describe(const Item& item) const {
  const std::string what = kind_ == Kind::raw_tiles      ? "raw tiles"
                           : kind_ == Kind::packed_tiles ? "packed tiles"
                                                         : "delta step " + std::to_string(item.step + 1);
  return what + " from " + tile_name(layout_, item.ranges.front().first);
}

Status check_codec(const Layout& layout, const delta::TileRecord& record, bool classes) {
  // Each is named here, so that a codec that is added later has to be allowed too.
  switch (record.codec) {
    case delta::Codec::raw:
    case delta::Codec::rice_absolute:
    case delta::Codec::rice_ulp:
    case delta::Codec::dense_ulp: return {};
    case delta::Codec::rice_class:
      // It decodes over nothing but the base, more slowly, and undoing it takes memory: only for callers that expect
      // that.
      if (classes) return {};
      break;
    case delta::Codec::raw_planes: break;
  }
  return Error(Errc::protocol, tile_name(layout, record.tile) + " came in the codec " + to_string(record.codec) +
                                   ", which was not asked for");
}

Status FrameFetch::check_asked_for(const Item& item, const StagedFrame& frame) const {
  std::size_t hint = 0;
  for (const delta::TileRecord& record : frame.records) {
    if (!contains(item.ranges, record.tile, hint)) {
      return Error(Errc::protocol, tile_name(layout_, record.tile) + " came twice or was not asked for");
    }
    if (kind_ == Kind::packed_tiles && record.codec == delta::Codec::raw_planes) continue;
    DS_TRY(check_codec(layout_, record, kind_ == Kind::compact_frames));
  }
  return {};
}

Status FrameFetch::take(std::uint32_t step, StagedFrame frame, wire::TileRange tiles, unsigned stream) {
  const trace::Span span("verify", {{"bytes", frame.bytes.size()}, {"tiles", frame.records.size()}});
  return sink_(step, std::move(frame), tiles, stream);
}

Outcome FrameFetch::receive(Connection& connection, std::uint64_t request, Item& item, Deadline deadline,
                            unsigned stream) {
  StreamTally& tally = tallies_[stream];
  for (;;) {
    auto header = next_header(connection, deadline);
    if (!header) return Outcome::broken(std::move(header).error());
    if (is(*header, wire::Type::error)) return agent_refused(connection, *header, deadline);
    if (header->request != request) return Outcome::broken(unexpected(*header, request));
    if (is(*header, wire::Type::end) && header->payload_bytes == 0) break;
    if (!is(*header, wire::Type::frame)) return Outcome::broken(unexpected(*header, request));
    if (bytes_.fetch_add(header->payload_bytes) + header->payload_bytes > bytes_max_) {
      return Outcome::wrong(Error(Errc::protocol, "the frames hold more than the " + std::to_string(bytes_max_) +
                                                      " bytes that the plan named"));
    }
    StagedFrame frame;
    auto payload = connection.recv_payload(*header, deadline);
    if (!payload) {
      bytes_.fetch_sub(header->payload_bytes);
      return Outcome::broken(std::move(payload).error());
    }
    frame.bytes = std::move(*payload);
    tally.payload_bytes += frame.bytes.size();
    auto records = delta::parse_frame(layout_, frame.bytes);
    if (!records) return Outcome::wrong(std::move(records).error());
    frame.records = std::move(*records);
    if (frame.records.empty()) return Outcome::wrong(Error(Errc::corrupt, "a frame without tiles"));
    if (auto status = check_asked_for(item, frame); !status) return Outcome::wrong(std::move(status).error());
    const std::uint64_t last = frame.records.back().tile;
    const std::uint64_t tiles = frame.records.size();
    const double before = thread_cpu_s();
    auto taken = take(item.step, std::move(frame), {item.ranges.front().first, last + 1}, stream);
    tally.verify_s += thread_cpu_s() - before;
    if (!taken) {
      return is_the_targets(taken.error().code()) ? Outcome::untakeable(std::move(taken).error())
                                                  : Outcome::wrong(std::move(taken).error());
    }
    tally.tiles += tiles;
    drop_before(item.ranges, last + 1);
  }
  if (none_in_) {
    for (const wire::TileRange& range : item.ranges) none_in_(range);
  }
  item.ranges.clear();
  return Outcome::ok();
}

}  // namespace deltasync::receiver
