// The memory policy of shm/protocol.hpp over a mapped segment.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/protocol.hpp"
#include "shm/segment.hpp"

namespace deltasync::shm {

static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free, "a lock would live in one process only");

/// Sequentially consistent on purpose: the copy bracket needs a store→load order (SYNC POINT copy), and these words
/// are touched a few times per version, not per byte.
class Cells {
 public:
  using Cell = std::uint64_t*;

  explicit Cells(Segment& segment) : b_(segment.control()), segment_(segment) {}

  Cell half_state(unsigned half) const noexcept { return &b_.state[half].word; }
  Cell half_info(unsigned half, unsigned word) const noexcept { return &b_.info[half].words[word]; }
  Cell slot_phase(unsigned slot) const noexcept { return &b_.slot[slot].phase; }
  Cell slot_owner(unsigned slot) const noexcept { return &b_.owner[slot].pid; }
  Cell progress(unsigned half, std::uint64_t batch) const noexcept { return &segment_.progress(half)[batch]; }
  static constexpr unsigned info_words() noexcept { return kInfoWords; }
  static constexpr unsigned slots() noexcept { return kSlotsMax; }

  static std::uint64_t load(Cell cell) noexcept { return std::atomic_ref<std::uint64_t>(*cell).load(); }
  static void store(Cell cell, std::uint64_t value) noexcept { std::atomic_ref<std::uint64_t>(*cell).store(value); }
  static bool cas(Cell cell, std::uint64_t expected, std::uint64_t desired) noexcept {
    return std::atomic_ref<std::uint64_t>(*cell).compare_exchange_strong(expected, desired);
  }
  static constexpr bool broken(Guard) noexcept { return false; }
  /// Writers prove nobody's death; the agent's policy overrides this.
  static constexpr bool owner_dead(unsigned) noexcept { return false; }

  ControlBlock& block() const noexcept { return b_; }

 private:
  ControlBlock& b_;
  Segment& segment_;
};

}  // namespace deltasync::shm
