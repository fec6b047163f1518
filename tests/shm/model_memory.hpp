// The simulated memory under shm/protocol.hpp. An episode is run again from its start for every step: operations that
// it has done already return what the log says, the next one is done on the state, and any after that marks the
// episode as unfinished and does nothing.
#pragma once

#include "shm/model_state.hpp"

namespace deltasync::shm::model {

struct Rules {
  Guard broken = Guard::none;
  bool check_edges = true;     ///< off when a guard is broken: the explorer is to see the damage, not the deed
  bool check_progress = true;  ///< off when the damage to be seen is another than a stuck party
};

class Memory {
 public:
  using Cell = unsigned;

  Memory(State& state, unsigned actor, const Rules& rules, bool delays_bytes = false)
      : s_(state), me_(actor), rules_(rules), delays_bytes_(delays_bytes) {}

  // ---- the policy that Protocol asks for
  Cell half_state(unsigned half) const { return kState + half; }
  Cell half_info(unsigned half, unsigned word) const { return kInfoCells + half * kInfo + word; }
  Cell slot_phase(unsigned slot) const { return kPhase + slot; }
  Cell slot_owner(unsigned slot) const { return kOwner + slot; }
  Cell progress(unsigned half, std::uint64_t) const { return kProgress + half; }
  static constexpr unsigned info_words() { return kInfo; }
  static constexpr unsigned slots() { return kSlots; }
  bool broken(Guard guard) const { return rules_.broken == guard; }

  std::uint64_t load(Cell cell) {
    return operation([&] { return seen(cell); });
  }
  void store(Cell cell, std::uint64_t value) {
    operation([&] {
      check_store(cell);
      if (broken(Guard::words_in_total_order)) {
        delay({cell, value, 0});
      } else {
        release(cell);
        s_.cells[cell] = value;
      }
      return std::uint64_t{0};
    });
  }
  bool cas(Cell cell, std::uint64_t expected, std::uint64_t desired) {
    return operation([&] {
             if (s_.cells[cell] != expected) return std::uint64_t{0};
             release(cell);
             check_cas(cell, expected, desired);
             s_.cells[cell] = desired;
             return std::uint64_t{1};
           }) != 0;
  }
  bool owner_dead(unsigned slot) {
    return operation([&] { return std::uint64_t{process_dead(s_.cells[kOwner + slot])}; }) != 0;
  }

  // ---- the bytes of the halves
  // Where they are delayed, others see a byte at any moment up to its writer's next word, which releases it. No more
  // is to be modelled: no byte goes before the load that opened its copy (acquire), and a reader's bytes are judged one
  // by one, so their order among each other decides nothing. The words are sequentially consistent, as in cells.hpp;
  // were they stored by release alone, others would see them late too, in their order, unless an exchange follows.
  void write_data(unsigned half, unsigned cell, std::uint64_t sequence, std::uint32_t value);
  /// `must_be`: the version that the reader is entitled to find; 0 = it checks digests itself.
  std::uint32_t read_data(unsigned half, unsigned cell, std::uint32_t must_be);
  /// Others see the oldest store that they do not see yet, or all.
  void drain_one();
  void drain();

  // ---- the agent's own memory, one mutex section each
  template <class F>
  std::uint64_t privately(F&& section) {
    return operation(std::forward<F>(section));
  }

  /// The leader's claim is checked against what it wanted.
  void about_to_fill(std::uint32_t value) { claiming_ = value; }

  bool process_dead(std::uint64_t process) const {
    for (unsigned i = 0; i < s_.actors; ++i) {
      const auto& a = s_.actor[i];
      if (a.kind == Kind::writer && a.process == process) {
        return a.status == Status::dead || a.status == Status::finished;
      }
    }
    return false;
  }

  bool unfinished() const { return unfinished_; }
  bool acted() const { return acted_; }
  std::uint64_t observation() const { return observation_; }
  Violation violation() const { return violation_; }
  void report(Violation violation) {
    if (violation_ == Violation::none && !unfinished_) violation_ = violation;
  }
  State& state() { return s_; }
  Actor& self() { return s_.actor[me_]; }

 private:
  template <class F>
  std::uint64_t operation(F&& effect) {
    auto& log = s_.actor[me_];
    if (at_ < log.log_size) return log.log[at_++];
    if (acted_) {
      unfinished_ = true;
      return 0;
    }
    acted_ = true;
    observation_ = effect();
    return observation_;
  }
  void release(Cell word) {
    const bool broken = rules_.broken == Guard::bytes_before_words ||
                        (rules_.broken == Guard::bytes_before_count && word >= kProgress && word < kData);
    if (!broken) drain();
  }
  void delay(const Pending& stored);
  void check_data(const Pending& bytes);
  /// What this actor finds there: its own stores at once.
  std::uint64_t seen(Cell cell) const;
  void check_store(Cell cell);
  void check_cas(Cell cell, std::uint64_t from, std::uint64_t to);
  void check_edge(unsigned half, HalfWord from, HalfWord to);
  bool may_abort(std::uint64_t sequence) const;

  State& s_;
  const unsigned me_;
  const Rules& rules_;
  const bool delays_bytes_;
  unsigned at_ = 0;
  bool acted_ = false;
  bool unfinished_ = false;
  std::uint64_t observation_ = 0;
  std::uint32_t claiming_ = 0;
  Violation violation_ = Violation::none;
};

}  // namespace deltasync::shm::model
