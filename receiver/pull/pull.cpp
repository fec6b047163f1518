#include "receiver/pull/pull.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"

namespace deltasync::receiver {

Pull::Pull(Session session, const Want& want, CallContext until)
    : s_(session),
      want_(want),
      until_(std::move(until)),
      bytes_before_(bytes_received()),
      replan_backoff_(session.peer.tuning),
      busy_backoff_(Backoff::from_busy(session.peer.tuning)),
      full_only_(session.invalidated),
      wait_by_(wait_by()) {}

Result<Prepared> Pull::run() {
  if (Status status = reread_partial(); !status) return stopped(std::move(status).error());
  for (;;) {
    auto reply = plan();
    if (!reply) return stopped(std::move(reply).error());
    auto course = look_at_epoch(*reply);
    if (!course || *course == Progress::replan) {
      s_.control.release(reply->plan, until_.deadline());
      if (!course) return stopped(std::move(course).error());
      until_.earlier(wait_by_).pause(replan_backoff_.next());
      if (Status more = keep_waiting(); !more) return stopped(std::move(more).error());
      continue;
    }
    const auto planned = std::chrono::steady_clock::now();
    trace::Span span("pull", reply->target.id);
    const std::uint64_t bytes_before = bytes_received();
    trace::name_version(reply->target);
    auto& report = out_.report;
    report.version = reply->target;
    report.root = reply->target_root;
    Result<Progress> progress = Progress::whole;
    switch (reply->mode) {
      case wire::PlanMode::up_to_date: report.mode = PullMode::up_to_date; break;
      case wire::PlanMode::delta:
        report.mode = PullMode::delta;
        if (delta_is_too_large(*reply)) {
          full_only_ = true;
          progress = Progress::replan;
          break;
        }
        if (compact_ && changes_are_too_many(*reply)) {
          plain_only_ = true;
          progress = Progress::replan;
          break;
        }
        progress = run_delta(*reply);
        break;
      case wire::PlanMode::full:
        report.mode = PullMode::full;
        progress = run_full(*reply);
        break;
    }
    // A plan of which nothing more is wanted must not hold the agent's half any longer.
    s_.control.release(reply->plan, until_.deadline());
    span.set({"bytes", bytes_received() - bytes_before});
    span.set({"mode", to_string(report.mode).data()});
    report.transfer_s += seconds_since(planned);
    if (!progress) return stopped(std::move(progress).error());
    if (*progress == Progress::whole) break;
    ++report.replans;
    wait_by_ = wait_by();
    until_.pause(std::exchange(pause_, std::chrono::milliseconds(0)));
    if (until_.deadline().passed()) return out_of_time();
  }
  auto& report = out_.report;
  report.full_bytes = s_.tiles.bytes();
  report.wire_bytes = bytes_received() - bytes_before_;
  report.metadata_bytes = report.wire_bytes - payload_bytes_;
  return std::move(out_);
}

bool Pull::count(const FetchRoundResult& round, std::span<const StreamTally> tallies) {
  auto& report = out_.report;
  report.stream_restarts += round.stream_restarts;
  report.transports = round.transports;
  bool moved = false;
  for (const StreamTally& t : tallies) {
    moved = moved || t.tiles != 0;
    report.tiles += t.tiles;
    report.verify_s += t.verify_s;
    payload_bytes_ += t.payload_bytes;
  }
  return moved;
}

Result<Pull::Progress> Pull::settle(const FetchRoundResult& round, std::span<const StreamTally> tallies) {
  const bool moved = count(round, tallies);
  if (round.end == FetchRoundEnd::complete) return Progress::whole;
  if (round.noted) last_ = round.noted;
  if (round.end != FetchRoundEnd::failed || round.error->code() != Errc::timed_out) last_ = round.error;
  if (round.end == FetchRoundEnd::failed || round.error->code() == Errc::cancelled) return *round.error;
  if (round.end == FetchRoundEnd::busy) {
    pause_ = busy_backoff_.next();
    s_.control.say_busy(*round.error, pause_);
    return Progress::replan;
  }
  // A revoked lease is the normal course of things, a new agent or a broken connection may need a moment, any other
  // refusal is tolerated a few times.
  const Errc code = round.error->code();
  const bool revoked = code == Errc::lease_revoked;
  if (revoked && moved) return Progress::replan;
  if (code == Errc::timed_out && s_.peer.pulse) s_.control.lost(*round.error);
  const bool agent_away = code == Errc::peer_died || code == Errc::connection || code == Errc::timed_out;
  if (!revoked && !agent_away && ++refused_plans_ > s_.peer.tuning.refused_plans) return *round.error;
  pause_ = replan_backoff_.next();
  return Progress::replan;
}

/// The time went by while the agent waited for a version to be published.
bool Pull::waited_in_vain(const Error& error) const {
  if (error.code() != Errc::timed_out || !waiting_) return false;
  return !last_ || last_->code() == Errc::timed_out || last_->code() == Errc::not_found;
}

Error Pull::out_of_time() const {
  std::string text = "deadline passed while " + stage_;
  const auto& why = last_ ? last_ : s_.control.noted();
  if (why) text += " (last trouble: " + why->to_string() + ")";
  return Error(Errc::timed_out, std::move(text)).with_context("pull from " + s_.peer.endpoint());
}

Error Pull::stopped(Error error) {
  ended_early_ = error.code() == Errc::cancelled || waited_enough_ || waited_in_vain(error);
  if (error.code() == Errc::cancelled) return cancelled_while(stage_).with_context("pull from " + s_.peer.endpoint());
  // Whatever ran into the end of the time says so in the same words.
  if (until_.deadline().passed() && (error.code() == Errc::timed_out || error.code() == Errc::connection)) {
    return out_of_time();
  }
  return std::move(error).with_context("pull from " + s_.peer.endpoint() + ": " + stage_);
}

}  // namespace deltasync::receiver
