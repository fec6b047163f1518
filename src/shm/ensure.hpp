// Invariants that are checked in release builds too: going on would hand out torn versions.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace deltasync::shm {

inline void ensure(bool holds, const char* invariant) noexcept {
  if (holds) [[likely]]
    return;
  std::fprintf(stderr, "deltasync: broken invariant of the half protocol: %s\n", invariant);
  std::abort();
}

}  // namespace deltasync::shm
