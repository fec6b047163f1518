// Tiles that came through whole and are not what they have to be. It may be the agent's memory that is wrong: then it
// publishes what it has again, and another plan leads there. Only if it is not, the fault is looked for here.
#include <utility>

#include "base/log.hpp"
#include "receiver/pull/pull.hpp"
#include "receiver/targets/attest.hpp"

namespace deltasync::receiver {
namespace {

constexpr std::size_t kAskedMax = 4096;  ///< tiles: the first ones say as much as all of them

}  // namespace

void Pull::doubt(std::uint64_t tile) {
  const std::lock_guard lock(doubted_mutex_);
  if (doubted_.size() < kAskedMax) doubted_.insert(tile);
}

/// Nothing is asked of an agent that does not know the question, and nothing if live memory is not what was committed.
Result<bool> Pull::agent_was_wrong(const wire::PlanReply& reply) {
  const std::vector<std::uint64_t> tiles(doubted_.begin(), doubted_.end());
  doubted_.clear();
  if (tiles.empty() || s_.control.protocol() < 5) return false;
  if (reply.mode == wire::PlanMode::delta) {
    DS_ASSIGN(const auto wrong, attest(s_.target, tiles, until_, Copies::where_they_can));
    if (!wrong.empty()) return false;
  }
  stage_ = "asking the agent about " + tile_name(s_.layout, tiles.front());
  wire::CheckTiles question;
  question.plan = reply.plan;
  for (const std::uint64_t tile : tiles) {
    if (!question.ranges.empty() && question.ranges.back().end == tile) {
      ++question.ranges.back().end;
    } else {
      question.ranges.push_back({tile, tile + 1});
    }
  }
  auto answer = s_.control.check_tiles(question, until_.deadline());
  if (answer.broken && answer.broken->code() == Errc::cancelled) return std::move(*answer.broken);
  // A plan that is over, by itself or with its connection, says nothing of the tiles.
  const bool over = answer.broken || (answer.refused && answer.refused->code() == Errc::lease_revoked);
  if (!over && (!answer.value || answer.value->plan_again == 0)) return false;
  log::warn("receiver tiles_do_not_verify agent={} version=\"{}\" first=\"{}\" tiles={} then=\"{}\"",
            s_.peer.endpoint(), to_string(reply.target), tile_name(s_.layout, tiles.front()), tiles.size(),
            answer.value ? "the agent has other bytes or another version now: planning again" : "planning again");
  pause_ = replan_backoff_.next();
  return true;
}

}  // namespace deltasync::receiver
