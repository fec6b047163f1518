#include "tools/cli/follow.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <optional>
#include <utility>

#include "base/call_context.hpp"
#include "base/deadline.hpp"
#include "base/log.hpp"

namespace deltasync::cli {
namespace {

constexpr double kPauseMinS = 0.2;  ///< between two tries; doubled each time
constexpr double kPauseMaxS = 10;

/// What an error means to who follows.
enum class Outlook {
  passes,      ///< may be gone at the next try
  needs_user,  ///< somebody has to do something. At the start that is who typed the command; later the fleet changes
               ///< under it
  final,       ///< no repetition helps
};

Outlook outlook(Errc code) {
  switch (code) {
    case Errc::aborted:
    case Errc::connection:
    case Errc::corrupt:
    case Errc::gone:
    case Errc::layout_mismatch:
    case Errc::lease_revoked:
    case Errc::no_space:
    case Errc::peer_died:
    case Errc::quarantined:
    case Errc::timed_out: return Outlook::passes;
    case Errc::already_exists:
    case Errc::io:
    case Errc::not_found:
    case Errc::out_of_range:
    case Errc::permission:
    case Errc::protocol:
    case Errc::unauthenticated:
    case Errc::unsupported: return Outlook::needs_user;
    default: return Outlook::final;
  }
}

std::chrono::nanoseconds to_ns(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

/// Tries one after the other, each a version or a failure. A line when failures begin, one when they become others, and
/// one when they end.
class Tries {
 public:
  Tries(const Follower& follower, const std::stop_token& stop) : follower_(follower), stop_(stop) {}

  Result<PullReport> take() {
    const CallContext until(after_seconds(follower_.deadline_s), stop_);
    if (!receiver_) {
      DS_ASSIGN(receiver_, follower_.connect(until));
    }
    was_there_ = true;
    return follower_.take(*receiver_, until);
  }

  void succeeded() {
    if (failures_ > 0) log::info("pull_recovered failures={}", failures_);
    failures_ = 0;
    told_.reset();
    pause_s_ = kPauseMinS;
  }

  /// Waits until the next try is due; the error, if there is none.
  Status failed(const Error& error) {
    const Errc code = error.code();
    Outlook ahead = outlook(code);
    // What the command line says was good enough once: it is the files that it names, which somebody may be writing.
    if (!receiver_ && was_there_ && code == Errc::invalid_argument) ahead = Outlook::needs_user;
    if (ahead == Outlook::final || (ahead == Outlook::needs_user && !was_there_)) return error;
    // A receiver is bound to a layout and has its token; what cannot go on is made again.
    if (ahead == Outlook::needs_user || code == Errc::layout_mismatch) receiver_.reset();
    if (failures_++ == 0 && code == Errc::layout_mismatch) return {};  // another model is published: follow it at once
    if (code == Errc::timed_out) pause_s_ = kPauseMinS;                // the wait was the pause
    if (told_ != code) {
      log::warn("pull_failed again_in_s={} longest_pause_s={} error=\"{}\"", pause_s_, kPauseMaxS, error.to_string());
    }
    told_ = code;
    const auto pause = to_ns(pause_s_);
    CallContext(Deadline::after(pause), stop_).pause(pause);
    pause_s_ = std::min(2 * pause_s_, kPauseMaxS);
    return {};
  }

 private:
  const Follower& follower_;
  const std::stop_token& stop_;
  std::unique_ptr<Receiver> receiver_;
  bool was_there_ = false;      ///< a receiver with a target, once
  std::uint64_t failures_ = 0;  ///< since the last version
  std::optional<Errc> told_;    ///< of the line that stands
  double pause_s_ = kPauseMinS;
};

}  // namespace

Deadline after_seconds(double seconds) {
  return Deadline::after(to_ns(seconds));
}

Status follow(const Follower& follower, const std::stop_token& stop) {
  std::signal(SIGHUP, SIG_IGN);  // as an agent: closing the terminal means no node
  Tries tries(follower, stop);
  Status told;
  std::uint64_t lost_lines = 0;  // one after the other
  for (std::uint64_t done = 0; follower.count == 0 || done < follower.count;) {
    const auto taken = tries.take();
    if (taken) {
      tries.succeeded();
      ++done;
      told = follower.tell(*taken);
      if (told && lost_lines != 0) log::info("output_back lost_lines={}", std::exchange(lost_lines, 0));
      if (told) continue;
      if (told.error().code() != Errc::no_space) return told;
      if (lost_lines++ == 0) log::warn("output_lost error=\"{}\" then=\"going on\"", told.error().to_string());
    } else {
      DS_TRY(tries.failed(taken.error()));
    }
  }
  return told;
}

}  // namespace deltasync::cli
