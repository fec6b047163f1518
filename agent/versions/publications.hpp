// When versions were published: from that follows how far a receiver is behind. Times are of this process's steady
// clock, so no wall clock and no other host's clock matters.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>

#include "deltasync/version.hpp"

namespace deltasync::agent {

/// How far the holder of an older version, or of none, is behind what is served.
struct Behind {
  std::uint64_t versions = 0;         ///< published after the one that is held
  std::chrono::nanoseconds since{0};  ///< since the first of these was; zero if there is none
  bool operator==(const Behind&) const = default;
};

/// Remembers the last kRememberedMax; for a holder of something older it gives a lower bound. A look takes logarithmic
/// time. Not thread-safe.
class Publications {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kRememberedMax = 4096;

  void add(const VersionId& id, Clock::time_point now) {
    const VersionId latest = published_.empty() ? id : std::max(published_.back().latest, id);
    places_[id] = forgotten_ + published_.size();
    published_.push_back({id, latest, now});
    if (published_.size() > kRememberedMax) forget_oldest();
  }

  /// For a version that is remembered: what was published after it. For any other: what was published from the first
  /// one on that is later than it. If `held` is later than all of them, nothing in its epoch, which a relay has brought
  /// to it before it is published here; of another epoch (of an agent that was lost) it counts as older than all.
  Behind behind(const VersionId& held, Clock::time_point now) const {
    const auto first = first_missing(held);
    if (first == published_.end()) return {};
    return {static_cast<std::uint64_t>(published_.end() - first), now - first->at};
  }

 private:
  struct One {
    VersionId id;
    VersionId latest;  ///< of all up to this one
    Clock::time_point at;
  };
  using List = std::deque<One>;

  List::const_iterator first_missing(const VersionId& held) const {
    if (const auto place = places_.find(held); place != places_.end()) {
      return published_.begin() + static_cast<std::ptrdiff_t>(place->second - forgotten_ + 1);
    }
    const auto first = std::partition_point(published_.begin(), published_.end(),
                                            [&](const One& one) { return !(held < one.latest); });
    if (published_.empty()) return first;
    const VersionId& newest = published_.back().id;
    if (held.epoch == newest.epoch && held.number > newest.number) return published_.end();
    return first != published_.end() ? first : published_.begin();
  }

  void forget_oldest() {
    const auto place = places_.find(published_.front().id);
    if (place->second == forgotten_) places_.erase(place);  // else it was published again
    published_.pop_front();
    ++forgotten_;
  }

  List published_;                             // oldest first
  std::uint64_t forgotten_ = 0;                // before these
  std::map<VersionId, std::uint64_t> places_;  // of each id the last, counted from the first that was ever published
};

}  // namespace deltasync::agent
