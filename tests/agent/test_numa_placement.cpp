// An agent on a machine of two memory nodes that is made up: who runs where, and that what is served does not change.
#include <gmock/gmock-more-matchers.h>

#include "tests/agent/agent_harness.hpp"
#include "tests/support/fake_numa.hpp"

namespace deltasync::agent {
namespace {

using test::FakeNuma;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::uint64_t kBatches = 10;

class Placed : public AgentTest {
 protected:
  Placed() {
    std::vector<TensorSpec> specs;
    for (std::uint64_t i = 0; i < kBatches; ++i) {
      specs.push_back({"t" + std::to_string(i), Dtype::bf16, {1024, 2048}, {}, {}});
    }
    model_ = test::make_model(3, std::move(specs));
    options_.core.threads = 3;
    options_.core.overlap_threads = 2;
  }
  ~Placed() override { agent_.reset(); }  // before the machine that it is on

  void place() { options_.core.numa_placement = NumaPlacement::make({}, numa_).value(); }
  /// Offloads three versions, each followed by a look at what is served.
  void serve_some() {
    for (int i = 0; i < 3; ++i) {
      next_version();
      std::vector<std::uint64_t> digests(model_.layout->tile_count());
      ThreadPool pool(1, "test");
      delta::half_digests(*model_.layout, model_.half, digests, pool);
      EXPECT_EQ(*served()->digests, digests);
    }
    EXPECT_EQ(agent_->core().snapshot()->ring.size(), 2U);
  }
  const std::vector<std::uint32_t>& nodes() const { return served()->generation->batch_nodes; }

  FakeNuma numa_{2, 4};
};

TEST_F(Placed, ThreadsThatDiffRunOnTheirNodesAndNoOthers) {
  place();
  start_agent();
  serve_some();
  EXPECT_THAT(numa_.of_thread("publisher"), ElementsAre("run on 0-3"));
  EXPECT_THAT(numa_.of_thread("encode-1"), ElementsAre("run on 4-7"));
  EXPECT_THAT(numa_.of_thread("encode-2"), ElementsAre("run on 0-3"));
  EXPECT_THAT(numa_.of_thread("overlap"), ElementsAre("run on 0-3"));
  EXPECT_THAT(numa_.of_thread("overlap-1"), ElementsAre("run on 4-7"));
  EXPECT_THAT(numa_.of_thread("reserve-0"), ElementsAre("run on 0-3", "prefer 0"));
  EXPECT_THAT(numa_.of_thread("reserve-1"), ElementsAre("run on 4-7", "prefer 1"));
  EXPECT_EQ(numa_.calls().size(), 9U);
}

TEST_F(Placed, WhatIsDiffedWhereFollowsThePages) {
  // As an agent before this one may have placed them: not as the rule has it.
  numa_.node_of = [](const std::byte* at) {
    return std::optional<unsigned>(reinterpret_cast<std::uintptr_t>(at) >> 22 & 1);
  };
  place();
  start_agent();
  serve_some();
  ASSERT_EQ(nodes().size(), kBatches);
  for (std::size_t b = 1; b < kBatches; ++b) EXPECT_NE(nodes()[b], nodes()[b - 1]);
}

TEST_F(Placed, WhereTheSystemDoesNotTellItIsAsTheRuleHasIt) {
  place();
  start_agent();
  serve_some();
  ASSERT_EQ(nodes().size(), kBatches);
  for (std::size_t b = 0; b < kBatches; ++b) {
    EXPECT_EQ(nodes()[b], b * (4U << 20) / NumaPlacement::kStripeBytes % 2) << "batch " << b;
  }
}

TEST_F(Placed, AnAdoptedSegmentIsServedWithAPlacementToo) {
  start_agent();
  serve_some();
  EXPECT_THAT(nodes(), IsEmpty());
  const auto root = served()->root;
  writer_.reset();
  stop_agent();
  place();
  start_agent();
  ASSERT_TRUE(eventually([&] { return served() != nullptr; }));
  EXPECT_EQ(served()->root, root);
  EXPECT_EQ(nodes().size(), kBatches);
}

TEST_F(Placed, RefusalsChangeNothingThatIsServed) {
  numa_.refuse_cpus = EPERM;
  numa_.refuse_memory = EPERM;
  place();
  start_agent();
  serve_some();
}

}  // namespace
}  // namespace deltasync::agent
