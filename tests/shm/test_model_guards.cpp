// The protocol with one guard removed: the explorer must find the damage that the guard prevents, in the configuration
// named here. Where several kinds of damage follow, the first that the search meets is the one expected.
#include <gtest/gtest.h>

#include <string>

#include "shm/model_configs.hpp"

namespace deltasync::shm::model {
namespace {

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
    {"EnterRecheck", Guard::enter_recheck, two_writers_abort, Violation::wrong_write},
    {"SettleCopying", Guard::settle_copying, two_writers_abort, Violation::wrong_write},
    {"SettleProof", Guard::settle_proof, two_writers_abort, Violation::wrong_write},
    {"SettleHeld", Guard::settle_held, reads_while_written, Violation::wrong_write},
    {"ProgressRestarts", Guard::progress_restarts, reads_while_written, Violation::torn},
    {"ProgressNamesFill", Guard::progress_names_fill, reads_while_written, Violation::torn},
    {"AbortQuarantines", Guard::abort_quarantines, two_writers_abort, Violation::wrong_write},
    {"AbortNamesFill", Guard::abort_names_fill, two_writers_abort, Violation::wrong_abort},
    {"SealAll", Guard::seal_all, two_writers_abort, Violation::torn},
    {"SnapshotRecheck", Guard::snapshot_recheck, two_writers_abort, Violation::torn_info},
    {"JoinRecheck", Guard::join_recheck, two_writers_abort, Violation::stale_join},
    {"InfoBeforeClaim", Guard::info_before_claim, two_writers_abort, Violation::torn_info},
    {"VersionGrows", Guard::version_grows, repeated_numbers, Violation::went_back},
    {"ClaimFreeOnly", Guard::claim_free_only, one_writer, Violation::torn_info},
    {"ActivateSealed", Guard::activate_sealed, one_writer, Violation::torn},
    {"RetireBeforeActive", Guard::retire_before_active, one_writer, Violation::two_active},
    {"SealedRecheck", Guard::sealed_recheck, one_writer, Violation::went_back},
    {"SealedInOrder", Guard::sealed_in_order, one_writer, Violation::went_back},
    {"ReapDead", Guard::reap_dead, two_writers, Violation::stuck},
    {"GrantEndsFill", Guard::grant_ends_fill, replaced_writer, Violation::wrong_write},
    {"StartEndsFill", Guard::start_ends_fill, one_writer_exec, Violation::stuck},
    {"GrantDeadOnly", Guard::grant_dead_only, trainer_restart, Violation::wrong_abort},
    {"AdoptFrees", Guard::adopt_frees, one_writer, Violation::stuck},
    {"RetireWaits", Guard::retire_waits, one_writer, Violation::wrong_write},
    {"ReadRecheck", Guard::read_recheck, local_reader, Violation::torn},
    {"ReadBeforeRecheck", Guard::read_before_recheck, delayed<local_reader>, Violation::torn},
    {"BytesBeforeCount", Guard::bytes_before_count, delayed<reads_while_written>, Violation::wrong_write},
    {"BytesBeforeWords", Guard::bytes_before_words, delayed<one_writer>, Violation::torn},
    {"WordsInTotalOrder", Guard::words_in_total_order, two_writers_abort, Violation::wrong_write},
};
INSTANTIATE_TEST_SUITE_P(Model, BrokenGuard, ::testing::ValuesIn(kMutants),
                         [](const auto& mutant) { return std::string(mutant.param.name); });

}  // namespace
}  // namespace deltasync::shm::model
