// One rank's machine step by step: which action follows from which event, and what it says at the end. What several do
// together is in test_model.cpp.
#include "commit/machine.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace deltasync::commit {
namespace {

using Kind = Action::Kind;
using Ending = Report::Ending;

const std::string kYes = R"({"reason": null, "subject": "v7"})";
const std::string kYesWritten = R"({"reason": null, "subject": "v7 is written"})";
const std::string kYesRolledBack = R"({"reason": null, "subject": "v7 is rolled back"})";

Vote yes() {
  return {{}, "v7", "", ""};
}
Vote no(std::string reason) {
  return {std::move(reason), "v7", "", ""};
}

/// Rank 0 of two over registers of this test.
class CommitMachine : public testing::Test {
 protected:
  Kind kind() const { return machine_.action().kind; }
  const Report& report() const { return machine_.report(); }

  void peer(const std::string& round, const std::string& vote) { registers_[round + "/vote/1"] = vote; }

  /// All that the registers answer, until something else is to be done.
  void go(bool late = false) {
    for (;;) {
      const Action action = machine_.action();
      if (action.kind == Kind::read) {
        std::vector<std::string> values;
        for (const std::string& name : action.registers) {
          if (registers_.count(name) != 0) values.push_back(registers_[name]);
        }
        if (values.size() == action.registers.size()) {
          machine_.found(values);
        } else {
          machine_.absent();
        }
      } else if (action.kind == Kind::write) {
        machine_.stands(registers_.emplace(action.registers[0], action.value).first->second);
      } else if (action.kind == Kind::wait && late) {
        machine_.go_on(true);
      } else {
        return;
      }
    }
  }

  std::map<std::string, std::string> registers_;
  Machine machine_{0, 2};
};

TEST_F(CommitMachine, WhoIsAloneDecidesAlone) {
  Machine alone(0, 1);
  alone.vote(yes());
  EXPECT_EQ(alone.action().kind, Kind::done);
  EXPECT_EQ(alone.report().verdict, (Verdict{Outcome::yes, "", ""}));
  alone.vote({"no room", "v7", "void", "1"});
  EXPECT_EQ(alone.report().verdict, (Verdict{Outcome::no, "no room", "void"}));
  alone.vote(no(""));
  EXPECT_EQ(alone.report().verdict.outcome, Outcome::no);
  alone.vote({{}, "v7", "", "5"});
  ASSERT_EQ(alone.action().kind, Kind::word);
  EXPECT_EQ(alone.action().value, "5");
  alone.worded("a, c");
  EXPECT_EQ(alone.report().verdict, (Verdict{Outcome::no, "a, c", ""}));
}

TEST_F(CommitMachine, ReadsAndWritesRegistersOfTheRound) {
  machine_.vote(yes(), "1/staged");
  ASSERT_EQ(kind(), Kind::write);
  EXPECT_EQ(machine_.action().registers, std::vector<std::string>{"1/staged/vote/0"});
  machine_.stands(machine_.action().value);
  ASSERT_EQ(kind(), Kind::read);
  EXPECT_EQ(machine_.action().registers, (std::vector<std::string>{"1/staged/vote/0", "1/staged/vote/1"}));
  machine_.absent();
  EXPECT_EQ(machine_.action().registers, std::vector<std::string>{"1/staged/verdict"});
  machine_.absent();
  EXPECT_EQ(kind(), Kind::wait);
  machine_.go_on(false);
  machine_.found({kYes, kYes});
  ASSERT_EQ(kind(), Kind::write);
  EXPECT_EQ(machine_.action().registers, std::vector<std::string>{"1/staged/verdict"});
  machine_.stands(machine_.action().value);
  ASSERT_EQ(kind(), Kind::done);
  EXPECT_EQ(report().ending, Ending::voted);
  EXPECT_EQ(report().verdict, (Verdict{Outcome::yes, "", ""}));
}

TEST_F(CommitMachine, CountedRoundsBeginAtTheFirstWithoutAVerdict) {
  registers_ = {{"0/verdict", "{}"}, {"1/verdict", "{}"}};
  machine_.vote(yes());
  go();
  EXPECT_EQ(machine_.round(), "2");
  machine_.vote(yes());
  go();
  EXPECT_EQ(machine_.round(), "3");
}

TEST_F(CommitMachine, WhoWaitedInVainNamesTheMissing) {
  Machine machine(1, 3);
  machine.vote({"disk full", "v7", "void", ""}, "r");
  machine.stands(machine.action().value);
  machine.absent();
  machine.absent();
  machine.go_on(true);
  machine.absent();
  machine.absent();                               // rank 0
  machine.found({encode({{}, "v7", "me", ""})});  // rank 1
  machine.absent();                               // rank 2
  const auto proposed = decode_verdict(machine.action().value);
  EXPECT_EQ(proposed->reason, "rank 1: disk full; rank 1 has waited in vain for ranks 0, 2");
  EXPECT_EQ(proposed->doubt, "me");
}

TEST_F(CommitMachine, WhoComesAtTheLastMomentIsHeard) {
  machine_.vote(yes(), "r");
  go();
  ASSERT_EQ(kind(), Kind::wait);
  machine_.go_on(true);
  machine_.absent();
  peer("r", kYes);
  go();
  EXPECT_EQ(report().verdict.outcome, Outcome::yes);
}

TEST_F(CommitMachine, TheStoreFailsAfterAYes) {
  machine_.vote({{}, "v7", "void", ""}, "r");
  machine_.failed("reset");
  EXPECT_EQ(report().verdict,
            (Verdict{Outcome::unknown, "rank 0: the store that the ranks share failed: reset", "void"}));
}

TEST_F(CommitMachine, TheStoreFailsBeforeAYesOrAfterANo) {
  machine_.vote(yes());
  machine_.failed("reset");
  EXPECT_EQ(report().verdict, (Verdict{Outcome::no, "rank 0: the store that the ranks share failed: reset", ""}));
  machine_.vote(no("disk full"), "r");
  machine_.failed("reset");
  EXPECT_EQ(report().verdict,
            (Verdict{Outcome::no, "rank 0: disk full; rank 0: the store that the ranks share failed: reset", ""}));
}

TEST_F(CommitMachine, AValueThatIsNoVoteIsAFailureOfTheStore) {
  peer("r", "7");
  machine_.vote(yes(), "r");
  go();
  EXPECT_EQ(report().verdict.outcome, Outcome::unknown);
  EXPECT_NE(report().verdict.reason.find("this is no vote: 7"), std::string::npos) << report().verdict.reason;
}

TEST_F(CommitMachine, AnEarlierProcessOfThisRankHasVoted) {
  registers_["r/vote/0"] = kYes;
  peer("r", kYes);
  machine_.vote(no("empty"), "r");
  go();
  EXPECT_EQ(report().verdict.outcome, Outcome::unknown);
  EXPECT_NE(report().verdict.reason.find("an earlier process of this rank has voted"), std::string::npos);
}

TEST_F(CommitMachine, AllKeepWhatAllHaveWritten) {
  peer("1/staged", kYes);
  peer("1/written", kYesWritten);
  machine_.update(yes(), "1");
  go();
  ASSERT_EQ(kind(), Kind::commit);
  machine_.committed({});
  go();
  ASSERT_EQ(kind(), Kind::done);
  EXPECT_EQ(report().ending, Ending::kept);
}

TEST_F(CommitMachine, WhatOneCannotStageNobodyWrites) {
  peer("1/staged", R"({"reason": "rank 1: no space", "subject": "", "doubt": "w is void"})");
  machine_.update(yes(), "1");
  go();
  ASSERT_EQ(kind(), Kind::done);
  EXPECT_EQ(report().ending, Ending::unwritten);
  EXPECT_EQ(report().verdict, (Verdict{Outcome::no, "rank 1: no space", "w is void"}));
}

TEST_F(CommitMachine, WhatOneCannotWriteAllRollBack) {
  peer("1/staged", kYes);
  peer("1/written", R"({"reason": "rank 1: device lost"})");
  peer("1/rolled back", kYesRolledBack);
  machine_.update(yes(), "1");
  go();
  machine_.committed({});
  go();
  ASSERT_EQ(kind(), Kind::roll_back);
  machine_.rolled_back("");
  go();
  EXPECT_EQ(report().ending, Ending::as_before);
  EXPECT_EQ(report().text, "all was rolled back, the weights of all ranks are as before: rank 1: device lost");
}

TEST_F(CommitMachine, WhatOneCannotRollBackIsSaidByAll) {
  peer("1/staged", kYes);
  peer("1/written", kYesWritten);
  peer("1/rolled back", R"({"reason": "rank 1: w is void"})");
  machine_.update(yes(), "1");
  go();
  machine_.committed("device lost");
  go();
  machine_.rolled_back("v is void");
  go();
  EXPECT_EQ(report().ending, Ending::doubtful);
  EXPECT_EQ(report().text,
            "NOT ALL RANKS HAVE THE WEIGHTS OF BEFORE: rank 0: v is void; rank 1: w is void; what failed: "
            "rank 0: device lost");
}

TEST_F(CommitMachine, WhoDoesNotHearOfTheRollbackSaysPerhaps) {
  peer("1/staged", kYes);
  peer("1/written", R"({"reason": "rank 1: device lost"})");
  machine_.update(yes(), "1");
  go();
  machine_.committed({});
  go();
  machine_.rolled_back("");
  machine_.failed("reset");
  EXPECT_EQ(report().ending, Ending::doubtful);
  EXPECT_EQ(report().text.rfind("PERHAPS NOT ALL RANKS HAVE", 0), 0U) << report().text;
}

TEST_F(CommitMachine, WhoDoesNotHearOfTheCommitVoidsItsWeights) {
  peer("1/staged", kYes);
  machine_.update(yes(), "1");
  go();
  machine_.committed({});
  machine_.failed("reset");
  ASSERT_EQ(kind(), Kind::void_weights);
  EXPECT_EQ(machine_.action().value, "whether the other ranks keep v7 is unknown");
  machine_.voided("w is void");
  EXPECT_EQ(report().ending, Ending::doubtful);
  EXPECT_EQ(report().text, "THE OUTCOME IS UNKNOWN: rank 0: the store that the ranks share failed: reset; w is void");
}

TEST_F(CommitMachine, AnInterruptLeavesNothingThatCounts) {
  peer("1/staged", kYes);
  for (const char* when : {"commits", "votes", "rolls back"}) {
    machine_.update(yes(), "1");
    go();
    ASSERT_EQ(kind(), Kind::commit);
    if (when[0] != 'c') machine_.committed({});
    if (when[0] == 'r') go(true);
    machine_.interrupted();
    ASSERT_EQ(kind(), Kind::void_weights) << when;
    machine_.voided("");
    EXPECT_EQ(kind(), Kind::done);
  }
  machine_.update(yes(), "2");
  machine_.interrupted();
  EXPECT_EQ(kind(), Kind::done);
  EXPECT_EQ(report().ending, Ending::unwritten);
}

TEST_F(CommitMachine, AnswersToAnotherQuestionEndTheProcess) {
  machine_.vote(yes(), "r");
  EXPECT_DEATH(machine_.absent(), "told `absent`, which answers no `write`");
  EXPECT_DEATH(machine_.committed({}), "committed");
}

}  // namespace
}  // namespace deltasync::commit
