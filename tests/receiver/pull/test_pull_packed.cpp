// Full updates over slow links: what is asked for packed, when, and what may go wrong with it.
#include <algorithm>
#include <limits>

#include "deltasync/layout.hpp"
#include "receiver/pull/ranges.hpp"
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

/// At eight gigabits the transfer hides the work of many threads, and not that of one.
TEST_F(PackedPull, NotWhereTooFewThreadsPack) {
  options_.link_gbps = 8;
  FakeAgent::Setup setup = packing();
  setup.pack_threads = 64;
  start(setup, small());
  EXPECT_TRUE(pull_and_commit().packed);
  receiver_.reset();
  setup.pack_threads = 1;
  start(setup, small());
  EXPECT_FALSE(pull_and_commit().packed);
}

TEST_F(PackedPull, NotWhereTooFewStreamsUnpack) {
  options_.link_gbps = 10.4;
  options_.streams = 1;
  FakeAgent::Setup setup = packing();
  setup.pack_threads = 64;
  start(setup, small());
  EXPECT_FALSE(pull_and_commit().packed);
}

TEST_F(PackedPull, OnlyWhatShrinks) {
  options_.link_gbps = 0.1;
  for (const auto& [dtype, shrinks] :
       {std::pair(Dtype::bf16, true), std::pair(Dtype::f16, true), std::pair(Dtype::f32, true),
        std::pair(Dtype::f64, false), std::pair(Dtype::i32, false), std::pair(Dtype::f8_e4m3, false)}) {
    model_ = make_model(3, {{"w", dtype, {2048, 1024}, {}, {}}});
    start(packing(), small());
    EXPECT_EQ(pull_and_commit().packed, shrinks) << to_string(dtype);
    receiver_.reset();
  }
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

TEST_F(PackedPull, ALinkThatOnlyStartsSlowlyIsMeasuredFurther) {
  FakeAgent::Setup setup = packing();
  setup.bytes_per_s = 2e6;
  setup.slow_bytes = 1u << 20;
  start(setup, small());
  pull_and_commit();
  // What came first says nothing of the link; twice as much is better, and four times shows what it is.
  EXPECT_GE(agent_->extent_bytes(), 7u << 20);
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
  std::vector<Slice> slices;
  slices.push_back({"big.1", {}});
  slices.push_back({"big.4", {}});
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

/// Tiles that are packed in portions, each of which has to show that it came sooner than it would have come plain.
class Portions : public PackedPull {
 protected:
  static receiver::Tuning portions_of(std::uint64_t bytes) {
    receiver::Tuning t = small();
    t.packed_portion_bytes = bytes;
    return t;
  }
  /// By a link that is said to be so slow that packing always pays.
  void start_slow(std::uint64_t portion_bytes, FakeAgent::Setup setup = packing()) {
    options_.link_gbps = 1e-9;  // believed, though a byte comes in less than eight seconds
    start(setup, portions_of(portion_bytes));
  }
  receiver::Ranges all() const { return {{0, model_.layout->tile_count()}}; }
  std::uint64_t all_bytes() const { return bytes_of_tiles(*model_.layout, all()); }
  /// Where each portion of a pull of everything ends.
  std::vector<std::uint64_t> ends(std::uint64_t portion_bytes) const {
    std::vector<std::uint64_t> ends;
    for (receiver::Ranges rest = all(); !rest.empty();) {
      ends.push_back(receiver::take_front(*model_.layout, rest, portion_bytes).back().end);
    }
    return ends;
  }
  /// Calls of get_raw_tiles that come from now on, in their order; misbehaves as `fault` says.
  void record(std::function<Fault(const Request&)> fault = {}) {
    agent_->on_request([this, fault = std::move(fault)](const Request& r) {
      if (r.type == wire::Type::get_raw_tiles) asked_.push_back(r.tiles);
      return fault ? fault(r) : Fault::none;
    });
  }
  const std::vector<wire::TileRange>& asked() {
    agent_->on_request({});  // nobody records any more
    return asked_;
  }
  /// Of the tiles from `first` on, all came as extents and none packed; of those before, none and all.
  void expect_plain_from(std::uint64_t first) {
    for (const wire::TileRange& r : asked()) EXPECT_LE(r.end, first);
    std::uint64_t plain = 0;
    for (const wire::TileRange& r : agent_->extents_asked()) {
      EXPECT_GE(r.first, first);
      plain += r.end - r.first;
    }
    EXPECT_EQ(plain, model_.layout->tile_count() - first);
  }

 private:
  std::vector<wire::TileRange> asked_;
};

TEST_F(Portions, ComeOneAfterTheOther) {
  constexpr std::uint64_t kPortion = 3u << 20;
  start_slow(kPortion);
  record();
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_EQ(report.tiles, model_.layout->tile_count());
  EXPECT_EQ(extent_requests(), 0u);
  const std::vector<std::uint64_t> borders = ends(kPortion);
  ASSERT_GT(borders.size(), 5u);
  std::size_t last = 0;
  std::vector<std::uint64_t> requests(borders.size(), 0);
  for (const wire::TileRange& r : asked()) {
    const auto portion =
        static_cast<std::size_t>(std::upper_bound(borders.begin(), borders.end(), r.first) - borders.begin());
    EXPECT_LE(r.end, borders[portion]) << "nothing beyond the portion is asked for";
    EXPECT_GE(portion, last) << "before it is there";
    last = portion;
    ++requests[portion];
  }
  EXPECT_EQ(std::count(requests.begin(), requests.end(), 0), 0);
}

TEST_F(Portions, OfAnySize) {
  std::vector<TensorSpec> specs = sample_specs();
  specs.push_back({"big", Dtype::bf16, {256, 1024}, {}, {}});
  model_ = make_model(7, specs);
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1'000'003}, all_bytes() - 1,
                                    all_bytes(), all_bytes() + 1, ~std::uint64_t{0}}) {
    start_slow(bytes);
    const PullReport report = pull_and_commit();
    EXPECT_TRUE(report.packed) << bytes;
    EXPECT_EQ(extent_requests(), 0u) << bytes;
    EXPECT_EQ(report.tiles, model_.layout->tile_count()) << bytes;
    receiver_.reset();
  }
}

/// A link that is slower than it was said to be looks like packing that takes too long.
TEST_F(Portions, OneThatTookTooLongIsTheLast) {
  constexpr std::uint64_t kPortion = 2u << 20;
  FakeAgent::Setup setup = packing();
  setup.bytes_per_s = 25e6;
  options_.link_gbps = 1;
  start(setup, portions_of(kPortion));
  record();
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_EQ(report.replans, 0u);
  EXPECT_EQ(report.repaired_tiles, 0u);
  expect_plain_from(ends(kPortion).front());
}

TEST_F(Portions, AfterABrokenStreamTheRestComesPlain) {
  constexpr std::uint64_t kPortion = 5u << 20;
  start_slow(kPortion);
  record(fault_on(wire::Type::get_raw_tiles, Fault::drop_midway, 1));
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_GE(report.stream_restarts, 1u);
  expect_plain_from(ends(kPortion).front());
}

TEST_F(Portions, WhatIsHardlyWorthItComesPlain) {
  options_.link_gbps = 0.1;
  const std::uint64_t last = bytes_of_tiles(*model_.layout, {{all()[0].end - 1, all()[0].end}});
  const std::uint64_t portion = all_bytes() - last;
  start(packing(), portions_of(portion));
  record();
  EXPECT_TRUE(pull_and_commit().packed);
  ASSERT_EQ(ends(portion).size(), 2u);
  expect_plain_from(ends(portion).front());
}

TEST_F(Portions, ARevokedLeaseInASecondOneLeavesTheFirst) {
  constexpr std::uint64_t kPortion = 4u << 20;
  start_slow(kPortion);
  const std::uint64_t border = ends(kPortion).front();
  record([border, done = false](const Request& r) mutable {
    if (done || r.type != wire::Type::get_raw_tiles || r.tiles.first < border) return Fault::none;
    done = true;
    return Fault::refuse;
  });
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_EQ(report.replans, 1u);
  EXPECT_EQ(extent_requests(), 0u);
  std::uint64_t before = 0;
  for (const wire::TileRange& r : asked()) {
    if (r.first < border) before += r.end - r.first;
  }
  EXPECT_EQ(before, border) << "each of its tiles once";
}

TEST_F(Portions, WrongTilesAreRepairedWhenAllHaveCome) {
  start_slow(3u << 20);
  record(fault_on(wire::Type::get_raw_tiles, Fault::flip_at_source, 0, 12));
  const PullReport report = pull_and_commit();
  EXPECT_TRUE(report.packed);
  EXPECT_GE(report.repaired_tiles, 2u);
  EXPECT_EQ(extent_requests(), 0u);
}

/// After the first portion whole bands come as extents, and tiles of others raw.
TEST_F(Portions, OfSlicesToo) {
  FakeAgent::Setup setup = packing();
  setup.bytes_per_s = 25e6;
  options_.link_gbps = 1;
  start(setup, portions_of(1));
  std::vector<Slice> some;
  some.push_back(*row_slice(*model_.layout, "big.1", 1, 4));
  some.push_back({"big.4", {}});
  some.push_back(*col_slice(*model_.layout, "ffn.down", 1, 2));
  ASSERT_TRUE(receiver_->bind(make_host_target(receiver_->layout()), some, in_ms(60'000)).ok());
  auto staged = pull();
  ASSERT_TRUE(staged.ok()) << staged.error().to_string();
  EXPECT_TRUE((*staged)->report().packed);
  EXPECT_GT(extent_requests(), 0u);
  EXPECT_GT(raw_requests(), 1u);
  ASSERT_TRUE((*staged)->commit().ok());
  const auto memory = host_target_memory(*receiver_->target());
  const TileSet tiles = *TileSet::of(*model_.layout, some);
  for (std::uint64_t n = 0; n < tiles.tiles(); ++n) {
    const std::uint64_t tile = tiles.nth(n);
    ASSERT_EQ(delta::tile_digest(*model_.layout, memory, tile), delta::tile_digest(*model_.layout, model_.half, tile));
  }
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
