// A delta that a relay hands over with a version: taken as it is if it leads from what is served to what was sealed; in
// any other case the halves are compared, and what is served is the same.
#include <algorithm>
#include <functional>

#include "agent/versions/ring.hpp"
#include "delta/kept_delta.hpp"
#include "shm/side_files.hpp"
#include "tests/agent/agent_harness.hpp"

namespace deltasync::agent {
namespace {

class HandedDelta : public AgentTest {
 protected:
  void SetUp() override {
    start_agent();
    next_version();
  }

  std::uint64_t taken() const { return agent_->core().metrics().handed_deltas; }
  std::uint64_t compared() const { return agent_->core().metrics().elements_compared; }
  std::filesystem::path file() const {
    return shm::side_file_path(served()->generation->segment->path(), shm::kHandedSideFile);
  }

  /// Of the version that comes, as a relay knows it. `spoil` may change it.
  void hand_over(const std::function<void(delta::KeptDelta&)>& spoil = {}) {
    const std::vector<std::byte> before = model_.half;
    test::mutate(model_.half, *model_.layout, 0.02, number_ + 1);
    digests_ = *served()->digests;
    const std::vector<std::uint64_t> digests_before = digests_;
    ThreadPool pool(1, "test");
    delta::KeptDelta kept;
    kept.from = served()->version;
    kept.to = {{epoch_, number_ + 1}, "step_" + std::to_string(number_ + 1)};
    kept.delta =
        delta::encode(*model_.layout, before, model_.half, digests_, {kept.from.id, kept.to.id, served()->root}, pool);
    kept.before = changed_digests(digests_before, digests_);
    if (spoil) spoil(kept);
    const auto head = delta::kept_delta_head(kept.delta, kept.from, kept.to, kept.before);
    std::vector<ByteSpan> pieces{head};
    for (const delta::Frame& frame : kept.delta.frames) pieces.emplace_back(frame.bytes);
    const Status written = shm::write_side_file(file(), pieces);
    ASSERT_TRUE(written) << written.error().to_string();
  }
  void seal() {
    const auto report = offload(*writer_, model_.half, ++number_);
    ASSERT_TRUE(report) << report.error().to_string();
    EXPECT_EQ(*served()->digests, digests_);
    EXPECT_EQ(served()->root, delta::root_digest(digests_));
    EXPECT_FALSE(std::filesystem::exists(file()));
  }

  std::vector<std::uint64_t> digests_;  // of the version that comes
};

TEST_F(HandedDelta, IsServedAsItIs) {
  hand_over();
  seal();
  EXPECT_EQ(taken(), 1u);
  EXPECT_EQ(compared(), 0u);
  const auto& ring = agent_->core().versions().snapshot()->ring;
  ASSERT_EQ(ring.size(), 1u);
  EXPECT_EQ(ring.back()->to.id.number, number_);
  next_version();  // and one without
  EXPECT_EQ(taken(), 1u);
  EXPECT_EQ(compared(), model_.layout->elements());
}

TEST_F(HandedDelta, ThatLeadsElsewhereIsNotTaken) {
  const std::function<void(delta::KeptDelta&)> spoils[] = {
      [](delta::KeptDelta& kept) { kept.delta.from_root.bytes[0] ^= 1; },
      [](delta::KeptDelta& kept) { kept.delta.to_root.bytes[0] ^= 1; },
      [](delta::KeptDelta& kept) { kept.delta.from.number += 7; },
      [](delta::KeptDelta& kept) { kept.delta.to.number += 7; },
      [](delta::KeptDelta& kept) { kept.to.label = "another"; },
      [](delta::KeptDelta& kept) {
        kept.delta.changed -= kept.delta.frames.back().changed;
        kept.delta.frame_bytes -= kept.delta.frames.back().bytes.size();
        kept.delta.frames.pop_back();
      },
      [](delta::KeptDelta& kept) { kept.delta.frames.back().bytes.back() ^= std::byte{1}; },
  };
  for (const auto& spoil : spoils) {
    hand_over(spoil);
    seal();
    EXPECT_EQ(taken(), 0u);
  }
  EXPECT_EQ(compared(), std::size(spoils) * model_.layout->elements());
}

/// The agent that is there when the version is sealed may be another one.
TEST_F(HandedDelta, IsThereForTheNextAgent) {
  hand_over();
  stop_agent();
  const auto report =
      offload(*writer_, model_.half, ++number_, test_deadline(), false);  // the writer needs no agent for that
  ASSERT_TRUE(report) << report.error().to_string();
  start_agent();
  ASSERT_TRUE(eventually([&] { return served() && served()->version.id.number == number_; }));
  EXPECT_EQ(served()->root, delta::root_digest(digests_));
  const auto& ring = agent_->core().versions().snapshot()->ring;
  ASSERT_FALSE(ring.empty());
  EXPECT_EQ(ring.back()->to.id.number, number_);
}

}  // namespace
}  // namespace deltasync::agent
