// Which agent the conversation is with: who is asked first, when another one takes its place, and for how long one
// that failed is left alone.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "net/endpoint.hpp"
#include "receiver/control.hpp"

namespace deltasync::receiver {
namespace {

constexpr auto kLookLimit = std::chrono::milliseconds(1000);  ///< of a look at the clock, which nobody depends on
constexpr auto kSilentFor = std::chrono::seconds(10);  ///< an agent that was found silent is asked after the others
constexpr std::size_t kHopsMax = 8;                    ///< from one agent to the next that it names
constexpr std::size_t kFollowMax = 8;                  ///< of these that are tried each time
constexpr int kPreferredWaits = 32;  ///< of the preferred one that goes on falling silent, so many times as long

bool is_later(const VersionId& a, const VersionId& b) {
  return a.epoch > b.epoch || (a.epoch == b.epoch && a.number > b.number);
}

/// Of an attempt to connect: another one would end like it.
bool no_try_helps(Errc code) {
  return code == Errc::unauthenticated || code == Errc::unsupported || code == Errc::invalid_argument;
}

/// Whether who holds `held` does as well there: nothing is lost by it, and what comes later comes there as well. An
/// older trainer's agent is no such place, however lately it was started again.
bool is_as_good(const wire::Lag& there, const VersionId& held, std::chrono::nanoseconds lately) {
  const VersionId& newest = there.newest.id;
  if (is_later(newest, held)) return true;
  if (!newest.valid() || there.cut_off_ns != 0) return false;
  return newest == held || (newest.epoch == held.epoch && std::chrono::nanoseconds(there.newest_age_ns) < lately);
}

}  // namespace

/// A new connection takes the place of the one that is there, if it comes to be.
bool Control::replace(Deadline deadline, const std::function<bool(Connection&)>& is_wanted) {
  Connection fresh;
  const Status connected = connect_once(fresh, std::min(kLookLimit, peer_.handshake()), deadline);
  if (!connected) noted_ = connected.error();
  if (!connected || (is_wanted && !is_wanted(fresh))) {
    closed_bytes_ += fresh.bytes_received();
    return false;
  }
  if (connection_.open() && fresh.instance() != connection_.instance()) leave();
  drop();
  connection_ = std::move(fresh);
  tell_standing();
  return true;
}

void Control::look_around(Deadline deadline) {
  if (!connection_.open() || connection_.stale()) return;
  if (peer_.addresses->at() != 0 && !peer_.addresses->is_named() &&
      Clock::now() - preferred_tried_at_ > preferred_wait_)
    try_preferred(deadline);
  if (trace::on() && std::chrono::nanoseconds(trace::now_ns() - clock_seen_ns_) > peer_.tuning.clock_look) {
    replace(deadline);
  }
}

void Control::try_preferred(Deadline deadline) {
  Addresses& addresses = *peer_.addresses;
  const auto place = addresses.place();
  addresses.use(0);
  noted_.reset();
  const bool back = replace(deadline, [&](Connection& fresh) {
    if (fresh.protocol() < 5) return true;
    const auto lag = fresh.lag(standing_.committed.id, deadline.earlier(Deadline::after(kLookLimit)));
    return lag && is_as_good(*lag, standing_.committed.id, peer_.tuning.lately);
  });
  preferred_tried_at_ = Clock::now();
  if (back) {
    preferred_back_at_ = preferred_tried_at_;
    log::info("agent_back agent={}", peer_.endpoint());
    return;
  }
  // While it is tried nothing else can come.
  if (noted_ && noted_->code() == Errc::timed_out) wait_longer();
  addresses.use(place);
}

bool Control::go_where_later(const VersionId& held, bool in_part, Deadline deadline) {
  Addresses& addresses = *peer_.addresses;
  const auto place = addresses.place();
  news_at_ = Clock::now();
  for (const std::size_t i : in_order()) {
    const bool in_use = place.second == nullptr && i == place.first;
    if (in_use || deadline.passed() || stop_.stop_requested()) continue;
    addresses.use(i);
    const bool found = replace(deadline, [&](Connection& fresh) {
      if (fresh.protocol() < 5) return false;
      const auto lag = fresh.lag(held, deadline.earlier(Deadline::after(kLookLimit)));
      return lag && (is_later(lag->newest.id, held) || (in_part && lag->newest.id == held));
    });
    if (!found) continue;
    preferred_tried_at_ = Clock::now();
    return true;
  }
  addresses.use(place);
  return false;
}

bool Control::leave_cut_off(const Error& said, const VersionId& held, bool in_part, Deadline deadline) {
  const std::string from = peer_.endpoint();
  const bool found = go_where_later(held, in_part, deadline);
  log::warn(cut_off_lines_, "agent_cut_off agent={} said=\"{}\" then=\"{}\"", from, said.message(),
            found                          ? "going on at " + peer_.endpoint()
            : peer_.addresses->size() == 1 ? "waiting; another agent in the list of endpoints would be asked"
                                           : "waiting: no other has more");
  return found;
}

bool Control::leave_behind(const VersionId& held, bool in_part, Deadline deadline) {
  const bool alone = peer_.addresses->size() == 1 && !peer_.addresses->is_named();
  if (alone || Clock::now() - news_at_ < peer_.tuning.others_look) return false;
  const std::string from = peer_.endpoint();
  const bool found = go_where_later(held, in_part, deadline);
  if (found) log::warn("agent_behind agent={} then=\"going on at {}\"", from, peer_.endpoint());
  return found;
}

bool Control::leave_older(const VersionId& held, Deadline deadline) {
  const std::string from = peer_.endpoint();
  const bool found = go_where_later(held, true, deadline);
  if (found) log::warn("agent_behind agent={} then=\"going on at {}\"", from, peer_.endpoint());
  return found;
}

void Control::wait_longer() {
  preferred_wait_ = std::min(2 * preferred_wait_, kPreferredWaits * peer_.tuning.preferred_look);
}

/// The agent in use is not to be waited for, unless there is no other. A preferred one that is back and soon silent
/// again is left alone for longer each time.
void Control::note_silent() {
  const auto now = Clock::now();
  if (peer_.addresses->is_named()) return;  // the others are asked next in any case
  silent_at_[peer_.addresses->at()] = now;
  if (peer_.pulse) peer_.pulse->be_patient(peer_.tuning.silence);
  if (peer_.addresses->at() != 0) return;
  if (now - preferred_back_at_ < kPreferredWaits * peer_.tuning.preferred_look) return wait_longer();
  preferred_wait_ = peer_.tuning.preferred_look;
}

/// One that is gone says so at once; one that hangs, or did a moment ago, is asked last.
std::vector<std::size_t> Control::in_order() const {
  std::vector<std::size_t> order(peer_.addresses->size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto now = Clock::now();
  const auto was_silent = [&](std::size_t i) {
    return silent_at_[i] != Clock::time_point() && now - silent_at_[i] < kSilentFor;
  };
  std::stable_partition(order.begin(), order.end(), [&](std::size_t i) { return !was_silent(i); });
  return order;
}

Status Control::ensure(Deadline deadline) {
  if (connection_.open() && !connection_.stale()) return {};
  Addresses& addresses = *peer_.addresses;
  Backoff backoff(peer_.tuning);
  Backoff busy = Backoff::from_busy(peer_.tuning);
  const std::vector<std::size_t> order = in_order();
  std::optional<Error> hopeless;
  for (std::size_t tried = 1;; ++tried) {
    const bool is_last = tried % order.size() == 0;
    addresses.use(order[(tried - 1) % order.size()]);
    auto status = connect(tried <= order.size() ? peer_.handshake() : peer_.tuning.handshake, deadline);
    if (status) {
      if (std::exchange(away_, false)) log::info("agent_back agent={}", peer_.endpoint());
      heard_at_ = preferred_tried_at_ = Clock::now();
      return status;
    }
    const Errc code = status.error().code();
    if (!hopeless && no_try_helps(code)) hopeless = status.error();
    if (hopeless && is_last) return *std::move(hopeless);
    if (code == Errc::cancelled || deadline.passed()) return status;
    if (code == Errc::timed_out) note_silent();
    const auto pause = turned_away_ ? busy.next() : backoff.next();
    if (turned_away_) {
      say_busy(status.error(), pause);
    } else if (!std::exchange(away_, true)) {
      log::warn("agent_away agent={} error=\"{}\" then=\"trying {}\"", peer_.endpoint(), status.error().message(),
                addresses.size() == 1 ? "until it is back" : "the next");
    }
    if (!is_last) continue;
    CallContext(deadline, stop_).pause(pause);
    if (stop_.stop_requested()) return cancelled_while("connecting to the agent at " + peer_.endpoint());
  }
}

void Control::say_busy(const Error& said, std::chrono::milliseconds pause) {
  log::warn(busy_lines_, "agent_busy agent={} again_in_ms={} said=\"{}\"", peer_.endpoint(), pause.count(),
            said.message());
}

void Control::pass_over(const Error& why) {
  log::warn(cycle_lines_, "agent_passed_over agent={} error=\"{}\" then=\"{}\"", peer_.endpoint(), why.message(),
            peer_.addresses->size() == 1 ? "asking again" : "trying the next");
  leave();
  noted_ = why;
  if (!peer_.addresses->is_named()) silent_at_[peer_.addresses->at()] = Clock::now();
}

Status Control::follow(const wire::Elsewhere& named, const Digest128& layout, std::set<std::uint64_t>& asked,
                       Deadline deadline) {
  Addresses& addresses = *peer_.addresses;
  const auto place = addresses.place();
  const std::string from = peer_.endpoint();
  const net::Transport transport = peer_.address().transport;  // who asked for UCX is not to get TCP unawares
  asked.insert(instance());
  std::size_t left = asked.size() <= kHopsMax ? kFollowMax : 0;
  for (const std::string& endpoint : named.endpoints) {
    if (left == 0 || deadline.passed() || stop_.stop_requested()) break;
    auto parsed = net::parse_endpoint(endpoint);
    if (!parsed || parsed->port == 0) continue;
    if (!addresses.use_named({endpoint, parsed->host, parsed->port, transport})) continue;
    --left;
    const bool there = replace(deadline, [&](Connection& fresh) {
      return fresh.welcome().has_layout != 0 && fresh.welcome().layout == layout && asked.count(fresh.instance()) == 0;
    });
    if (!there) continue;
    log::info("agent_has_no_place agent={} then=\"going on at {}\"", from, endpoint);
    return {};
  }
  addresses.use(place);
  if (stop_.stop_requested()) return cancelled_while("looking for an agent with a place");
  return Error(Errc::connection, "busy: as many pull from the agent at " + from + " as may, and none of the " +
                                     std::to_string(named.endpoints.size()) + " agents that it names takes one more");
}

}  // namespace deltasync::receiver
