// The protocol, explored: every interleaving of the configurations below, as it is and with one guard removed.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "shm/explorer.hpp"

namespace deltasync::shm::model {
namespace {

WriterScript writer(unsigned slot, unsigned writers, std::uint64_t epoch, unsigned versions, bool granted = true) {
  return {slot, writers, epoch, versions, granted};
}

/// The ordinary life of one trainer, with one death of anyone anywhere, an abort and a missed deadline.
Config one_writer() {
  Config c;
  c.name = "one writer, a death, agent restart";
  c.writers = {writer(0, 1, 1, 3)};
  c.kills = 1, c.agent_restarts = 1, c.aborts = 1, c.timeouts = 1;
  return c;
}

/// Any one process stands still at any point, perhaps for good.
Config one_writer_stopped() {
  Config c;
  c.name = "one writer, a stop, a death";
  c.writers = {writer(0, 1, 1, 3)};
  c.stops = 1, c.kills = 1, c.agent_restarts = 1, c.reader_rounds = 1;
  return c;
}

/// The trainer dies (or ends) anywhere and is started again; meanwhile the new one asks for the old one's slot.
Config trainer_restart() {
  Config c;
  c.name = "trainer restarted in a new epoch";
  c.writers = {writer(0, 1, 1, 2), writer(0, 1, 2, 2, false)};
  c.kills = 1, c.stops = 1, c.reader = false;
  return c;
}

/// The same with the agent dying as well.
Config both_restart() {
  Config c;
  c.name = "trainer and agent restarted";
  c.writers = {writer(0, 1, 1, 2), writer(0, 1, 2, 1, false)};
  c.kills = 2, c.agent_restarts = 1, c.reader_rounds = 1;
  return c;
}

/// A trainer that comes back with an older epoch must be refused.
Config older_epoch() {
  Config c;
  c.name = "a second trainer of an older epoch";
  c.writers = {writer(0, 1, 2, 1), writer(0, 1, 1, 2, false)};
  c.kills = 1, c.reader = false;
  return c;
}

Config two_writers() {
  Config c;
  c.name = "two writers, a death, an abort";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.kills = 1, c.aborts = 1, c.reader = false;
  return c;
}

Config two_writers_late() {
  Config c;
  c.name = "two writers, a missed deadline";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.timeouts = 1, c.reader = false;
  return c;
}

Config two_writers_stopped() {
  Config c;
  c.name = "two writers, a stop";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2)};
  c.stops = 1, c.reader = false;
  return c;
}

/// One of two writers dies and is replaced while the other goes on.
Config replaced_writer() {
  Config c;
  c.name = "one of two writers replaced";
  c.writers = {writer(0, 2, 1, 2), writer(1, 2, 1, 2), writer(1, 2, 1, 2, false)};
  c.kills = 1, c.reader = false;
  return c;
}

/// The agent reads behind the writer, which may abort and come back to the same half.
Config behind_the_writer() {
  Config c;
  c.name = "the agent reads behind the writer";
  c.writers = {writer(0, 1, 1, 3)};
  c.reads_behind = true;
  c.aborts = 2, c.kills = 1, c.agent_restarts = 1, c.reader = false;
  return c;
}

void report(const Config& config, const Outcome& out, double seconds) {
  std::printf("  %-52s %9llu states %10llu steps %7llu quiet %6llu complete  %5.1f s  %s\n", config.name,
              static_cast<unsigned long long>(out.states), static_cast<unsigned long long>(out.steps),
              static_cast<unsigned long long>(out.quiet), static_cast<unsigned long long>(out.completed), seconds,
              name(out.violation));
}

Outcome run(const Config& config, const Rules& rules = {}) {
  const auto start = std::chrono::steady_clock::now();
  auto out = explore(config, rules);
  report(config, out, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return out;
}

void expect_clean(const Config& config) {
  const auto out = run(config);
  EXPECT_FALSE(out.truncated) << "the bound cut the search: it proves nothing";
  EXPECT_EQ(out.violation, Violation::none) << name(out.violation);
  EXPECT_GT(out.completed, 0u) << "the search never came to an end of the work";
  EXPECT_GT(out.sealed_versions, 0u);
  for (const auto& line : out.trace) std::printf("      %s\n", line.c_str());
}

TEST(Model, OneWriter) {
  expect_clean(one_writer());
}
TEST(Model, OneWriterStopped) {
  expect_clean(one_writer_stopped());
}
TEST(Model, TrainerRestart) {
  expect_clean(trainer_restart());
}
TEST(Model, BothRestart) {
  expect_clean(both_restart());
}
TEST(Model, OlderEpoch) {
  expect_clean(older_epoch());
}
TEST(Model, TwoWriters) {
  expect_clean(two_writers());
}
TEST(Model, TwoWritersLate) {
  expect_clean(two_writers_late());
}
TEST(Model, TwoWritersStopped) {
  expect_clean(two_writers_stopped());
}
TEST(Model, ReplacedWriter) {
  expect_clean(replaced_writer());
}
TEST(Model, BehindTheWriter) {
  expect_clean(behind_the_writer());
}

// ---- each guard removed once -----------------------------------------------------------------------------------

struct Mutant {
  const char* name;
  Guard guard;
  Config (*config)();
  Violation expected;
};

class BrokenGuard : public ::testing::TestWithParam<Mutant> {};

TEST_P(BrokenGuard, IsFound) {
  const auto& mutant = GetParam();
  const auto out = run(mutant.config(), {mutant.guard, false, mutant.expected == Violation::stuck});
  EXPECT_EQ(out.violation, mutant.expected)
      << "found: " << name(out.violation) << ", expected " << name(mutant.expected);
}

const Mutant kMutants[] = {
    {"EnterRecheck", Guard::enter_recheck, two_writers, Violation::wrong_write},
    {"SettleCopying", Guard::settle_copying, two_writers, Violation::wrong_write},
    {"SettleProof", Guard::settle_proof, two_writers, Violation::wrong_write},
    {"SettleHeld", Guard::settle_held, behind_the_writer, Violation::wrong_write},
    {"AbortQuarantines", Guard::abort_quarantines, two_writers, Violation::wrong_write},
    {"AbortNamesFill", Guard::abort_names_fill, two_writers, Violation::wrong_abort},
    {"SealAll", Guard::seal_all, two_writers, Violation::torn},
    {"SnapshotRecheck", Guard::snapshot_recheck, two_writers, Violation::torn_info},
    {"JoinRecheck", Guard::join_recheck, two_writers, Violation::stale_join},
    {"InfoBeforeClaim", Guard::info_before_claim, two_writers, Violation::torn_info},
    {"VersionGrows", Guard::version_grows, older_epoch, Violation::went_back},
    {"ClaimFreeOnly", Guard::claim_free_only, one_writer, Violation::torn_info},
    {"ActivateSealed", Guard::activate_sealed, one_writer, Violation::torn},
    {"RetireBeforeActive", Guard::retire_before_active, one_writer, Violation::two_active},
    {"SealedRecheck", Guard::sealed_recheck, one_writer, Violation::went_back},
    {"SealedInOrder", Guard::sealed_in_order, one_writer, Violation::went_back},
    {"ReapDead", Guard::reap_dead, two_writers, Violation::stuck},
    {"GrantEndsFill", Guard::grant_ends_fill, replaced_writer, Violation::wrong_write},
    {"GrantDeadOnly", Guard::grant_dead_only, trainer_restart, Violation::wrong_write},
    {"AdoptFrees", Guard::adopt_frees, one_writer, Violation::stuck},
    {"RetireWaits", Guard::retire_waits, one_writer, Violation::wrong_write},
};
INSTANTIATE_TEST_SUITE_P(Model, BrokenGuard, ::testing::ValuesIn(kMutants),
                         [](const auto& mutant) { return std::string(mutant.param.name); });

}  // namespace
}  // namespace deltasync::shm::model
