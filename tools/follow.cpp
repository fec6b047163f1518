#include "tools/follow.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/log.hpp"

namespace deltasync::cli {
namespace {

constexpr double kPauseMinS = 0.2;  ///< between two tries; doubled each time
constexpr double kPauseMaxS = 10;

/// Failures that may be gone at the next try.
bool may_pass(Errc code) {
  switch (code) {
    case Errc::aborted:
    case Errc::connection:
    case Errc::corrupt:
    case Errc::lease_revoked:
    case Errc::no_space:
    case Errc::quarantined:
    case Errc::timed_out: return true;
    default: return false;
  }
}

std::chrono::nanoseconds to_ns(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

Result<PullReport> take_one(const Follower& follower, std::unique_ptr<Receiver>& receiver, const Until& until) {
  if (!receiver) {
    DS_ASSIGN(receiver, follower.connect(until));
  }
  return follower.take(*receiver, until);
}

}  // namespace

Deadline after_seconds(double seconds) {
  return Deadline::after(to_ns(seconds));
}

Status follow(const Follower& follower, std::unique_ptr<Receiver> receiver, const std::stop_token& stop) {
  bool bound_again = false;
  double pause_s = kPauseMinS;
  for (std::uint64_t done = 0; follower.count == 0 || done < follower.count;) {
    const auto taken = take_one(follower, receiver, Until(after_seconds(follower.deadline_s), stop));
    if (taken) {
      DS_TRY(follower.tell(*taken));
      bound_again = false;
      pause_s = kPauseMinS;
      ++done;
    } else if (!bound_again && taken.error().code() == Errc::layout_mismatch) {
      receiver.reset();  // the trainer publishes another model now; follow it
      bound_again = true;
    } else if (may_pass(taken.error().code())) {
      bound_again = false;
      if (taken.error().code() == Errc::timed_out) pause_s = kPauseMinS;  // the wait was the pause
      log::warn("pull_failed again_in_s={} error=\"{}\"", pause_s, taken.error().to_string());
      const auto pause = to_ns(pause_s);
      Until(Deadline::after(pause), stop).pause(pause);
      pause_s = std::min(2 * pause_s, kPauseMaxS);
    } else {
      return taken.error();
    }
  }
  return {};
}

}  // namespace deltasync::cli
