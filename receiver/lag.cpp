// How far behind a receiver is: asked of the agent, which knows when it published what, on a connection that lasts for
// the question. The receiver's own may be in the middle of a pull.
#include <utility>

#include "receiver/connection.hpp"
#include "receiver/receiver_impl.hpp"
#include "receiver/standing.hpp"

namespace deltasync::receiver {
namespace {

Result<wire::Lag> ask(const Peer& peer, const VersionId& held, const CallContext& until) {
  const Deadline limit = until.deadline().earlier(Deadline::after(peer.tuning.handshake));
  DS_ASSIGN(Connection connection, Connection::dial(peer, {limit, until.stop()}));
  DS_TRY(connection.handshake(peer, wire::Role::control, limit).with_context("handshake"));
  if (connection.protocol() < 5) {
    return Error(Errc::unsupported, "it speaks protocol " + std::to_string(connection.protocol()) +
                                        ", and tells only from 5 on: upgrade the agent");
  }
  return connection.lag(held, limit);
}

double seconds(std::uint64_t ns) {
  return static_cast<double>(ns) * 1e-9;
}

}  // namespace

/// What it heard last stands beside what it hears, or does not hear, now.
void Standing::recall(Lag& lag) const {
  const std::lock_guard lock(mutex_);
  if (lag.newest) {
    heard_newest_ = lag.newest;
    heard_at_ = Clock::now();
  }
  if (!heard_newest_) return;
  lag.heard_newest = heard_newest_;
  lag.heard_s = std::chrono::duration<double>(Clock::now() - heard_at_).count();
}

Lag Standing::lag(const CallContext& until) const {
  const wire::Report report = this->report();
  Lag lag;
  if (report.committed.id.valid()) lag.held = report.committed;
  lag.last_error = report.error;
  auto answer = ask(agent_, report.committed.id, until);
  if (!answer) {
    lag.last_error = std::move(answer).error().with_context("asking the agent at " + agent_.endpoint()).to_string();
  } else if (answer->newest.id.valid()) {
    lag.newest = std::move(answer->newest);
    lag.versions = answer->versions;
    lag.seconds = seconds(answer->behind_ns);
    lag.newest_age_s = seconds(answer->newest_age_ns);
  }
  if (answer && answer->cut_off_ns != 0 && lag.last_error.empty()) {
    lag.last_error = "the agent at " + agent_.endpoint() + " has been cut off for " +
                     std::to_string(answer->cut_off_ns / 1'000'000'000) +
                     " s: nobody brings newer versions there. Its /readyz says why";
  }
  recall(lag);
  return lag;
}

Lag ReceiverImpl::lag(const CallOptions& call) const {
  return standing_->lag(call);
}

std::shared_ptr<const ReceiverStatus> status_of(const Receiver& receiver) {
  const auto* const ours = dynamic_cast<const BoundTarget*>(&receiver);
  return ours != nullptr ? ours->status() : nullptr;
}

Status wait_served(Receiver& receiver, const CallContext& until) {
  Target* const target = receiver.target();
  CanHandOn* const can = target != nullptr ? target->capabilities().hand_on : nullptr;
  if (can == nullptr) return Error(Errc::invalid_argument, "wait_served: the target hands nothing on");
  if (target->committed() == nullptr) return Error(Errc::invalid_argument, "the relay has committed nothing");
  Status served = can->wait_served(until);
  if (served.ok() || served.error().code() != Errc::cancelled) {
    if (auto* const ours = dynamic_cast<BoundTarget*>(&receiver)) ours->note_served(served);
  }
  return served;
}

std::uint64_t agent_instance_of(const Receiver& receiver) {
  const auto* const ours = dynamic_cast<const ReceiverImpl*>(&receiver);
  return ours != nullptr ? ours->agent_instance() : 0;
}

/// What is committed may be another version after any call, and after one that failed none.
void ReceiverImpl::note_standing(const Error* failure) {
  const TargetState* const held = target_ != nullptr ? target_->committed() : nullptr;
  standing_->set(held != nullptr ? held->version : Version(),
                 failure != nullptr ? failure->to_string() : std::string());
  control_.report(standing_->report());
}

void ReceiverImpl::note_served(const Status& served) {
  const std::string why = served.ok() ? std::string() : served.error().to_string();
  const bool news = why.empty() ? standing_->unserved().has_value() : standing_->report().error != why;
  standing_->set_unserved(why);
  if (news) control_.report(standing_->report());
}

}  // namespace deltasync::receiver
