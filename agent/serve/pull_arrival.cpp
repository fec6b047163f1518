// Requests for tiles of a version that arrives, or frames of a delta that does: they are answered as these come.
#include <algorithm>
#include <array>
#include <chrono>

#include "agent/serve/pull_conversation.hpp"
#include "agent/serve/raw_tiles.hpp"
#include "base/hash.hpp"
#include "format/tiling.hpp"
#include "net/coroutine.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;

namespace {

constexpr auto kArrivalLookMin = std::chrono::milliseconds(1);  ///< between looks for the next tile; then doubled
constexpr auto kArrivalLookMax = std::chrono::milliseconds(100);

/// The first tile of the band that this one belongs to.
std::uint64_t first_of_band(const Layout& layout, std::uint64_t index) {
  const Tile tile = tile_of(layout, index);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  if (tile.rect.cols == tensor.cols) return index;
  const std::uint64_t panels = grid_of(layout, tile.tensor).panels();
  return index - (index - tensor.first_tile) % panels;
}

}  // namespace

/// Arrival ends the lease where no tiles come for long, DeltaArrival the delta where no frames do.
asio::awaitable<Status> PullConversation::wait_for_more(const OpenPlan& plan, std::chrono::milliseconds& look,
                                                        const net::MessageStream::MaySend& permit) {
  DS_CO_TRY(co_await wait_for_version(Deadline::after(look)));
  look = std::min<std::chrono::milliseconds>(2 * look, kArrivalLookMax);
  if (context_.stopping) co_return Error(Errc::connection, "the agent is shutting down");
  if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer left while it waited for tiles");
  if (!permit.may_send()) co_return Error(Errc::lease_revoked, "this plan is over; plan again");
  const bool comes = plan.lease ? plan.lease->live() : !plan.steps.front()->arriving->cut_short();
  if (comes) co_return Status();
  co_return Error(Errc::lease_revoked, "no more of " + to_string(plan.target()) + " comes from the relay; plan again");
}

asio::awaitable<Result<std::uint64_t>> PullConversation::wait_for_tiles(const OpenPlan& plan, wire::TileRange tiles,
                                                                        const net::MessageStream::MaySend& permit) {
  const shm::ArrivingMemory& memory = *plan.served->arriving;
  std::chrono::milliseconds look = kArrivalLookMin;
  for (;;) {
    std::uint64_t missing = tiles.first;
    while (missing != tiles.end && memory.in_place(missing)) ++missing;
    const std::uint64_t end = missing == tiles.end ? missing : first_of_band(*plan.layout, missing);
    if (end > tiles.first) co_return end;
    DS_CO_TRY(co_await wait_for_more(plan, look, permit));
  }
}

asio::awaitable<Status> PullConversation::wait_for_tiles(const OpenPlan& plan, std::span<const std::uint64_t> tiles,
                                                         const net::MessageStream::MaySend& permit) {
  if (!plan.served->arriving) co_return Status();
  std::chrono::milliseconds look = kArrivalLookMin;
  for (const std::uint64_t tile : tiles) {
    while (!plan.served->arriving->in_place(tile)) DS_CO_TRY(co_await wait_for_more(plan, look, permit));
  }
  co_return Status();
}

/// A frame that is only in part asked for is cut: a receiver whose requests end elsewhere than the relay's did.
asio::awaitable<Status> PullConversation::send_arriving_frames(std::uint64_t request, const OpenPlan& plan,
                                                               const RingEntry& entry,
                                                               const std::vector<wire::TileRange>& ranges,
                                                               const net::MessageStream::MaySend& permit) {
  const auto frames_come = hear(entry.arriving->changes());
  std::chrono::milliseconds look = kArrivalLookMin;
  for (const wire::TileRange& range : ranges) {
    for (std::uint64_t at = range.first; at < range.end;) {
      const ArrivingDelta::Settled settled = entry.arriving->settled(at, range.end);
      if (settled.end == at) {
        DS_CO_TRY(co_await wait_for_more(plan, look, permit));
        continue;
      }
      look = kArrivalLookMin;
      const std::array<delta::Batch, 1> wanted{{{at, settled.end}}};
      for (const ArrivingDelta::PiecePtr& piece : settled.pieces) {
        const bool whole = piece->frame.first_tile >= at && piece->frame.last_tile < settled.end;
        const std::uint64_t cut_bytes = whole ? 0 : piece->frame.bytes.size();
        DS_CO_ASSIGN(const Room::Share held, co_await hold(cut_bytes, &permit));
        const delta::Frame cut = whole ? delta::Frame() : delta::cut_frame(piece->frame, wanted);
        const std::vector<std::byte>& bytes = whole ? piece->frame.bytes : cut.bytes;
        if (bytes.empty()) continue;
        const wire::Header header = frame_header(request, bytes.size(), whole ? piece->hash : xxh3_64(bytes));
        const std::array<ByteSpan, 2> pieces{bytes_of(header), bytes};
        DS_CO_TRY(co_await send(pieces, permit));
        Metrics::add(core_.metrics().bytes_frames, bytes.size());
      }
      at = settled.end;
    }
  }
  co_return Status();
}

}  // namespace deltasync::agent
