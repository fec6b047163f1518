// Which version a receiver of parts takes: every course of small worlds, in which members seal, skip, restart, forget
// and answer late, up to a depth.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "receiver/parts/agreement.hpp"

namespace deltasync::receiver {
namespace {

constexpr std::size_t kMembers = 2;
constexpr std::uint64_t kNumberMax = 4;
using Step = Agreement::Step;

/// What an agent serves: its newest version, and the one before as long as its ring has it.
struct Node {
  VersionId newest{1, 1};
  std::optional<VersionId> before;
};

struct World {
  std::array<Node, kMembers> nodes;
  Agreement agreement;
  std::array<std::optional<VersionId>, kMembers> staged;       ///< what each has really staged
  std::array<std::optional<VersionId>, kMembers> late_answer;  ///< a `staged` that is still on its way
};

class Explorer {
 public:
  explicit Explorer(AgreementWant want) : want_(want) {}

  void run(const World& world, unsigned depth) {
    ++seen_;
    check(world);
    if (depth == 0 || world.agreement.step() == Step::agreed || world.agreement.step() == Step::up_to_date) {
      expect_an_end(world);
      return;
    }
    for (std::size_t m = 0; m < kMembers; ++m) {
      for (const std::uint64_t ahead : {1u, 2u}) {  // seals the next version, or skips one
        if (world.nodes[m].newest.number + ahead > kNumberMax) continue;
        World next = world;
        Node& node = next.nodes[m];
        node.before = ahead == 1 ? std::optional(node.newest) : std::nullopt;
        node.newest.number += ahead;
        run(next, depth - 1);
      }
      if (world.nodes[m].newest.epoch == 1) {  // a trainer that was started again
        World next = world;
        next.nodes[m] = {{2, 1}, std::nullopt};
        run(next, depth - 1);
      }
      if (world.nodes[m].before) {  // a ring that was lost
        World next = world;
        next.nodes[m].before.reset();
        run(next, depth - 1);
      }
      if (world.late_answer[m]) {
        World next = world;
        next.agreement.staged(m, *next.late_answer[m]);
        next.late_answer[m].reset();
        run(next, depth - 1);
      }
      World next = world;
      if (move(next, m)) run(next, depth - 1);
      if (world.agreement.step() == Step::pull && has(world.nodes[m], world.agreement.version())) {
        World late = world;  // it has staged it, and says so when something else may be wanted
        late.staged[m] = late.late_answer[m] = world.agreement.version();
        run(late, depth - 1);
      }
    }
  }

  std::uint64_t seen() const { return seen_; }
  std::uint64_t agreed() const { return agreed_; }

 private:
  static bool has(const Node& node, const VersionId& version) {
    return node.newest == version || node.before == version;
  }

  /// What the receiver does next with a member; false: nothing.
  static bool move(World& world, std::size_t m) {
    Agreement& agreement = world.agreement;
    if (agreement.step() == Step::ask) {
      if (agreement.has_answered(m)) return false;
      agreement.heard(m, world.nodes[m].newest);
      return true;
    }
    if (agreement.step() != Step::pull) return false;
    const VersionId wanted = agreement.version();
    if (has(world.nodes[m], wanted)) {
      world.staged[m] = wanted;
      agreement.staged(m, wanted);
    } else {
      world.staged[m].reset();
      agreement.refused(m, world.nodes[m].newest > wanted);
    }
    return true;
  }

  void check(const World& world) {
    const Agreement& agreement = world.agreement;
    if (agreement.step() == Step::agreed) {
      ++agreed_;
      for (std::size_t m = 0; m < kMembers; ++m) {
        ASSERT_EQ(world.staged[m], agreement.version()) << "a version that member " << m << " has not staged";
      }
      if (want_.held) {
        ASSERT_NE(agreement.version(), *want_.held);
        ASSERT_TRUE(agreement.version() > *want_.held || want_.older_epoch);
        ASSERT_TRUE(agreement.version().epoch != want_.held->epoch || agreement.version().number > want_.held->number);
      }
    }
    if (agreement.step() == Step::up_to_date) {
      ASSERT_EQ(agreement.version(), want_.held);
      ASSERT_FALSE(want_.newer);
    }
  }

  /// From wherever a world stands: the trainer goes on, all nodes seal its next version, and this is an end within a
  /// few rounds. A version that one of them never sealed is not in its way.
  void expect_an_end(World world) {
    std::uint64_t epoch = 0;
    for (const Node& node : world.nodes) epoch = std::max(epoch, node.newest.epoch);
    for (Node& node : world.nodes) node = {{epoch, kNumberMax + 1}, std::nullopt};
    for (int round = 0; round < 12; ++round) {
      if (world.agreement.step() == Step::agreed || world.agreement.step() == Step::up_to_date) return;
      for (std::size_t m = 0; m < kMembers; ++m) move(world, m);
    }
    ADD_FAILURE() << "no end, though all members have one version";
  }

  const AgreementWant want_;
  std::uint64_t seen_ = 0;
  std::uint64_t agreed_ = 0;
};

void explore(const AgreementWant& want, const std::array<Node, kMembers>& nodes) {
  Explorer explorer(want);
  explorer.run({nodes, Agreement(kMembers, want), {}, {}}, 7);
  EXPECT_GT(explorer.seen(), 1'000u);
  EXPECT_GT(explorer.agreed(), 10u);
}

TEST(Agreement, FirstVersion) {
  explore({}, {Node{{1, 1}, {}}, Node{{1, 1}, {}}});
  explore({}, {Node{{1, 2}, VersionId{1, 1}}, Node{{1, 1}, {}}});
  explore({}, {Node{{1, 3}, {}}, Node{{1, 1}, {}}});
}

TEST(Agreement, NewerThanWhatIsHeld) {
  for (const bool newer : {false, true}) {
    AgreementWant want;
    want.held = VersionId{1, 1};
    want.newer = newer;
    explore(want, {Node{{1, 1}, {}}, Node{{1, 1}, {}}});
    explore(want, {Node{{1, 2}, VersionId{1, 1}}, Node{{1, 1}, {}}});
    explore(want, {Node{{1, 3}, VersionId{1, 2}}, Node{{1, 2}, VersionId{1, 1}}});
  }
}

/// Of an epoch that is over only where the caller says so.
TEST(Agreement, OlderEpoch) {
  AgreementWant want;
  want.held = VersionId{3, 1};
  want.older_epoch = true;
  explore(want, {Node{{1, 2}, VersionId{1, 1}}, Node{{1, 1}, {}}});
  want.older_epoch = false;
  Agreement agreement(1, want);
  agreement.heard(0, {1, 2});
  EXPECT_EQ(agreement.step(), Step::ask);
  agreement.heard(0, {4, 1});
  EXPECT_EQ(agreement.step(), Step::pull);
}

TEST(Agreement, TakesTheNewestThatAllHave) {
  Agreement agreement(2, {});
  agreement.heard(0, {1, 5});
  EXPECT_EQ(agreement.step(), Step::ask);
  agreement.heard(1, {1, 4});
  ASSERT_EQ(agreement.step(), Step::pull);
  EXPECT_EQ(agreement.version(), (VersionId{1, 4}));
  agreement.refused(0, true);  // its ring is empty
  EXPECT_TRUE(!agreement.has_answered(0) && agreement.has_answered(1));
  agreement.heard(0, {1, 5});
  ASSERT_EQ(agreement.step(), Step::pull);
  EXPECT_EQ(agreement.version(), (VersionId{1, 5})) << "the other one will have it soon";
}

}  // namespace
}  // namespace deltasync::receiver
