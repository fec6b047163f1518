// Bits that flip in what the agent serves: who holds the version goes on from it, who pulls gets what there is,
// and nobody pulls the whole model for it. Where the flip is seen first differs from test to test.
#include <algorithm>

#include "format/tile_set.hpp"
#include "tests/integration/receivers.hpp"

namespace deltasync::agent {
namespace {

constexpr std::uint64_t kByte = 5u << 20;  ///< in the middle of the first tensor

class Damage : public ReceiverTest {
 protected:
  Damage() {
    // So many tiles that the look at some of them after each diff rarely meets the one that matters.
    model_ = test::make_model(3, {{"a", Dtype::bf16, {8192, 1024}, {4096}, {}},
                                  {"b", Dtype::f32, {256, 1024}, {}, {}},
                                  {"c", Dtype::bf16, {64, 64}, {}, {}}});
    options_.core.ring_bytes_max = 64u << 20;
  }
  /// One bit of a tensor in the half that is served.
  void flip(const std::string& tensor, std::uint64_t byte = kByte) {
    const auto segment = shm::Segment::attach(served()->generation->segment->path()).value();
    const Tensor& t = model_.layout->tensors()[*model_.layout->find(tensor)];
    segment->half(served()->half.half)[t.offset + byte] ^= std::byte{4};
  }
  std::vector<std::byte> served_bytes() const {
    const ByteSpan half = served()->generation->half(served()->half.half);
    return {half.begin(), half.end()};
  }
  /// The trainer's bytes, come by a delta, and nothing was pulled again for it.
  void expect_delta(Receiver& receiver) {
    const PullReport report = pull(receiver);
    EXPECT_EQ(report.mode, PullMode::delta);
    EXPECT_LT(report.wire_bytes, report.full_bytes);
    EXPECT_TRUE(held(receiver) == model_.half);
    EXPECT_EQ(report.version.id, served()->version.id);
  }
  void expect_digests_true() const {
    std::vector<std::uint64_t> digests(model_.layout->tile_count());
    ThreadPool pool(1, "test");
    delta::half_digests(*model_.layout, served_bytes(), digests, pool);
    EXPECT_EQ(*served()->digests, digests);
    EXPECT_EQ(served()->root, delta::root_digest(digests));
  }
};

TEST_F(Damage, WhoHoldsTheVersionGoesOnByDeltas) {
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  const std::uint64_t full = metrics().pulls_full;
  flip("a");
  next_version();
  expect_delta(*receiver);
  EXPECT_EQ(metrics().pulls_full, full);
  EXPECT_GE(metrics().tiles_damaged, 1u);
  expect_digests_true();
  next_version();
  expect_delta(*receiver);
}

/// The version as it was sealed is lost to those who did not have it. What there is has its own root, so it is theirs;
/// and who has the valid one is told that it is.
TEST_F(Damage, WhoPullsTheVersionGetsWhatThereIs) {
  start_agent();
  next_version();
  const auto intact = connect();
  pull(*intact);
  flip("b", 12'345);
  const auto late = connect();
  const PullReport report = pull(*late);
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_LT(report.wire_bytes, report.full_bytes * 3 / 2) << "the whole model once more";
  EXPECT_TRUE(held(*late) == served_bytes());
  EXPECT_FALSE(held(*late) == model_.half);
  expect_digests_true();
  EXPECT_EQ(metrics().tiles_damaged, 1u);

  EXPECT_EQ(pull(*intact).mode, PullMode::up_to_date);
  EXPECT_TRUE(held(*intact) == model_.half);
  next_version();
  expect_delta(*intact);
  expect_delta(*late);
}

TEST_F(Damage, SlicesWithTheTileAndWithout) {
  start_agent();
  next_version();
  const auto with = connect();
  const auto without = connect();
  const std::vector<Slice> upper{{"a", Rect{0, 0, 4096, 1024}}};
  const std::vector<Slice> lower{{"a", Rect{4096, 0, 4096, 1024}}};
  ASSERT_TRUE(with->bind(make_host_target(model_.layout), upper, test_deadline()));
  ASSERT_TRUE(without->bind(make_host_target(model_.layout), lower, test_deadline()));
  pull(*with);
  pull(*without);
  flip("a");  // in the upper rows
  const auto late = connect();
  pull(*late);  // who finds it
  ASSERT_EQ(metrics().tiles_damaged, 1u);
  EXPECT_EQ(pull(*with).mode, PullMode::up_to_date);
  EXPECT_EQ(pull(*without).mode, PullMode::up_to_date);
  next_version();
  const std::uint64_t full = metrics().pulls_full;
  for (Receiver* receiver : {with.get(), without.get()}) {
    const PullReport report = pull(*receiver);
    EXPECT_EQ(report.mode, PullMode::delta);
    const auto tiles = TileSet::of(*model_.layout, receiver->slices()).value();
    const auto memory = held(*receiver);
    const Tensor& a = model_.layout->tensors()[0];
    const std::uint64_t first = receiver == with.get() ? 0 : 4096 * a.row_bytes();
    EXPECT_TRUE(std::equal(memory.begin() + static_cast<std::ptrdiff_t>(a.offset + first),
                           memory.begin() + static_cast<std::ptrdiff_t>(a.offset + first + 4096 * a.row_bytes()),
                           model_.half.begin() + static_cast<std::ptrdiff_t>(a.offset + first)));
  }
  EXPECT_EQ(metrics().pulls_full, full);
}

/// Nobody pulled while the wrong digest was carried on from version to version.
TEST_F(Damage, ALateReceiverPassesOverTheDamagedVersions) {
  for (const bool merges : {true, false}) {
    SCOPED_TRACE(merges);
    options_.core.merge_steps_min = merges ? 2 : 0;
    start_agent();
    next_version();
    const auto receiver = connect();
    pull(*receiver);
    const std::uint64_t full = metrics().pulls_full;
    flip("a");
    for (int i = 0; i < 3; ++i) next_version();
    expect_delta(*receiver);
    EXPECT_EQ(metrics().pulls_full, full);
    EXPECT_GE(metrics().tiles_damaged, 1u);
    expect_digests_true();
    next_version();
    expect_delta(*receiver);
    writer_.reset();
    stop_agent();
    std::filesystem::remove_all(dir_.path());
    std::filesystem::create_directories(dir_.path());
    ++epoch_;
    number_ = 0;
  }
}

/// A version in between, whose bytes of the tile nobody knows, is no one's target any more.
TEST_F(Damage, VersionsInBetweenAreGone) {
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  flip("a");
  for (int i = 0; i < 3; ++i) next_version();
  const auto finder = connect();
  pull(*finder);
  Want want;
  want.number = number_ - 1;
  const auto refused = receiver->pull(want, test_deadline());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::gone) << refused.error().to_string();
  expect_delta(*receiver);
}

TEST_F(Damage, TheScrubFindsItWithoutAnyReceiver) {
  options_.core.scrub.pass = std::chrono::milliseconds(200);
  options_.core.scrub.cpu = 1;
  start_agent();
  next_version();
  ASSERT_TRUE(eventually([&] { return metrics().scrub_passes >= 1; }));
  EXPECT_EQ(metrics().tiles_damaged, 0u);
  const Digest128 root = served()->root;
  flip("b", 12'345);
  ASSERT_TRUE(eventually([&] { return served()->root != root; }));
  EXPECT_EQ(metrics().tiles_damaged, 1u);
  expect_digests_true();
  next_version();
  expect_digests_true();
}

/// The overlapped diff has begun from the digests of before.
TEST_F(Damage, FoundWhileTheNextVersionIsOffloaded) {
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  test::mutate(model_.half, *model_.layout, 0.01, ++number_);
  const Version version{{epoch_, number_}, "next"};
  ASSERT_TRUE(writer_->begin(version, test_deadline()));
  const auto write = [&](std::uint32_t tensor) {
    return writer_->write(tensor, Source{model_.half.data() + model_.layout->tensors()[tensor].offset});
  };
  flip("a");
  ASSERT_TRUE(write(0));
  ASSERT_TRUE(eventually([&] { return metrics().batches_overlapped >= 1; }));
  const auto late = connect();
  pull(*late);
  EXPECT_EQ(metrics().tiles_damaged, 1u);
  ASSERT_TRUE(write(1));
  ASSERT_TRUE(write(2));
  ASSERT_TRUE(writer_->commit(test_deadline()));
  ASSERT_TRUE(writer_->wait_ready(version.id, test_deadline()));
  expect_digests_true();
  expect_delta(*receiver);
  expect_delta(*late);
}

/// Who damaged its own memory hears that the agent's is valid, and helps itself.
TEST_F(Damage, AReceiverWithWrongMemoryPullsAgain) {
  start_agent();
  next_version();
  const auto receiver = connect();
  pull(*receiver);
  const auto memory = host_target_memory(*receiver->target());
  const_cast<std::byte&>(memory[model_.layout->tensors()[0].offset + kByte]) ^= std::byte{4};
  test::mutate(model_.half, *model_.layout, 1.0, 7);  // every tile is in the delta
  next_version(1.0);
  const PullReport report = pull(*receiver);
  EXPECT_EQ(report.mode, PullMode::full);
  EXPECT_TRUE(held(*receiver) == model_.half);
  EXPECT_EQ(metrics().tiles_damaged, 0u);
}

/// A receiver of the release before does not say what it could not verify; but it asks for the tile again.
TEST_F(Damage, ARepairThatIsAskedForIsEnough) {
  start_agent();
  next_version();
  flip("c", 5);
  Client old = Client::connect(port(), wire::Role::control, {}, wire::kProtocolOldest).value();
  const auto plan = old.plan(ask());
  ASSERT_TRUE(plan) << plan.error().to_string();
  const Digest128 root = served()->root;
  const std::uint64_t tile = model_.layout->tensors()[2].first_tile;
  ASSERT_TRUE(old.frames(wire::GetRawTiles{plan->plan, {{tile, tile + 1}}, wire::RawForm::plain}));
  ASSERT_TRUE(eventually([&] { return served()->root != root; }));
  EXPECT_EQ(metrics().tiles_damaged, 1u);
  expect_digests_true();
}

}  // namespace
}  // namespace deltasync::agent
