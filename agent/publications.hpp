// When versions were published, for how far behind a receiver is. Times of this process's steady clock: nothing here
// depends on what the time is, or on another host's idea of it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>

#include "deltasync/version.hpp"

namespace deltasync::agent {

/// How far behind what is served somebody is who holds an older version, or none.
struct Behind {
  std::uint64_t versions = 0;         ///< published after the one that is held
  std::chrono::nanoseconds since{0};  ///< since the first of these was; zero if there is none
  bool operator==(const Behind&) const = default;
};

/// Remembers the last ones: what it says of who is later than all of them is a lower bound. Not thread-safe.
class Publications {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kRememberedMax = 4096;

  void add(const VersionId& id, Clock::time_point now) {
    published_.push_back({id, now});
    if (published_.size() > kRememberedMax) published_.pop_front();
  }

  /// Of who holds a version that is remembered, what came after it; of any other, what is later than it. Who holds
  /// something later than all, of an agent that was lost, has none of these.
  Behind behind(const VersionId& held, Clock::time_point now) const {
    auto first = std::find_if(published_.begin(), published_.end(), [&](const One& one) { return one.id == held; });
    if (first != published_.end()) {
      ++first;
    } else {
      first = std::find_if(published_.begin(), published_.end(), [&](const One& one) { return held < one.id; });
      if (first == published_.end()) first = published_.begin();
    }
    if (first == published_.end()) return {};
    return {static_cast<std::uint64_t>(published_.end() - first), now - first->at};
  }

 private:
  struct One {
    VersionId id;
    Clock::time_point at;
  };
  std::deque<One> published_;  // oldest first
};

}  // namespace deltasync::agent
