// Where the versions of an agent come from that a relay writes to: so that relays which would pull in a circle are
// told, and those who pull from here hear when no newer version comes any more.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/process.hpp"
#include "base/utf8.hpp"
#include "format/wire_report.hpp"

namespace deltasync::agent {

/// Known as long as the relay that said it is connected; that there was one, until a writer comes that is none, also by
/// the next agent of the name.
/// Thread-safe.
class Origin {
 public:
  using Clock = std::chrono::steady_clock;
  /// A relay that is started again is there within it, and nobody is told.
  static constexpr auto kGrace = std::chrono::milliseconds(500);

  /// No newer version comes, and since when.
  struct CutOff {
    std::string why;
    Clock::time_point since;
  };

  /// As the agent before this one knew it: source() of its Origin.
  void was(const std::string& source, std::chrono::milliseconds grace) {
    const std::lock_guard lock(mutex_);
    source_ = source;
    if (source_.empty()) return;
    cut_off_ = gone();
    grace_ = grace;
  }
  void set(std::uint64_t connection, const ProcessId& relay, wire::Parents said) {
    const std::lock_guard lock(mutex_);
    said_by_ = connection;
    relay_ = relay;
    parents_ = std::move(said.list);
    source_ = parents_.empty() ? "another one" : printable(parents_.front().endpoint);
    grace_ = kGrace;
    if (said.cut_off_ns == 0) return cut_off_.reset();
    const auto since = Clock::now() - std::chrono::nanoseconds(std::min<std::uint64_t>(said.cut_off_ns, kLongestNs));
    cut_off_ = {
        "its relay is there, but the agent at " + source_ + ", from which that pulls, is away or cut off itself",
        since};
  }
  void forget(std::uint64_t connection) {
    const std::lock_guard lock(mutex_);
    if (said_by_ != connection || parents_.empty()) return;
    cut_off_ = gone();
    parents_.clear();
    stopped_.reset();
  }
  /// A writer that is no relay has brought a version.
  void is_trainers() {
    const std::lock_guard lock(mutex_);
    parents_.clear();
    source_.clear();
    cut_off_.reset();
    stopped_.reset();
  }

  /// To be called often: a relay that is stopped says nothing, and ends no connection.
  void look() {
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    if (parents_.empty() || now - looked_at_ < kLookEvery) return;
    looked_at_ = now;
    if (!is_stopped(relay_)) return stopped_.reset();
    if (!stopped_) stopped_ = {"its relay (" + to_string(relay_) + ") is stopped: kill -CONT lets it go on", now};
  }

  /// The relay is in the middle of a version, and brings no more of it; nothing: that is not so.
  void stands(std::optional<CutOff> stands) {
    const std::lock_guard lock(mutex_);
    stands_ = std::move(stands);
  }

  /// The nearest first; none: a trainer's, or nobody's.
  std::vector<wire::Parent> parents() const {
    const std::lock_guard lock(mutex_);
    return parents_;
  }
  /// The agent from which the relay pulls that wrote last; empty: a trainer did, or nobody.
  std::string source() const {
    const std::lock_guard lock(mutex_);
    return source_;
  }
  bool is_relays() const { return !source().empty(); }
  /// Nothing: a relay is there, or there never was one.
  std::optional<CutOff> cut_off() const {
    const std::lock_guard lock(mutex_);
    for (const auto* said : {&cut_off_, &stopped_}) {
      if (*said && Clock::now() - (*said)->since >= grace_) return *said;
    }
    return stands_;
  }
  std::uint64_t cut_off_ns() const {
    const auto now = cut_off();
    return now ? static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - now->since).count()) : 0;
  }
  /// Of one thread: what cut_off() is now, if that is news.
  std::optional<std::optional<CutOff>> news() {
    auto now = cut_off();
    if (now.has_value() == told_) return std::nullopt;
    told_ = now.has_value();
    return now;
  }

 private:
  static constexpr std::uint64_t kLongestNs = 86'400'000'000'000;  // whatever a relay says, a day is enough

  CutOff gone() const {
    return {"the relay that brought its versions from " + source_ + " is gone: start it again", Clock::now()};
  }

  static constexpr auto kLookEvery = std::chrono::milliseconds(500);

  mutable std::mutex mutex_;
  std::uint64_t said_by_ = 0;  // protected by mutex_, as all but told_
  ProcessId relay_;
  std::vector<wire::Parent> parents_;
  std::string source_;
  std::chrono::milliseconds grace_ = kGrace;
  std::optional<CutOff> cut_off_;
  std::optional<CutOff> stopped_;
  std::optional<CutOff> stands_;
  Clock::time_point looked_at_;
  bool told_ = false;  // the thread's of news()
};

}  // namespace deltasync::agent
