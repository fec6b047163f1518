// The overlapped diff: what is done before the seal, and that nothing comes of it that is not true.
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>

#include "delta/delta.hpp"
#include "format/tiling.hpp"
#include "tests/agent/agent_harness.hpp"
#include "tests/writer/on_device.hpp"

namespace deltasync::agent {
namespace {

/// Tensors of one batch each, the last one of two.
std::vector<TensorSpec> batch_specs() {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 4; ++i) specs.push_back({"t" + std::to_string(i), Dtype::bf16, {1024, 2048}, {}, {}});
  specs.push_back({"large", Dtype::bf16, {2048, 2048}, {}, {}});
  return specs;
}
constexpr std::uint64_t kBatches = 6;

class Behind : public AgentTest {
 protected:
  Behind() { model_ = test::make_model(3, batch_specs()); }

  std::uint64_t diffed_overlapped() const { return agent_->core().metrics().batches_overlapped; }
  std::uint64_t diffed_after() const { return agent_->core().metrics().batches_after; }
  bool wait_for_diffed(std::uint64_t batches) const {
    return eventually([&] { return diffed_overlapped() >= batches; });
  }
  /// Opens a fill with new contents in model_.half.
  void begin() {
    test::mutate(model_.half, *model_.layout, 0.01, ++number_);
    ASSERT_TRUE(writer_->begin(version(), test_deadline()));
  }
  Version version() const { return {{epoch_, number_}, "step_" + std::to_string(number_)}; }
  Status write(std::uint32_t tensor) {
    return writer_->write(tensor, Source{model_.half.data() + model_.layout->tensors()[tensor].offset});
  }
  void commit() {
    const auto report = writer_->commit(test_deadline());
    ASSERT_TRUE(report) << report.error().to_string();
    const Status ready = writer_->wait_ready(version().id, test_deadline());
    ASSERT_TRUE(ready) << ready.error().to_string();
  }
  /// What is served is this half: the digests, and the delta that leads to it from `before`.
  void expect_served(const std::vector<std::byte>& half, std::vector<std::byte> before) {
    const ServedPtr now = served();
    EXPECT_EQ(now->version.id, version().id);
    std::vector<std::uint64_t> digests(model_.layout->tile_count());
    ThreadPool pool(1, "test");
    delta::half_digests(*model_.layout, half, digests, pool);
    EXPECT_EQ(*now->digests, digests);
    EXPECT_EQ(now->root, delta::root_digest(digests));
    const auto& ring = agent_->core().versions().snapshot()->ring;
    ASSERT_FALSE(ring.empty());
    for (const delta::Frame& frame : ring.back()->delta->frames) {
      const auto records = delta::parse_frame(*model_.layout, frame.bytes).value();
      for (const delta::TileRecord& record : records) {
        const Tile tile = tile_of(*model_.layout, record.tile);
        const Tensor& tensor = model_.layout->tensors()[tile.tensor];
        const delta::TensorMemory memory{before.data() + tensor.offset, static_cast<std::size_t>(tensor.row_bytes())};
        delta::commit_tile(*model_.layout, record, delta::tile_address(memory, tile, tensor.element_bytes),
                           memory.row_stride);
      }
    }
    EXPECT_TRUE(before == half) << "the delta leads elsewhere";
  }
};

TEST_F(Behind, WholeBatchesAreDiffedBeforeTheSealAndPublishedAfterIt) {
  start_agent();
  next_version();
  const std::vector<std::byte> first = model_.half;
  const ServedPtr before = served();
  begin();
  for (const std::uint32_t tensor : {3U, 0U}) ASSERT_TRUE(write(tensor));  // in no particular order
  const Tensor& large = model_.layout->tensors()[4];
  ASSERT_TRUE(writer_->write(4, Rect{0, 0, 1500, large.cols}, Source{model_.half.data() + large.offset}));
  ASSERT_TRUE(wait_for_diffed(3)) << "two tensors, and half of a third";
  EXPECT_EQ(served(), before);
  for (const std::uint32_t tensor : {1U, 2U}) ASSERT_TRUE(write(tensor));
  ASSERT_TRUE(wait_for_diffed(5));
  ASSERT_TRUE(writer_->write(4, Rect{1500, 0, 548, large.cols},
                             Source{model_.half.data() + large.offset + 1500 * large.row_bytes()}));
  ASSERT_TRUE(wait_for_diffed(6));
  EXPECT_EQ(diffed_overlapped(), kBatches);
  EXPECT_EQ(served(), before);
  commit();
  expect_served(model_.half, first);
  EXPECT_EQ(diffed_after(), 0u) << "what was done during the offload is not made use of";
}

TEST_F(Behind, TheRestIsDiffedAfterTheSeal) {
  start_agent();
  next_version();
  const std::vector<std::byte> first = model_.half;
  begin();
  ASSERT_TRUE(write(2));
  ASSERT_TRUE(wait_for_diffed(1));
  for (const std::uint32_t tensor : {0U, 1U, 3U, 4U}) ASSERT_TRUE(write(tensor));
  commit();
  expect_served(model_.half, first);
}

TEST_F(Behind, WhatAnAbortLeavesIsForgotten) {
  start_agent();
  next_version();
  const std::vector<std::byte> first = model_.half;
  for (std::uint64_t round = 1; round <= 3; ++round) {
    begin();
    ASSERT_TRUE(write(0));
    ASSERT_TRUE(wait_for_diffed(round)) << "the half that was held is filled again";
    writer_->abort();
  }
  begin();
  for (std::uint32_t tensor = 0; tensor < 5; ++tensor) ASSERT_TRUE(write(tensor));
  commit();
  expect_served(model_.half, first);
}

TEST_F(Behind, BytesThatChangeAfterTheyWereCountedAreNoticed) {
  // Few enough tiles that all of them are looked at again.
  model_ = test::make_model(4, {{"t", Dtype::f64, {8, 65536}, {}, {}}});
  start_agent();
  next_version();
  const std::vector<std::byte> first = model_.half;
  begin();
  ASSERT_TRUE(write(0));
  ASSERT_TRUE(wait_for_diffed(1));
  // A writer that breaks its promise: the bytes in shared memory change after all.
  const auto segment = shm::Segment::attach(served()->generation->segment->path()).value();
  const unsigned half = 1 - served()->half.half;
  segment->half(half)[12345] ^= std::byte{1};
  model_.half[12345] ^= std::byte{1};
  commit();
  expect_served(model_.half, first);
}

/// Bytes that changed in an earlier version, where no check met them: its digests are not true. Who holds that version
/// as it was gets the tile whole.
TEST_F(Behind, DigestsThatAreNotTrueAreNotCarriedOn) {
  model_ = test::make_model(4, {{"t", Dtype::f64, {8, 65536}, {}, {}}});
  start_agent();
  next_version();
  const std::vector<std::byte> first = model_.half;
  const auto segment = shm::Segment::attach(served()->generation->segment->path()).value();
  segment->half(served()->half.half)[12345] ^= std::byte{1};  // of the version that is served
  begin();
  ASSERT_TRUE(write(0));
  ASSERT_TRUE(wait_for_diffed(1));
  commit();
  expect_served(model_.half, first);
  EXPECT_EQ(agent_->core().metrics().tiles_damaged, 1u);
  const std::vector<std::byte> second = model_.half;
  begin();
  ASSERT_TRUE(write(0));
  commit();
  expect_served(model_.half, second);
}

/// On a busy machine a thread of low priority may be in the middle of a batch for seconds.
TEST_F(Behind, NobodyWaitsForAThreadOfLowPriority) {
  std::promise<void> resume;
  std::atomic<int> rounds{0};
  options_.core.before_overlapped_diff = [&, resumed = resume.get_future().share()] {
    ++rounds;
    resumed.wait();
  };
  start_agent();
  next_version();
  for (int i = 0; i < 3; ++i) {
    const std::vector<std::byte> before = model_.half;
    begin();
    for (std::uint32_t tensor = 0; tensor < 5; ++tensor) ASSERT_TRUE(write(tensor));
    if (i == 0) {
      ASSERT_TRUE(eventually([&] { return rounds == 1; }));
    }
    commit();
    expect_served(model_.half, before);
  }
  const std::vector<std::byte> before = model_.half;
  begin();
  ASSERT_TRUE(write(0));
  writer_->abort();
  EXPECT_EQ(rounds, 1) << "it is in its first round still";
  EXPECT_EQ(diffed_overlapped(), 0u);
  resume.set_value();
  begin();
  for (std::uint32_t tensor = 0; tensor < 5; ++tensor) ASSERT_TRUE(write(tensor));
  ASSERT_TRUE(wait_for_diffed(kBatches)) << "what it had begun for nothing does not count";
  EXPECT_EQ(diffed_overlapped(), kBatches);
  commit();
  expect_served(model_.half, before);
}

/// Copies of a device arrive late and in their own time; what is diffed before they all have is what has arrived.
TEST_F(Behind, CopiesOfADeviceAreDiffedAsTheyArrive) {
  start_agent();
  next_version();
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    SCOPED_TRACE(seed);
    const std::vector<std::byte> first = model_.half;
    gpu::FakeDevice::Options device_options;
    device_options.seed = seed;
    gpu::FakeDevice device(device_options);
    writer_.reset();  // its index is free again
    WriterOptions writer_options;
    writer_options.agent_socket = (dir_.path() / "agent.sock").string();
    auto attached = WriterSession::attach(
        model_.layout, Sidecar{}, writer_options,
        {std::make_unique<test::Lent>(std::map<std::int32_t, gpu::FakeDevice*>{{0, &device}}), DeviceLimits()},
        test_deadline());
    ASSERT_TRUE(attached) << attached.error().to_string();
    writer_ = std::move(attached).value();
    const std::uint64_t before = diffed_overlapped();
    const std::uint64_t after = diffed_after();
    begin();
    const test::OnDevice version_on_device(device, 0, model_.half);
    const std::vector<SliceSource> items = version_on_device.all(*model_.layout);
    device.hang(true);
    const auto early = writer_->write_device(std::span(items).first(2), test_deadline());
    ASSERT_TRUE(early) << early.error().to_string();
    ASSERT_TRUE(write(2));
    ASSERT_TRUE(wait_for_diffed(before + 1));
    EXPECT_EQ(diffed_overlapped(), before + 1) << "what the device has not copied yet";
    device.hang(false);
    ASSERT_TRUE(writer_->wait(*early, test_deadline()));
    ASSERT_TRUE(wait_for_diffed(before + 3));
    const auto late = writer_->write_device(std::span(items).subspan(3), test_deadline());
    ASSERT_TRUE(late) << late.error().to_string();
    ASSERT_TRUE(writer_->wait(*late, test_deadline()));
    ASSERT_TRUE(wait_for_diffed(before + kBatches));
    commit();
    expect_served(model_.half, first);
    EXPECT_EQ(diffed_after(), after);
    writer_.reset();  // before its device
  }
}

TEST_F(Behind, ItCanBeTurnedOff) {
  options_.core.overlap_threads = 0;
  start_agent();
  next_version();
  const std::vector<std::byte> first = model_.half;
  begin();
  for (std::uint32_t tensor = 0; tensor < 5; ++tensor) ASSERT_TRUE(write(tensor));
  commit();
  EXPECT_EQ(diffed_overlapped(), 0u);
  expect_served(model_.half, first);
}

TEST_F(Behind, AnAgentThatStopsInTheMiddleLeavesTheFillToTheNext) {
  start_agent();
  next_version();
  begin();
  ASSERT_TRUE(write(0));
  ASSERT_TRUE(wait_for_diffed(1));
  stop_agent();
  start_agent();
  ASSERT_TRUE(wait_for_diffed(1)) << "the next agent finds what is in place";
  const std::vector<std::byte> first(served()->generation->segment->half(served()->half.half).begin(),
                                     served()->generation->segment->half(served()->half.half).end());
  for (std::uint32_t tensor = 1; tensor < 5; ++tensor) ASSERT_TRUE(write(tensor));
  commit();
  expect_served(model_.half, first);
}

}  // namespace
}  // namespace deltasync::agent
