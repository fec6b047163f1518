#include "receiver/receiver_impl.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/cpu_affinity.hpp"
#include "base/label.hpp"
#include "base/trace.hpp"
#include "format/packed_layout.hpp"
#include "net/auth.hpp"
#include "net/endpoint.hpp"
#include "receiver/targets/attest.hpp"

namespace deltasync {

std::string_view to_string(PullMode mode) noexcept {
  switch (mode) {
    case PullMode::up_to_date: return "up_to_date";
    case PullMode::delta: return "delta";
    case PullMode::full: return "full";
  }
  return "?";
}

Result<std::unique_ptr<Receiver>> Receiver::connect(ReceiverOptions options, const CallOptions& call) {
  DS_ASSIGN(auto made, receiver::ReceiverImpl::connect(std::move(options), receiver::Tuning(), call));
  return std::unique_ptr<Receiver>(std::move(made));
}

namespace receiver {
namespace {

constexpr unsigned kStreamsMax = 64;
constexpr unsigned kThreadsMax = 256;
constexpr unsigned kDefaultThreadsMax = 16;
constexpr double kLinkGbpsMax = 1e6;

unsigned thread_count(unsigned asked) {
  return asked != 0 ? asked : std::clamp(std::thread::hardware_concurrency(), 1u, kDefaultThreadsMax);
}

/// For pools whose threads run on these cores. Checked ones: if they are taken away meanwhile, the system's choice has
/// to do.
std::function<void()> on_cores(const CpuList& cores) {
  if (cores.empty()) return {};
  return [cores] { run_on(cores); };
}

}  // namespace

// ---- receiver ------------------------------------------------------------------------------------------------

ReceiverImpl::ReceiverImpl(ReceiverOptions options, const CpuList& cores, Peer peer)
    : options_(std::move(options)),
      peer_(std::move(peer)),
      standing_(std::make_shared<Standing>(net::make_random_id(), peer_)),
      control_(peer_, standing_->report()),
      stream_pool_(options_.streams, "ds-stream", on_cores(cores)),
      pool_(thread_count(options_.threads), "ds-receiver", on_cores(cores)),
      streams_(peer_, stream_pool_),
      link_(options_.link_gbps, peer_.tuning.link_sample_bytes),
      progress_(peer_.tuning.say_progress) {}

ReceiverImpl::~ReceiverImpl() {
  close_staged();
  discard_full();
  BlockPool::shared().trim();
  control_.say_goodbye();
}

Result<std::unique_ptr<ReceiverImpl>> ReceiverImpl::connect(ReceiverOptions options, const Tuning& tuning,
                                                            const CallContext& until) {
  if (options.streams < 1 || options.streams > kStreamsMax) {
    return Error(Errc::invalid_argument,
                 std::to_string(options.streams) + " streams; 1 to " + std::to_string(kStreamsMax) + " are possible");
  }
  if (options.threads > kThreadsMax) {
    return Error(Errc::invalid_argument, std::to_string(options.threads) + " threads; at most " +
                                             std::to_string(kThreadsMax) + " are possible");
  }
  if (!(options.link_gbps >= 0 && options.link_gbps <= kLinkGbpsMax)) {
    return Error(Errc::invalid_argument, "a link of " + std::to_string(options.link_gbps) + " gigabits per second");
  }
  CpuList cores;
  if (!options.cores.empty()) {
    DS_ASSIGN(cores, usable_cores(options.cores).with_context("the receiver's cores"));
  }
  DS_ASSIGN(const net::Endpoint endpoint, net::parse_endpoint(options.endpoint));
  if (endpoint.port == 0) return Error(Errc::invalid_argument, "endpoint '" + options.endpoint + "' has no port");
  Peer peer{options.endpoint, endpoint.host, endpoint.port, options.token, options.name, tuning};
  DS_ASSIGN(peer.tls, net::Tls::client_if_wanted(options.tls));
  std::unique_ptr<ReceiverImpl> made;
  try {
    made.reset(new ReceiverImpl(std::move(options), cores, std::move(peer)));
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "the receiver's threads: " + e.code().message());
  }
  const auto stopping = made->control_.stop_by(until.stop());
  DS_TRY(until.check("connecting").with_context("agent at " + made->peer_.endpoint));
  DS_TRY(made->control_.connect(until.deadline()));
  DS_TRY(made->fetch_layout(until).with_context("agent at " + made->peer_.endpoint));
  return made;
}

Status ReceiverImpl::fetch_layout(const CallContext& until) {
  const Deadline deadline = until.deadline();
  Backoff backoff(peer_.tuning);
  std::uint32_t spoiled = 0;
  std::optional<Error> last_spoiled;
  for (;;) {
    auto answer = control_.layout(deadline);
    if (answer.value) {
      DS_ASSIGN(wire::UnpackedLayout unpacked, wire::unpack_layout(*answer.value));
      layout_ = unpacked.layout;
      sidecar_ = wire::take_sidecar(std::move(unpacked));
      batches_ = delta::make_batches(*layout_);
      return {};
    }
    const Error& why = answer.refused ? *answer.refused : *answer.broken;
    const bool comes_yet = why.code() == Errc::not_found || why.code() == Errc::timed_out;
    if (answer.refused && !comes_yet) return why;
    // Damaged on its way it comes whole another time; what the agent itself got wrong does not.
    if (why.code() == Errc::corrupt || why.code() == Errc::protocol || why.code() == Errc::unsupported) {
      last_spoiled = why;
      if (++spoiled == peer_.tuning.layout_attempts) return why;
    }
    const auto too_late = [&] {
      if (last_spoiled) return *last_spoiled;
      return Error(Errc::timed_out, "deadline passed while waiting for a layout (" + why.to_string() + ")");
    };
    // No trainer has attached yet, or the agent is restarting.
    if (deadline.passed() && !until.stop_requested()) return too_late();
    until.pause(backoff.next());
    if (until.stop_requested()) return cancelled_while("waiting for a layout");
    if (Status again = control_.ensure(deadline); !again) {
      return deadline.passed() && !until.stop_requested() ? too_late() : std::move(again).error();
    }
  }
}

Status ReceiverImpl::bind(std::unique_ptr<Target> target, const std::vector<Slice>& slices, const CallOptions& call) {
  if (target == nullptr) return Error(Errc::invalid_argument, "bind: no target");
  if (target->layout()->digest() != layout_->digest()) {
    return Error(Errc::layout_mismatch, "the target was made for layout " + to_string(target->layout()->digest()) +
                                            ", the agent serves " + to_string(layout_->digest()));
  }
  auto tiles = TileSet::of(*layout_, slices);
  if (!tiles) return std::move(tiles).error().with_context("bind");
  DS_TRY(subscribe(*target, *tiles).with_context("bind"));
  const CallContext until(call);
  DS_TRY(until.check("opening the target").with_context("bind"));
  DS_TRY(target->open(pool_, until).with_context("bind"));
  // Now, and not in the first commit, while an engine stands still.
  CanReadCopies* const copies = target->capabilities().copies;
  if (options_.attest_commits && copies != nullptr) DS_TRY(copies->prepare_copies(until).with_context("bind"));
  close_staged();
  discard_full();
  target_ = std::move(target);
  slices_ = slices;
  tiles_ = *std::move(tiles);
  scrub_cursor_ = 0;
  invalidated_ = false;
  note_standing(nullptr);
  return {};
}

bool ReceiverImpl::supports_rollback() const {
  return target_ != nullptr && target_->capabilities().rollback != nullptr;
}

Result<std::vector<TileMismatch>> ReceiverImpl::attest(const CallOptions& call) {
  if (target_ == nullptr) return Error(Errc::invalid_argument, "attest: no target is bound");
  return deltasync::attest(*target_, tiles_, call);
}

std::optional<Version> ReceiverImpl::current() const {
  if (target_ == nullptr || target_->committed() == nullptr) return std::nullopt;
  return target_->committed()->version;
}

void ReceiverImpl::close_staged() {
  if (staged_ == nullptr) return;
  staged_->drop();
  if (target_ != nullptr) forget_rollback(*target_);  // nobody can ask for it any more
  staged_->receiver_ = nullptr;
  staged_ = nullptr;
}

void ReceiverImpl::discard_full() {
  if (partial_.open) target_->discard_full();
  partial_ = PartialUpdate();
}

void ReceiverImpl::forget_unfinished() {
  if (staged_ != nullptr) staged_->drop();
  discard_full();
}

Session ReceiverImpl::session(PartialUpdate& partial, bool& invalidated) {
  return {peer_,    options_,      *layout_,    sidecar_,   batches_,      tiles_,   control_,
          streams_, pool_,         link_,       progress_,  changed_last_, *target_, target_->capabilities(),
          partial,  scrub_cursor_, older_told_, invalidated};
}

Result<std::unique_ptr<StagedUpdate>> ReceiverImpl::pull(const Want& want, const CallOptions& call) {
  if (target_ == nullptr) return Error(Errc::invalid_argument, "pull: no target is bound");
  if (want.number && !want.label.empty()) return Error(Errc::invalid_argument, "pull: a number or a label, not both");
  DS_TRY(check_label(want.label).with_context("pull"));
  close_staged();
  const CallContext until(call);
  const auto stopping = control_.stop_by(until.stop());
  control_.look_at_clock(until.deadline());
  const OnTarget on_target(*target_, until);
  Pull pull(session(partial_, invalidated_), want, until);
  auto prepared = pull.run();
  progress_.end();
  if (!prepared) {
    // Verified tiles wait for the next pull, in staging memory too: else a link too slow for one deadline would begin
    // from nothing each time.
    const Errc code = prepared.error().code();
    const bool later =
        code == Errc::timed_out || code == Errc::connection || code == Errc::lease_revoked || code == Errc::cancelled;
    if (!later) discard_full();
    if (!pull.ended_early()) note_standing(&prepared.error());
    return std::move(prepared).error();
  }
  // What this update has not taken of the last one's memory; one that brought nothing says nothing of the next.
  if (prepared->report.mode != PullMode::up_to_date) {
    BlockPool::shared().trim();
  } else {
    note_standing(nullptr);
  }
  auto staged = std::make_unique<StagedImpl>(*this, std::move(*prepared));
  staged_ = staged.get();
  return std::unique_ptr<StagedUpdate>(std::move(staged));
}

// ---- staged update -------------------------------------------------------------------------------------------

StagedImpl::StagedImpl(ReceiverImpl& receiver, Prepared prepared)
    : receiver_(&receiver), prepared_(std::move(prepared)) {}

StagedImpl::~StagedImpl() {
  if (receiver_ != nullptr) receiver_->close_staged();
}

void StagedImpl::drop() {
  if (phase_ != Phase::staged) return;
  phase_ = Phase::dropped;
  prepared_.steps.clear();
  if (receiver_ != nullptr && prepared_.report.mode == PullMode::full) receiver_->discard_full();
}

Status StagedImpl::check_attached() const {
  if (receiver_ != nullptr) return {};
  return Error(Errc::invalid_argument, "this update was overtaken by a later pull, or its receiver is gone");
}

Status StagedImpl::commit(const CallOptions& call) {
  DS_TRY(check_attached());
  if (phase_ != Phase::staged) return Error(Errc::invalid_argument, "commit: the update is not staged any more");
  if (call.stop.stop_requested()) return cancelled_while("beginning the commit");
  Status done = commit_staged(Deadline::of(call));
  receiver_->note_standing(done.ok() ? nullptr : &done.error());
  return done;
}

Status StagedImpl::commit_staged(Deadline deadline) {
  // What was staged is kept: with more time the same commit may do.
  if (deadline.passed()) return Error(Errc::timed_out, "commit: the deadline has passed");
  const auto start = std::chrono::steady_clock::now();
  const trace::Span span("commit", prepared_.report.version.id);
  Target& target = *receiver_->target_;
  invalidated_before_ = receiver_->invalidated_;
  Status status;
  switch (prepared_.report.mode) {
    case PullMode::up_to_date: break;
    case PullMode::delta:
      status = target.commit_delta(std::move(prepared_.steps), std::move(prepared_.state), deadline);
      break;
    case PullMode::full: status = target.commit_full(std::move(prepared_.state), deadline); break;
  }
  if (!status) {
    // Verified when it was pulled, so it is the memory that is another one now.
    if (status.error().code() == Errc::corrupt) receiver_->invalidated_ = true;
    drop();
    return std::move(status).with_context("commit of " + to_string(prepared_.report.version));
  }
  if (prepared_.report.mode == PullMode::full) {
    receiver_->partial_ = PartialUpdate();  // the update is closed: nothing to discard
    receiver_->invalidated_ = false;
  }
  phase_ = Phase::committed;
  prepared_.report.commit_s = seconds_since(start);
  if (receiver_->options_.attest_commits && prepared_.report.mode != PullMode::up_to_date) return attest(deadline);
  return {};
}

/// The version that was committed is the one that is there, or it is none.
Status StagedImpl::attest(const CallContext& until) {
  const auto start = std::chrono::steady_clock::now();
  const trace::Span span("attest", prepared_.report.version.id);
  CommitVerdict verdict = attest_commit(*receiver_->target_, receiver_->tiles_, until);
  prepared_.report.attest_s = seconds_since(start);
  if (verdict.status.ok()) return {};
  phase_ = Phase::dropped;
  if (verdict.was_wrong || invalidated_before_) receiver_->invalidated_ = true;
  return std::move(verdict.status).with_context("commit of " + to_string(prepared_.report.version));
}

Status StagedImpl::rollback() {
  DS_TRY(check_attached());
  switch (phase_) {
    case Phase::staged: drop(); return {};
    case Phase::dropped: return {};
    case Phase::committed: break;
  }
  if (prepared_.report.mode != PullMode::up_to_date) {
    const trace::Span span("rollback", prepared_.report.version.id);
    DS_TRY(roll_back(*receiver_->target_).with_context("rollback of " + to_string(prepared_.report.version)));
    if (invalidated_before_) receiver_->invalidated_ = true;
    receiver_->note_standing(nullptr);
  }
  phase_ = Phase::dropped;
  return {};
}

}  // namespace receiver
}  // namespace deltasync
