// Full updates over slow links: what is asked for packed, when, and what may go wrong with it.
#include <limits>

#include "tests/receiver/pull_fixture.hpp"

namespace deltasync::test {
namespace {

class PackedPull : public PullTest {
 protected:
  /// Tensors of a batch each, so that there are more requests than streams.
  void SetUp() override {
    std::vector<TensorSpec> specs = sample_specs();
    for (int i = 0; i < 6; ++i) specs.push_back({"big." + std::to_string(i), Dtype::bf16, {2048, 1024}, {}, {}});
    model_ = make_model(7, specs);
  }
  static FakeAgent::Setup packing() {
    FakeAgent::Setup setup;
    setup.pack_threads = 2;
    return setup;
  }
  /// Small enough for the model of these tests.
  static receiver::Tuning small() {
    receiver::Tuning t = quick();
    t.packed_item_bytes = 512u << 10;
    t.probe_bytes = 1u << 20;
    t.link_sample_bytes = 512u << 10;
    return t;
  }
  std::uint64_t raw_requests() const { return agent_->requests(wire::Type::get_raw_tiles); }
  std::uint64_t extent_requests() const { return agent_->requests(wire::Type::get_extent); }
};

TEST_F(PackedPull, OnALinkThatIsSaidToBeSlow) {
  options_.link_gbps = 0.1;
  start(packing(), small());
  const PullReport report = pull_and_commit();
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_TRUE(report.packed);
  EXPECT_EQ(report.repaired_tiles, 0u);
  EXPECT_EQ(report.tiles, model_.layout->tile_count());
  EXPECT_EQ(extent_requests(), 0u);
  EXPECT_GT(raw_requests(), 4u) << "all streams have something to do";
  EXPECT_LT(report.wire_bytes, report.full_bytes * 9 / 10);
  // A delta is what it was.
  step();
  EXPECT_FALSE(pull_and_commit().packed);
}

TEST_F(PackedPull, NotOnAFastLinkThatIsSaidToBeFast) {
  options_.link_gbps = 100;
  start(packing(), small());
  EXPECT_FALSE(pull_and_commit().packed);
  EXPECT_EQ(raw_requests(), 0u);
}

TEST_F(PackedPull, NotFromAnAgentThatPacksNone) {
  options_.link_gbps = 0.1;
  start(FakeAgent::Setup(), small());
  const PullReport report = pull_and_commit();
  EXPECT_FALSE(report.packed);
  EXPECT_EQ(raw_requests(), 0u);
  EXPECT_GE(report.wire_bytes, report.full_bytes);
}

TEST_F(PackedPull, OnALinkThatIsMeasuredToBeSlow) {
  FakeAgent::Setup setup = packing();
  setup.bytes_per_s = 12e6;
  start(setup, small());
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_GT(agent_->extent_bytes(), 0u) << "the first tiles came as they are, and were timed";
  EXPECT_LT(agent_->extent_bytes(), report.full_bytes / 2);
  EXPECT_LT(report.wire_bytes, report.full_bytes * 95 / 100);
}

TEST_F(PackedPull, NotFromOurOwnHostHoweverSlowItLooks) {
  FakeAgent::Setup setup = packing();
  setup.bytes_per_s = 40e6;
  setup.same_host = true;
  start(setup, small());
  EXPECT_FALSE(pull_and_commit().packed);
  EXPECT_EQ(raw_requests(), 0u);
  // Nothing was learned from it either.
  step(1.0);
  EXPECT_FALSE(pull_and_commit().packed);
}

TEST_F(PackedPull, SlicesToo) {
  options_.link_gbps = 0.1;
  start(packing(), small());
  Subscription slices;
  slices.slices.push_back({"big.1", {}});
  slices.slices.push_back({"big.4", {}});
  ASSERT_TRUE(receiver_->bind(make_host_target(receiver_->layout()), slices, in_ms(60'000)).ok());
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  ASSERT_TRUE((*staged)->commit().ok());
  EXPECT_TRUE((*staged)->report().packed);
  EXPECT_EQ(extent_requests(), 0u);
  const auto memory = host_target_memory(*receiver_->target());
  for (const Tensor& tensor : model_.layout->tensors()) {
    if (tensor.spec.name != "big.1" && tensor.spec.name != "big.4") continue;
    EXPECT_EQ(std::memcmp(memory.data() + tensor.offset, model_.half.data() + tensor.offset, tensor.bytes), 0);
  }
}

TEST_F(PackedPull, BrokenStreamsGoOnWithWhatIsMissing) {
  options_.link_gbps = 0.1;
  start(packing(), small());
  agent_->on_request(fault_on(wire::Type::get_raw_tiles, Fault::drop_midway, 2, 2));
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_GE(report.stream_restarts, 1u);
}

TEST_F(PackedPull, AWrongTileIsRepairedByARawOne) {
  options_.link_gbps = 0.1;
  start(packing(), small());
  agent_->on_request(fault_on(wire::Type::get_raw_tiles, Fault::flip_at_source, 1));
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_GE(report.repaired_tiles, 1u);
}

TEST_F(PackedPull, ARevokedLeaseLeavesWhatIsThere) {
  options_.link_gbps = 0.1;
  start(packing(), small());
  agent_->on_request(fault_on(wire::Type::get_raw_tiles, Fault::refuse, 3));
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_EQ(report.replans, 1u);
}

TEST_F(PackedPull, PackedTilesThatNobodyAskedForAreRefused) {
  start(FakeAgent::Setup(), small());
  // One bad extent, which begins with a large tile, so that this one is asked for raw.
  agent_->on_request([layout = model_.layout, done = false](const Request& r) mutable {
    if (r.type == wire::Type::get_extent && !done) {
      done = layout->tensors()[layout->tensor_of_tile(r.tiles.first)].spec.name.starts_with("big.");
      if (done) return Fault::flip_at_source;
    }
    if (r.type == wire::Type::get_raw_tiles && r.ordinal == 0) return Fault::unasked_planes;
    return Fault::none;
  });
  const PullReport report = pull_and_commit();
  EXPECT_FALSE(report.packed);
  EXPECT_GE(report.stream_restarts, 1u);
  EXPECT_GE(report.repaired_tiles, 1u);
}

TEST_F(PackedPull, ASpeedThatIsNoneIsRefused) {
  for (const double gbps : {-1.0, 1e7, std::numeric_limits<double>::quiet_NaN()}) {
    ReceiverOptions options;
    options.endpoint = "127.0.0.1:1";
    options.link_gbps = gbps;
    const auto made = Receiver::connect(options, in_ms(1000));
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.error().code(), Errc::invalid_argument);
  }
}

}  // namespace
}  // namespace deltasync::test
