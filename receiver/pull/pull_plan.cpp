// Which version is meant, and the way to it that the agent names.
#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "format/want.hpp"
#include "receiver/pull/pull.hpp"

namespace deltasync::receiver {
namespace {

/// Default of ReceiverOptions::delta_bytes_max.
constexpr std::uint64_t kDeltaBytesMin = 16u << 20;
constexpr std::uint64_t kDeltaModelFraction = 4;
/// Of the time that is left, the part that the agent may wait for a version.
constexpr double kWaitPart = 0.75;
/// What an answer may take beside the wait. With less time left none is asked for any more: it would come too late, and
/// cost the connection.
constexpr auto kQuestionTime = std::chrono::milliseconds(20);
/// For a version that was held, and lost, to be served: longer than a relay takes to commit it.
constexpr auto kLostPatience = std::chrono::seconds(10);
/// An agent that answered after so long has waited, whatever it says.
constexpr std::uint64_t kLongWaitMs = 500;

std::string wanted(const Want& want) {
  switch (wire::kind_of(want)) {
    case wire::WantKind::newest: return "the newest version";
    case wire::WantKind::newer: return "a newer version";
    case wire::WantKind::number:
      return want.epoch == 0 ? "version number " + std::to_string(*want.number)
                             : "version " + to_string(VersionId{want.epoch, *want.number});
    case wire::WantKind::label: return "version '" + want.label + "'";
  }
  return {};
}

/// Of all steps together.
std::uint64_t frame_bytes(const wire::PlanReply& reply) {
  std::uint64_t bytes = 0;
  for (const wire::DeltaStep& step : reply.steps) bytes += std::min(step.frame_bytes, kModelBytesMax);
  return bytes;
}

/// from → … → to without gaps, ending in the state that the plan names.
bool chain_is_whole(const std::vector<wire::DeltaStep>& steps, const VersionId& from, const wire::PlanReply& reply) {
  if (steps.empty() || steps.front().from != from || steps.back().to != reply.target.id ||
      steps.back().to_root != reply.target_root) {
    return false;
  }
  for (std::size_t i = 1; i < steps.size(); ++i) {
    if (steps[i].from != steps[i - 1].to) return false;
  }
  return true;
}

}  // namespace

Deadline Pull::wait_by() const {
  if (!want_.wait_max) return until_.deadline();
  return until_.deadline().earlier(Deadline::after(*want_.wait_max));
}

/// Between two questions: is there time for another? One that was asked is heard out, since the agent may be making
/// the answer.
Status Pull::keep_waiting() {
  DS_TRY(until_.check("planning"));
  if (!want_.wait_max || !wait_by_.passed()) return {};
  waited_enough_ = true;
  std::string text = "not there within " + std::to_string(want_.wait_max->count()) + " ms";
  if (last_) text += " (" + last_->to_string() + ")";
  return Error(Errc::timed_out, std::move(text));
}

Result<Version> Pull::target() {
  auto reply = plan();
  if (!reply) return stopped(std::move(reply).error());
  s_.control.release(reply->plan, until_.deadline());
  return std::move(reply->target);
}

wire::PlanRequest Pull::plan_request() const {
  wire::PlanRequest plan;
  plan.layout = s_.layout.digest();
  plan.want = wire::kind_of(want_);
  plan.number = want_.number.value_or(0);
  plan.epoch = want_.number ? want_.epoch : 0;
  plan.label = want_.label;
  plan.full_only = full_only_ ? 1 : 0;
  plan.subscription = s_.tiles.digest();
  plan.compact = wants_compact() ? 1 : 0;
  // Who has a version keeps it until the next one is whole, which may then be a delta away. Who copies out of the
  // agent's memory waits for the half, too: that is sooner there than tiles over the connection.
  const bool is_first = s_.target.committed() == nullptr;
  plan.arriving = is_first && s_.control.protocol() >= 5 && !s_.local.is_wanted(s_.control) ? 1 : 0;
  if (s_.partial.any()) {
    plan.partial = 1;
    plan.base = s_.partial.version;
    plan.base_root = s_.partial.root;
    // What we hold a part of is newer than what is committed: anything from there on will do.
    if (plan.want == wire::WantKind::newer) plan.want = wire::WantKind::newest;
  } else if (const TargetState* committed = s_.target.committed(); committed != nullptr) {
    // An invalidated version is no base, but `newer` still means newer than it.
    if (!full_only_) {
      plan.base = committed->version.id;
      plan.base_root = committed->root;
    } else if (plan.want == wire::WantKind::newer) {
      plan.want = wire::WantKind::newest;
    }
  }
  std::chrono::duration<double> allowed = s_.peer.tuning.wait_slice;
  if (plan.compact != 0)
    allowed = std::max(allowed, std::chrono::duration<double>(classes_plan_s(s_.layout.half_bytes())));
  // The agent's answer, which says what there is, comes before our own deadline.
  const std::chrono::duration<double> left = until_.deadline().remaining();
  const std::chrono::duration<double> in_time =
      std::max<std::chrono::duration<double>>(left - kQuestionTime, left.zero());
  const std::chrono::duration<double> wait = std::min({allowed, kWaitPart * left, in_time});
  plan.wait_ms = static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(wait).count());
  return plan;
}

/// Only a whole version is a base of which everything is proved. The next delta is taken to change as much as the last.
bool Pull::wants_compact() const {
  if (full_only_ || plain_only_ || s_.partial.any()) return false;
  if (s_.peer.tuning.compact) return *s_.peer.tuning.compact;
  const double left_s = std::chrono::duration<double>(until_.deadline().remaining()).count();
  return classes_pay(s_.changed_last, s_.layout.half_bytes(), s_.link.rate(), std::min(left_s / 2, kClassesPatienceS));
}

Status Pull::check_reply(const wire::PlanReply& reply, bool partial) const {
  const auto wrong = [](const char* what) { return Error(Errc::protocol, std::string("plan reply: ") + what); };
  if (!reply.target.id.valid()) return wrong("it names no version");
  const TargetState* committed = s_.target.committed();
  switch (reply.mode) {
    case wire::PlanMode::up_to_date:
      if (partial || full_only_ || committed == nullptr || committed->version.id != reply.target.id ||
          committed->root != reply.target_root) {
        return wrong("it says up to date with a version that we do not hold");
      }
      return {};
    case wire::PlanMode::delta:
      if (partial || full_only_ || committed == nullptr) return wrong("a delta where only a full update can help");
      if (!chain_is_whole(reply.steps, committed->version.id, reply)) return wrong("its delta steps are no chain");
      if (frame_bytes(reply) < full_bytes()) return {};
      if (!version_is_named()) return wrong("a delta that is larger than a full update");
      return Error(Errc::no_space, "only a delta of " + std::to_string(frame_bytes(reply)) + " bytes leads to " +
                                       to_string(reply.target) + ", more than a full update");
    case wire::PlanMode::full: return {};
  }
  return wrong("unknown mode");
}

std::uint64_t Pull::delta_bytes_max() const {
  if (s_.options.delta_bytes_max != 0) return s_.options.delta_bytes_max;
  return std::max(kDeltaBytesMin, s_.tiles.bytes() / kDeltaModelFraction);
}

bool Pull::delta_is_too_large(const wire::PlanReply& reply) const {
  if (version_is_named() || s_.options.full_update_policy == FullUpdatePolicy::refuse) return false;
  return frame_bytes(reply) > delta_bytes_max();
}

/// What tiles in exponent classes overwrite is kept with their positions, for they can be undone from nothing else.
bool Pull::changes_are_too_many(const wire::PlanReply& reply) const {
  std::uint64_t changed = 0;
  for (const wire::DeltaStep& step : reply.steps) changed += std::min(step.changed, kModelBytesMax);
  const auto fit = [&](std::uint64_t element_bytes) {
    return changed <= delta_bytes_max() / (sizeof(std::uint16_t) + element_bytes);
  };
  if (fit(sizeof(double))) return false;
  std::uint32_t element_bytes = 0;
  for (const Tensor& tensor : s_.layout.tensors()) {
    element_bytes = std::max(element_bytes, tensor.element_bytes);  // decoded ones of integers are kept as well
  }
  return !fit(element_bytes);
}

Result<Pull::Progress> Pull::look_at_epoch(const wire::PlanReply& reply) {
  if (version_is_named()) return Progress::whole;
  Status fits = s_.older_epochs.check(s_.peer.endpoint(), reply.target, s_.target.committed());
  if (fits) return Progress::whole;
  if (s_.older_epochs.policy() == OlderEpoch::fail) return std::move(fits).error();
  last_ = Error(Errc::timed_out, fits.error().message());
  return Progress::replan;
}

/// Another agent had it, and this one will: a relay brings it. What is held is the newest that there is.
bool Pull::is_before_ours(const wire::PlanReply& reply) const {
  const TargetState* committed = s_.target.committed();
  if (committed == nullptr || full_only_ || s_.partial.any() || version_is_named()) return false;
  const VersionId& ours = committed->version.id;
  return reply.target.id.epoch == ours.epoch && reply.target.id.number < ours.number;
}

/// What was held came before the agent served it, or from another agent, and then live memory lost it: it will be here.
bool Pull::is_before_what_was_lost(const wire::PlanReply& reply) const {
  const bool lost = s_.target.committed() == nullptr || full_only_;
  return lost && !version_is_named() && !s_.partial.any() && reply.target.id.epoch == s_.last_held.epoch &&
         reply.target.id.number < s_.last_held.number;
}

bool Pull::is_of_older_epoch(const wire::PlanReply& reply) const {
  const TargetState* committed = s_.target.committed();
  return committed != nullptr && !version_is_named() && reply.target.id.epoch < committed->version.id.epoch;
}

bool Pull::reply_means_wait(const wire::PlanReply& reply) const {
  return wire::kind_of(want_) == wire::WantKind::newer && reply.mode == wire::PlanMode::up_to_date;
}

VersionId Pull::held() const {
  if (s_.partial.any()) return s_.partial.version;
  const TargetState* committed = s_.target.committed();
  return committed != nullptr ? committed->version.id : VersionId();
}

/// A subscription belongs to the connection: a new one is told of it first.
Answer<wire::PlanReply> Pull::ask(const wire::PlanRequest& question) {
  for (std::set<std::uint64_t> asked;;) {
    if (!s_.tiles.is_whole() && s_.control.subscription() != s_.tiles.digest()) {
      auto told = s_.control.subscribe({s_.layout.digest(), s_.tiles.ranges()}, s_.tiles.digest(), until_.deadline());
      if (!told.value) return {std::nullopt, std::move(told.refused), std::move(told.broken)};
    }
    auto answer = s_.control.plan(question, until_.deadline());
    if (!answer.elsewhere) return answer;
    if (Status gone = s_.control.follow(*answer.elsewhere, s_.layout.digest(), asked, until_.deadline()); !gone) {
      return {std::nullopt, std::move(gone).error(), std::nullopt};
    }
    if (Status parents = look_at_parents(); !parents) return {std::nullopt, std::nullopt, std::move(parents).error()};
  }
}

/// What a relay pulls must not come from the agent that it writes to, through whatever other relays: no version would
/// ever come, and nobody would say so. Who brings that agent its versions may change at any time.
Status Pull::look_at_parents() {
  CanHandOn* const relay = s_.can.hand_on;
  if (relay == nullptr || s_.control.protocol() < 5 || !s_.control.parents_are_due()) return {};
  auto answer = s_.control.parents({relay->agent_instance(), relay->advertised()}, until_.deadline());
  if (answer.refused) {
    s_.control.pass_over(*answer.refused);
    return *answer.refused;
  }
  if (!answer.value) return *answer.broken;
  wire::Parents parents = std::move(*answer.value);
  parents.list.insert(parents.list.begin(), {s_.control.instance(), s_.peer.endpoint()});
  relay->tell_parents(std::move(parents));
  return {};
}

/// A relay whose agents are all away: who pulls from the one that it writes to is told that nothing newer comes there.
void Pull::tell_cut_off() {
  if (s_.can.hand_on == nullptr) return;
  wire::Parents parents;
  parents.list.push_back({s_.control.instance(), s_.peer.endpoint()});
  parents.cut_off_ns = static_cast<std::uint64_t>(s_.control.unheard().count());
  s_.can.hand_on->tell_parents(std::move(parents));
}

Result<wire::PlanReply> Pull::plan() {
  const auto start = std::chrono::steady_clock::now();
  trace::Span span("plan");
  Backoff backoff(s_.peer.tuning);
  for (;;) {
    DS_TRY(until_.check("planning"));
    stage_ = "connecting";
    waiting_ = false;
    if (Status there = s_.control.ensure(wait_by_); !there) {
      if (there.error().code() == Errc::connection || there.error().code() == Errc::timed_out) {
        last_ = there.error();
        tell_cut_off();
        DS_TRY(keep_waiting());
      }
      return there.error();
    }
    const wire::Welcome& welcome = s_.control.welcome();
    if (welcome.has_layout != 0 && welcome.layout != s_.layout.digest()) {
      return Error(Errc::layout_mismatch, "the agent serves layout " + to_string(welcome.layout) +
                                              ", this receiver is bound to " + to_string(s_.layout.digest()));
    }
    if (Status parents = look_at_parents(); !parents) {
      if (parents.error().code() == Errc::invalid_argument && s_.peer.addresses->size() == 1) return parents.error();
      last_ = std::move(parents).error();
      DS_TRY(keep_waiting());
      until_.earlier(wait_by_).pause(backoff.next());
      continue;
    }
    stage_ = "waiting for " + wanted(want_);
    waiting_ = true;
    const wire::PlanRequest question = plan_request();
    const auto asked = std::chrono::steady_clock::now();
    auto answer = ask(question);
    if (answer.value) {
      DS_TRY(check_reply(*answer.value, question.partial != 0));
      compact_ = question.compact != 0;
      // Where several agents are given, an older trainer's is followed only if no other has what is held.
      if (is_of_older_epoch(*answer.value) &&
          s_.control.leave_older(s_.target.committed()->version.id, until_.deadline())) {
        continue;
      }
      if (is_before_ours(*answer.value)) {
        s_.control.release(answer.value->plan, until_.deadline());
        const TargetState& ours = *s_.target.committed();
        answer.value = wire::PlanReply();
        answer.value->target = ours.version;
        answer.value->target_root = ours.root;
      }
      if (is_before_what_was_lost(*answer.value)) {
        if (!lost_by_) lost_by_ = Deadline::after(kLostPatience);
        if (!lost_by_->passed()) {
          s_.control.release(answer.value->plan, until_.deadline());
          last_ = Error(Errc::timed_out, "the agent serves " + to_string(answer.value->target) + ", and " +
                                             to_string(s_.last_held) + " was held");
          DS_TRY(keep_waiting());
          until_.earlier(wait_by_).pause(backoff.next());
          continue;
        }
      }
      const bool is_news = answer.value->mode != wire::PlanMode::up_to_date;
      if (is_news) s_.control.note_news();
      if (!is_news && !version_is_named() && s_.control.leave_behind(held(), false, until_.deadline())) continue;
      if (!reply_means_wait(*answer.value)) {
        waiting_ = false;
        out_.report.wait_s += seconds_since(start);
        span.set_version(answer.value->target.id);
        return std::move(*answer.value);
      }
    } else if (answer.refused) {
      // The agent's own patience ended before ours, or it has nothing to serve yet.
      const Errc code = answer.refused->code();
      if (code == Errc::gone && question.partial != 0 && s_.target.committed() != nullptr) {
        // What is wanted cannot be reached by finishing what we hold a part of; perhaps from the committed version.
        s_.target.discard_full();
        s_.partial = PartialUpdate();
        continue;
      }
      if (code == Errc::connection) {  // neither it nor those that it names have a place
        last_ = std::move(answer.refused);
        const auto pause = busy_backoff_.next();
        s_.control.say_busy(*last_, pause);
        DS_TRY(keep_waiting());
        if (s_.peer.addresses->size() > 1) {
          s_.control.pass_over(*last_);
        } else {
          until_.earlier(wait_by_).pause(pause);
        }
        continue;
      }
      if (code != Errc::timed_out && code != Errc::not_found && code != Errc::peer_died) {
        return std::move(*answer.refused);
      }
      s_.streams.close_idle();  // who waits for a version for long holds one connection
      const bool why_is_known = code == Errc::timed_out && last_ && last_->code() == Errc::peer_died;
      if (!why_is_known) last_ = std::move(answer.refused);
      const bool in_part = s_.partial.any();
      const bool left = code == Errc::peer_died ? s_.control.leave_cut_off(*last_, held(), in_part, until_.deadline())
                                                : s_.control.leave_behind(held(), in_part, until_.deadline());
      if (left) continue;
    } else {
      // What our own deadline cuts off says nothing new.
      if (!last_ || !until_.deadline().passed()) last_ = std::move(answer.broken);
      ++out_.report.replans;
    }
    DS_TRY(keep_waiting());
    // An agent that waited on our behalf is asked again at once; one that did not must not be hammered.
    const std::chrono::milliseconds waited_long(std::min<std::uint64_t>(question.wait_ms / 2, kLongWaitMs));
    if (std::chrono::steady_clock::now() - asked < waited_long) {
      until_.earlier(wait_by_).pause(backoff.next());
    } else {
      backoff.reset();
    }
    if (until_.deadline().remaining() < kQuestionTime) until_.pause(kQuestionTime);
  }
}

}  // namespace deltasync::receiver
