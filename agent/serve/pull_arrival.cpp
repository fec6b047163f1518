// Requests for tiles of a version that a relay is still writing: they are answered as the tiles come.
#include <algorithm>
#include <chrono>

#include "agent/serve/pull_conversation.hpp"
#include "format/tiling.hpp"
#include "net/coroutine.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;

namespace {

constexpr auto kArrivalLookMin = std::chrono::milliseconds(1);  ///< between looks for the next tile; then doubled
constexpr auto kArrivalLookMax = std::chrono::milliseconds(16);

/// The first tile of the band that this one belongs to.
std::uint64_t first_of_band(const Layout& layout, std::uint64_t index) {
  const Tile tile = tile_of(layout, index);
  const Tensor& tensor = layout.tensors()[tile.tensor];
  if (tile.rect.cols == tensor.cols) return index;
  const std::uint64_t panels = grid_of(layout, tile.tensor).panels();
  return index - (index - tensor.first_tile) % panels;
}

}  // namespace

asio::awaitable<Status> PullConversation::wait_for_more(const OpenPlan& plan, Deadline deadline,
                                                        std::chrono::milliseconds& look,
                                                        const net::MessageStream::MaySend& permit) {
  DS_CO_TRY(co_await wait_for_version(deadline.earlier(Deadline::after(look))));
  look = std::min<std::chrono::milliseconds>(2 * look, kArrivalLookMax);
  if (context_.stopping) co_return Error(Errc::connection, "the agent is shutting down");
  if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer left while it waited for tiles");
  if (!permit.may_send()) co_return Error(Errc::lease_revoked, "this plan is over; plan again");
  if (!plan.lease->live()) {
    co_return Error(Errc::lease_revoked,
                    "the relay stopped bringing " + to_string(plan.served->version) + "; plan again");
  }
  if (!deadline.passed()) co_return Status();
  co_return Error(Errc::lease_revoked, "no more tiles of " + to_string(plan.served->version) +
                                           " have come from the relay for a while; plan again");
}

asio::awaitable<Result<std::uint64_t>> PullConversation::wait_for_tiles(const OpenPlan& plan, wire::TileRange tiles,
                                                                        const net::MessageStream::MaySend& permit) {
  const Deadline deadline = Deadline::after(limits_.arrive);
  std::chrono::milliseconds look = kArrivalLookMin;
  for (;;) {
    const std::uint64_t missing = first_missing(*plan.served, tiles);
    const std::uint64_t end = missing == tiles.end ? missing : first_of_band(*plan.layout, missing);
    if (end > tiles.first) co_return end;
    DS_CO_TRY(co_await wait_for_more(plan, deadline, look, permit));
  }
}

asio::awaitable<Status> PullConversation::wait_for_tiles(const OpenPlan& plan, std::span<const std::uint64_t> tiles,
                                                         const net::MessageStream::MaySend& permit) {
  if (!plan.served->arriving) co_return Status();
  const Deadline deadline = Deadline::after(limits_.arrive);
  std::chrono::milliseconds look = kArrivalLookMin;
  while (!all_in_place(*plan.served, tiles)) DS_CO_TRY(co_await wait_for_more(plan, deadline, look, permit));
  co_return Status();
}

}  // namespace deltasync::agent
