// The requests of a control conversation about a version: subscribing, planning, releasing, and tiles that do not
// verify.
#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/serve/pull_conversation.hpp"
#include "base/log.hpp"
#include "format/wire_local.hpp"
#include "format/wire_report.hpp"
#include "net/coroutine.hpp"

namespace deltasync::agent {

namespace asio = boost::asio;

/// `protocol` and `corrupt` are the peer's fault and end the connection.
Result<SubsetPtr> PullConversation::make_subset(ByteSpan payload) {
  DS_ASSIGN(const wire::RangesHead head, wire::Subscribe::decode_head(payload));
  const SnapshotPtr now = core_.versions().snapshot();
  if (!now->generation) return Error(Errc::not_found, "no trainer has brought a layout yet");
  const LayoutPtr layout = now->generation->layout;
  if (head.ranges > layout->tile_count()) {
    return Error(Errc::out_of_range,
                 std::to_string(head.ranges) + " ranges of " + std::to_string(layout->tile_count()) + " tiles");
  }
  DS_ASSIGN(const wire::Subscribe wanted, wire::Subscribe::decode(payload));
  if (wanted.layout != layout->digest()) {
    return Error(Errc::layout_mismatch, "the agent serves layout " + to_string(layout->digest()) +
                                            ", the subscription is of " + to_string(wanted.layout));
  }
  DS_ASSIGN(TileSet tiles, TileSet::make(*layout, wanted.ranges));
  if (tiles.is_whole()) {
    return Error(Errc::invalid_argument, "a subscription to all tiles: plan without one");
  }
  return core_.subsets().share(std::move(tiles));
}

asio::awaitable<Status> PullConversation::on_subscribe(Request& request) {
  subset_.reset();
  auto subset = make_subset(request.payload);
  if (!subset) {
    if (subset.error().code() == Errc::corrupt) co_return std::move(subset).error();
    co_return co_await refuse(request, std::move(subset).error());
  }
  subset_ = std::move(*subset);
  std::vector<std::byte>().swap(request.payload);
  co_return co_await send_end(request);
}

/// A plan that does not wait is a question of what there is.
std::optional<Error> PullConversation::cut_off(const wire::PlanRequest& plan) {
  constexpr auto kEvery = std::chrono::seconds(1);
  if (protocol_ < 5 || plan.wait_ms == 0) return std::nullopt;
  const auto now = std::chrono::steady_clock::now();
  if (now - cut_off_said_at_ < kEvery) return std::nullopt;
  const auto cut_off = core_.origin().cut_off();
  if (!cut_off) return std::nullopt;
  cut_off_said_at_ = now;
  return Error(Errc::peer_died, "no newer version comes here: " + cut_off->why);
}

/// To one of protocol 4, or where nobody is known, it is an error that names what there is.
asio::awaitable<Status> PullConversation::send_elsewhere(Request& request, std::vector<std::string> endpoints) {
  Metrics::add(core_.metrics().sent_elsewhere, 1);
  const wire::Elsewhere answer{std::move(endpoints)};
  log::debug("sent_elsewhere connection={} name=\"{}\" endpoints={}", connection_, name_, answer.endpoints.size());
  if (protocol_ >= 5 && !answer.endpoints.empty()) {
    co_return co_await stream_.write(request.header.request, answer, limits_.progress);
  }
  const std::string others = answer.endpoints.empty() ? "another agent or a relay" : answer.endpoints.front();
  co_return co_await refuse(request, Error(Errc::connection, "busy: " + std::to_string(context_.children.max()) +
                                                                 " pull from here (--children-max); try " + others));
}

asio::awaitable<Status> PullConversation::on_plan(Request& request) {
  DS_CO_ASSIGN(const wire::PlanRequest plan, wire::PlanRequest::decode(request.payload));
  // A receiver of protocol 4 does not report. What it plans from is what it has committed, unless it says otherwise.
  if (protocol_ < 5 && plan.partial == 0 && plan.full_only == 0) {
    context_.receivers.named_base({connection_, name_, address_}, plan.base);
  }
  if (auto elsewhere = context_.children.ask(connection_, protocol_ >= 5)) {
    co_return co_await send_elsewhere(request, std::move(elsewhere->endpoints));
  }
  SubsetPtr subset;
  if (plan.subscription != Digest128()) {
    if (!subset_ || subset_->tiles().digest() != plan.subscription) {
      co_return co_await refuse(request,
                                Error(Errc::invalid_argument,
                                      "nobody subscribed to " + to_string(plan.subscription) + " on this connection"));
    }
    subset = subset_;
  }
  const auto wait_max_ms = static_cast<std::uint64_t>(limits_.wait_max.count());
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(std::min(plan.wait_ms, wait_max_ms)));
  // A merge leaves time to pull what it makes, or the chain. Its time begins when there is something to be made: after
  // the version has come.
  const auto merge_max_ms = static_cast<std::uint64_t>(limits_.merge_wait_max.count());
  const std::chrono::milliseconds merge_max(std::min(plan.wait_ms / 2, merge_max_ms));
  std::optional<Deadline> merge_deadline;
  const Asker asker{connection_, address_.substr(0, address_.rfind(':')), name_};
  const auto subscription = hear_versions();
  PendingPlan pending;
  for (;;) {
    std::string waiting_for;
    pending.derived.may_wait =
        merge_deadline ? !merge_deadline->passed() : merge_max.count() != 0 && !deadline.passed();
    auto reply = core_.plans().plan(plan, asker, &waiting_for, pending, subset);
    if (!reply) co_return co_await refuse(request, std::move(reply).error());
    const bool waits = !*reply && !pending.derived.key;
    if (waits && context_.children.must_go(connection_)) {
      if (auto elsewhere = context_.children.ask(connection_, protocol_ >= 5)) {
        co_return co_await send_elsewhere(request, std::move(elsewhere->endpoints));
      }
    }
    if (waits || (*reply && (*reply)->mode == wire::PlanMode::up_to_date)) {
      if (auto why = cut_off(plan)) co_return co_await refuse(request, *std::move(why));
    }
    if (*reply) {
      const wire::PlanReply& made = **reply;
      asked_ = made.target.id;
      context_.note(connection_, [&made](PeerStatus& line) {
        line.last_mode = wire::mode_name(made.mode);
        line.last_target = made.target.id;
      });
      log::debug("plan_made connection={} name=\"{}\" mode={} target={} steps={}", connection_, name_,
                 wire::mode_name(made.mode), to_string(made.target.id), made.steps.size());
      co_return co_await stream_.write(request.header.request, made, limits_.progress);
    }
    if (context_.stopping) co_return Error(Errc::connection, "the agent is shutting down");
    if (pending.derived.key && !merge_deadline) merge_deadline = deadline.earlier(Deadline::after(merge_max));
    // Held up past the deadline while it waited for a merge: the steps are to be had.
    if (deadline.passed() && pending.derived.may_wait && pending.derived.key) continue;
    if (deadline.passed()) co_return co_await refuse(request, Error(Errc::timed_out, "waited for " + waiting_for));
    const Deadline look_again = pending.derived.may_wait && merge_deadline ? *merge_deadline : deadline;
    DS_CO_TRY(co_await wait_for_version(look_again));
    if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer left while it waited for " + waiting_for);
  }
}

asio::awaitable<Status> PullConversation::on_release(Request& request) {
  DS_CO_ASSIGN(const wire::Release release, wire::Release::decode(request.payload));
  if (const auto plan = find_plan(release.plan)) asked_ = (*plan)->target();
  core_.open_plans().release(release.plan, connection_);
  co_return co_await send_end(request);
}

/// The lease stays what it is: who reads locally is told of a revocation by the half's state word.
asio::awaitable<Status> PullConversation::on_get_local(Request& request) {
  DS_CO_ASSIGN(const wire::GetLocal asked, wire::GetLocal::decode(request.payload));
  const auto plan = find_plan(asked.plan);
  if (!plan) co_return co_await refuse(request, plan.error());
  asked_ = (*plan)->target();
  if (!(*plan)->served || (*plan)->served->arriving) {
    co_return co_await refuse(request, Error(Errc::invalid_argument, "this is no full plan of a half"));
  }
  if (context_.options.local_socket.empty()) {
    co_return co_await refuse(request, Error(Errc::unsupported, "this agent has no socket for receivers on its host"));
  }
  const HalfKey& half = (*plan)->served->half;
  const wire::Local answer{context_.options.local_socket, half.generation, static_cast<std::uint8_t>(half.half),
                           half.sequence};
  co_return co_await stream_.write(request.header.request, answer, limits_.progress);
}

/// Tiles that are wrong here are published again by the publisher, which may be in the middle of a diff.
asio::awaitable<Status> PullConversation::on_check_tiles(Request& request) {
  DS_CO_ASSIGN(const wire::RangesHead head, wire::CheckTiles::decode_head(request.payload));
  auto plan = find_plan(head);
  if (!plan) co_return co_await refuse(request, std::move(plan).error());
  DS_CO_ASSIGN(const wire::CheckTiles asked, wire::CheckTiles::decode(request.payload));
  asked_ = (*plan)->target();
  const std::string who = "receiver \"" + name_ + "\" at " + address_;
  if (const ServedPtr& served = (*plan)->served; served && served->arriving) {
    wire::TilesChecked answer;
    answer.plan_again = core_.arrival().check(*served, asked.ranges, who) ? 0 : 1;
    co_return co_await stream_.write(request.header.request, answer, limits_.progress);
  }
  if (!(*plan)->served && (*plan)->steps.front()->arriving) {
    core_.delta_arrival().doubted((*plan)->steps.front(), who);
    wire::TilesChecked answer;
    answer.plan_again = 1;
    co_return co_await stream_.write(request.header.request, answer, limits_.progress);
  }
  const Deadline deadline = Deadline::after(limits_.check);
  const auto subscription = hear_versions();
  for (;;) {
    const auto verdict = core_.damage().check(target_of(**plan), asked.ranges, who);
    if (verdict != Damage::Verdict::not_yet || deadline.passed()) {
      wire::TilesChecked answer;
      answer.plan_again = verdict == Damage::Verdict::valid ? 0 : 1;
      co_return co_await stream_.write(request.header.request, answer, limits_.progress);
    }
    if (context_.stopping) co_return Error(Errc::connection, "the agent is shutting down");
    DS_CO_TRY(co_await wait_for_version(deadline));
    if (stream_.peer_closed()) co_return Error(Errc::connection, "the peer left while its tiles were checked");
  }
}

}  // namespace deltasync::agent
