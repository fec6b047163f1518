// For programs that link deltasync_late_clock: a steady clock that jumps at a look that the test names, so that a
// deadline passes at a known place of the code, and not after some time.
#pragma once

#include <cstdint>

#include "base/deadline.hpp"

namespace deltasync::test {

/// While one lives, the look-th look at the clock from now on (1: the next), by whatever thread, and all later ones see
/// that the deadline has passed.
class LateClock {
 public:
  LateClock(Deadline deadline, std::uint64_t look);
  ~LateClock();
  LateClock(const LateClock&) = delete;
  LateClock& operator=(const LateClock&) = delete;
};

}  // namespace deltasync::test
