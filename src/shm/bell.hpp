// Waking a process that waits for a change in the segment: a futex on a counter in the mapping.
#pragma once

#include <cstdint>

#include "base/deadline.hpp"
#include "format/segment.hpp"

namespace deltasync::shm {

/// Longest single sleep. A process that dies between a change and its ring costs the others no more than this.
inline constexpr std::chrono::milliseconds kBellSlice{20};

std::uint32_t bell_count(Bell& bell) noexcept;
/// Counts and wakes everyone who sleeps on it, in any process.
void ring(Bell& bell) noexcept;
/// Sleeps while the count is `seen`: until a ring, the deadline, or kBellSlice, whichever is first.
void sleep_on(Bell& bell, std::uint32_t seen, Deadline deadline) noexcept;

}  // namespace deltasync::shm
