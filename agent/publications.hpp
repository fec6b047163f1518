// When versions were published, for how far behind a receiver is. Times of this process's steady clock: nothing here
// depends on what the time is, or on another host's idea of it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>

#include "deltasync/version.hpp"

namespace deltasync::agent {

/// How far behind what is served somebody is who holds an older version, or none.
struct Behind {
  std::uint64_t versions = 0;         ///< published after the one that is held
  std::chrono::nanoseconds since{0};  ///< since the first of these was; zero if there is none
  bool operator==(const Behind&) const = default;
};

/// Remembers the last ones: what it says of who is later than all of them is a lower bound. A look takes the logarithm
/// of their number. Not thread-safe.
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

  /// Of who holds a version that is remembered, what came after it; of any other, what came from the first on that is
  /// later than it. Who holds something later than all, of an agent that was lost, has none of these.
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
