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
#include "receiver/bucket/bucket_receiver.hpp"
#include "receiver/parts/parts_receiver.hpp"
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
  return receiver::connect(std::move(options), receiver::Tuning(), call);
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

/// Half of the time that is left.
Deadline half_of(Deadline deadline) {
  return Deadline::after(std::min<std::chrono::nanoseconds>(deadline.remaining() / 2, std::chrono::hours(1)));
}

Result<std::vector<Address>> addresses_of(const std::string& list) {
  std::vector<std::string> endpoints = split_endpoints(list);
  if (endpoints.empty()) endpoints.push_back(list);  // the error names it
  std::vector<Address> addresses;
  for (std::string& one : endpoints) {
    DS_ASSIGN(net::PeerEndpoint peer, net::parse_peer_endpoint(one));
    if (peer.at.port == 0) return Error(Errc::invalid_argument, "endpoint '" + one + "' has no port");
    addresses.push_back({std::move(one), std::move(peer.at.host), peer.at.port, peer.transport});
  }
  return addresses;
}

/// Null if no endpoint wants it.
Result<std::shared_ptr<net::ucx::Ucx>> ucx_if_wanted(const std::vector<Address>& addresses, bool tls) {
  const auto wants = [](const Address& one) { return one.transport == net::Transport::ucx; };
  const auto first = std::find_if(addresses.begin(), addresses.end(), wants);
  if (first == addresses.end()) return std::shared_ptr<net::ucx::Ucx>();
  if (tls) {
    return Error(Errc::invalid_argument, "endpoint '" + first->endpoint +
                                             "': UCX has no TLS: leave out the TLS options, or pull over TCP, without "
                                             "ucx://");
  }
  const bool loopback = std::all_of(addresses.begin(), addresses.end(),
                                    [&](const Address& one) { return !wants(one) || net::is_loopback(one.host); });
  return net::ucx::Ucx::share(loopback);
}

}  // namespace

// ---- receiver ------------------------------------------------------------------------------------------------

ReceiverImpl::ReceiverImpl(ReceiverOptions options, const CpuList& cores, Peer peer)
    : BoundTarget(std::move(options), pool_),
      peer_(std::move(peer)),
      standing_(std::make_shared<Standing>(net::make_random_id(), peer_)),
      control_(peer_, standing_->report()),
      stream_pool_(options_.streams, "ds-stream", on_cores(cores)),
      pool_(thread_count(options_.threads), "ds-receiver", on_cores(cores)),
      streams_(peer_, stream_pool_),
      link_(options_.link_gbps, peer_.tuning.link_sample_bytes),
      progress_(peer_.tuning.say_progress),
      local_(peer_, options_.local) {}

ReceiverImpl::~ReceiverImpl() {
  close_staged();
  discard_full();
  target_.reset();  // it uses the pool
  BlockPool::shared().trim();
  control_.say_goodbye();
}

Result<std::unique_ptr<ReceiverImpl>> ReceiverImpl::connect(ReceiverOptions options, const Tuning& tuning,
                                                            const CallContext& until, std::size_t first) {
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
  DS_ASSIGN(std::vector<Address> addresses, addresses_of(options.endpoint));
  auto ucx = ucx_if_wanted(addresses, options.tls.wanted());
  Peer peer{std::make_shared<Addresses>(std::move(addresses), first), options.token, options.name, tuning};
  DS_ASSIGN(peer.tls, net::Tls::client_if_wanted(options.tls));
  DS_ASSIGN(peer.ucx, ucx);
  if (peer.addresses->size() > 1) peer.pulse = std::make_shared<net::Pulse>(tuning.patience);
  std::unique_ptr<ReceiverImpl> made;
  try {
    made.reset(new ReceiverImpl(std::move(options), cores, std::move(peer)));
  } catch (const std::system_error& e) {
    return Error(Errc::no_space, "the receiver's threads: " + e.code().message());
  }
  const auto stopping = made->control_.stop_by(until.stop());
  DS_TRY(until.check("connecting").with_context("agent at " + made->peer_.endpoint()));
  DS_TRY(made->control_.connect(until.deadline()));
  DS_ASSIGN(wire::UnpackedLayout unpacked,
            made->fetch_layout(until).with_context("agent at " + made->peer_.endpoint()));
  made->layout_ = unpacked.layout;
  made->sidecar_ = wire::take_sidecar(std::move(unpacked));
  made->batches_ = delta::make_batches(*made->layout_);
  return made;
}

Result<Sidecar> ReceiverImpl::sidecar_now(const CallContext& until) {
  const auto stopping = control_.stop_by(until.stop());
  DS_ASSIGN(wire::UnpackedLayout now, fetch_layout(until));
  if (now.layout->digest() != layout_->digest()) {
    return Error(Errc::layout_mismatch, "the agent serves another layout");
  }
  return wire::take_sidecar(std::move(now));
}

Result<wire::UnpackedLayout> ReceiverImpl::fetch_layout(const CallContext& until) {
  const Deadline deadline = until.deadline();
  Backoff backoff(peer_.tuning);
  std::uint32_t spoiled = 0;
  std::optional<Error> last_spoiled;
  for (;;) {
    auto answer = control_.layout(deadline);
    if (answer.value) return wire::unpack_layout(*answer.value);
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

void ReceiverImpl::discard_full() {
  if (partial_.open) target_->discard_full();
  partial_ = PartialUpdate();
}

void ReceiverImpl::unstage() {
  if (auto staged = take_staged_full()) partial_.digests = std::move(staged->digests);
}

Session ReceiverImpl::session(PartialUpdate& partial, bool& invalidated) {
  return {peer_,     options_, *layout_,      sidecar_,    batches_,
          tiles_,    control_, streams_,      pool_,       link_,
          progress_, local_,   changed_last_, *target_,    target_->capabilities(),
          partial,   scrubs_,  older_epochs_, invalidated, last_held_};
}

Result<std::unique_ptr<StagedUpdate>> ReceiverImpl::pull(const Want& want, const CallOptions& call) {
  DS_TRY(check_pullable());
  DS_TRY(check_want(want).with_context("pull"));
  close_staged();
  const CallContext until(call);
  if (!want.directory.empty()) return pull_directory(want.directory, until);
  const auto stopping = control_.stop_by(until.stop());
  control_.look_around(until.deadline());
  const OnTarget on_target(*target_, until);
  Pull pull(session(partial_, invalidated_), want, until);
  auto prepared = pull.run();
  progress_.end();
  if (!prepared) {
    // Verified tiles wait for the next pull, in staging memory too: else a link too slow for one deadline would begin
    // from nothing each time. A version that is gone meanwhile leads to the one that the next pull asks for.
    const Errc code = prepared.error().code();
    const bool later = code == Errc::timed_out || code == Errc::connection || code == Errc::lease_revoked ||
                       code == Errc::cancelled || code == Errc::gone;
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
  return stage(std::move(*prepared));
}

/// Of several endpoints the first that answers. All of them may be members of one job, so that any of these will do;
/// else each has all versions, and the receiver goes on at another when it loses one.
Result<std::unique_ptr<Receiver>> connect(const ReceiverOptions& options, const Tuning& tuning,
                                          const CallContext& until) {
  if (const auto path = bucket_path(options.endpoint)) {
    DS_ASSIGN(auto buckets, BucketReceiver::connect(options, *path, until));
    return std::unique_ptr<Receiver>(std::move(buckets));
  }
  const std::size_t count = std::max<std::size_t>(1, split_endpoints(options.endpoint).size());
  std::optional<Error> failed;
  for (std::size_t i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    auto made = ReceiverImpl::connect(options, tuning, last ? until : until.earlier(half_of(until.deadline())), i);
    if (!made) {
      Error why = std::move(made).error();
      failed = failed ? Error(failed->code(), failed->message() + "; " + why.message()) : std::move(why);
      if (until.stop_requested()) break;
      continue;
    }
    if ((*made)->sidecar().part.empty()) return std::unique_ptr<Receiver>(std::move(*made));
    ReceiverOptions one = options;
    one.endpoint = split_endpoints(options.endpoint)[i];
    if (count > 1) {  // the others are not its, but other members'
      DS_ASSIGN(made, ReceiverImpl::connect(one, tuning, until));
    }
    DS_ASSIGN(auto parts, PartsReceiver::connect(std::move(*made), std::move(one), tuning, until));
    return std::unique_ptr<Receiver>(std::move(parts));
  }
  return *std::move(failed);
}

}  // namespace receiver
}  // namespace deltasync
