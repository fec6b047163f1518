// A coordinator's machine and its ranks' in one place, and no network: what tests of single steps need.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "commit/coordinator_machine.hpp"
#include "commit/participant_machine.hpp"
#include "tests/commit/pretend_target.hpp"

namespace deltasync::commit {

inline constexpr std::uint64_t kTestLog = 9;

class Group {
 public:
  explicit Group(std::uint32_t ranks) {
    restart_coordinator(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) machines_.emplace_back(r, 100 + r, VersionId());
    targets_.resize(ranks);
    newest.assign(ranks, version(1));
  }

  void restart_coordinator(std::uint32_t ranks) {
    auto made = CoordinatorMachine::recover(ranks, log, new_log);
    ASSERT_TRUE(made) << made.error().to_string();
    coordinator_.emplace(*std::move(made));
    settle();
  }
  void restart_rank(std::uint32_t rank, VersionId holds = {}) {
    targets_[rank] = {};
    targets_[rank].holds = holds;
    machines_[rank] = ParticipantMachine(rank, machines_[rank].state().incarnation + 10, holds);
  }

  CoordinatorMachine& coordinator() { return *coordinator_; }
  ParticipantMachine& rank(std::uint32_t r) { return machines_[r]; }

  void settle() {
    while (coordinator_->pending()) {
      log.push_back(*coordinator_->pending());
      coordinator_->logged();
    }
  }
  /// One report for one order.
  OrderKind ask(std::uint32_t r) {
    const Status heard = coordinator_->on_report(rank(r).report());
    EXPECT_TRUE(heard) << heard.error().to_string();
    settle();
    last_order = coordinator_->order(r);
    const Status obeyed = rank(r).on_order(last_order);
    EXPECT_TRUE(obeyed) << obeyed.error().to_string();
    return last_order.kind;
  }
  void work(std::uint32_t r, std::optional<Error> error = {}) {
    const Work work = rank(r).work();
    if (work.kind == Work::Kind::none) return;
    WorkResult result = targets_[r].work(work, newest[r], std::move(error));
    EXPECT_FALSE(targets_[r].broken) << "rank " << r << " was to commit what it had not staged";
    result.root.bytes[0] = static_cast<std::uint8_t>(roots.count(r) != 0 ? roots[r] : 7);
    rank(r).done(work.serial, result);
  }
  /// Until nothing moves any more.
  void run() {
    for (int i = 0; i < 60; ++i) {
      for (std::uint32_t r = 0; r < machines_.size(); ++r) {
        if (silent.count(r) != 0) continue;
        ask(r);
        work(r);
      }
    }
  }
  void run_to(Phase phase) {
    for (int i = 0; i < 60; ++i) {
      for (std::uint32_t r = 0; r < machines_.size(); ++r) {
        if (rank(r).state().phase == phase) continue;
        ask(r);
        work(r);
      }
    }
    for (auto& machine : machines_) {
      ASSERT_EQ(machine.state().phase, phase);
      ASSERT_TRUE(coordinator_->on_report(machine.report()));
    }
    settle();
  }
  void begin() { ASSERT_TRUE(coordinator_->begin(Want())); }
  /// The trainer has published it, and a transaction is on its way there.
  void begin(std::uint64_t number) {
    for (Version& v : newest) v = version(number);
    begin();
  }
  /// Likewise, until each rank has come to the phase.
  void begin(std::uint64_t number, Phase phase) {
    begin(number);
    run_to(phase);
  }
  void update() {
    begin();
    run();
  }
  void bring_to(std::uint64_t number) {
    begin(number);
    run();
    ASSERT_EQ(all_serve(), number);
  }
  void ask_and_work(std::uint32_t r, std::optional<Error> error = {}) {
    ask(r);
    work(r, std::move(error));
  }
  /// The version that all serve.
  std::optional<std::uint64_t> all_serve() const {
    std::optional<std::uint64_t> number;
    for (const auto& machine : machines_) {
      const auto serving = machine.serving();
      if (!serving || (number && *number != serving->number)) return std::nullopt;
      number = serving->number;
    }
    return number;
  }

  std::vector<Record> log;
  std::uint64_t new_log = kTestLog;  ///< name of one that begins
  std::vector<Version> newest;       ///< that a rank's pull brings
  std::map<std::uint32_t, int> roots;
  std::map<std::uint32_t, bool> silent;
  Order last_order;

 private:
  std::optional<CoordinatorMachine> coordinator_;
  std::vector<ParticipantMachine> machines_;
  std::vector<PretendTarget> targets_;
};

}  // namespace deltasync::commit
