// Requests for tiles of a version that arrives: they are answered as the tiles come.
#include <algorithm>
#include <chrono>

#include "agent/serve/pull_conversation.hpp"
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

/// Arrival ends the lease where no tiles come for long.
asio::awaitable<Status> PullConversation::wait_for_more(const OpenPlan& plan, std::chrono::milliseconds& look,
                                                        const net::MessageStream::MaySend& permit) {
  DS_CO_TRY(co_await wait_for_version(Deadline::after(look)));
  look = std::min<std::chrono::milliseconds>(2 * look, kArrivalLookMax);
  if (context_.stopping) co_return Error(Errc::connection, "the agent is shutting down");
  if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer left while it waited for tiles");
  if (!permit.may_send()) co_return Error(Errc::lease_revoked, "this plan is over; plan again");
  if (plan.lease->live()) co_return Status();
  co_return Error(Errc::lease_revoked,
                  "no more tiles of " + to_string(plan.served->version) + " come from the relay; plan again");
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

}  // namespace deltasync::agent
