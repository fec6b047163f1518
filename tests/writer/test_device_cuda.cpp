// The writer's device path on a real device: registration of a mapped segment, copies of rows that lie apart, and what
// comes of it. What may go wrong is in test_device.cpp, on devices that break.
#include <gtest/gtest.h>

#include "gpu/cuda_device.hpp"
#include "tests/gpu/work.hpp"
#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"

namespace deltasync::test {
namespace {

class WriterCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = gpu::open_cuda_device(0, gpu::Use::copies);
    if (!device) GTEST_SKIP() << device.error().to_string();
    device_ = std::move(device).value();
  }
  SliceSource slice(const std::byte* on_device, std::uint32_t tensor, const Rect& rect) const {
    const Tensor& t = model_.layout->tensors()[tensor];
    SliceSource item{{tensor, rect}, {}};
    item.source.data = on_device + t.offset + rect.row * t.row_bytes() + rect.col * t.element_bytes;
    item.source.row_stride_bytes = static_cast<std::size_t>(t.row_bytes());
    item.source.device = {0};
    return item;
  }
  SliceSource transposed_slice(const std::byte* on_device, std::uint32_t tensor, const Rect& rect) const {
    const Tensor& t = model_.layout->tensors()[tensor];
    SliceSource item = slice(on_device, tensor, rect);
    item.source.data = on_device + t.offset + (rect.col * t.rows + rect.row) * t.element_bytes;
    item.source.row_stride_bytes = t.element_bytes;
    item.source.col_stride_bytes = static_cast<std::size_t>(t.rows * t.element_bytes);
    return item;
  }

  // Where segments are: a driver may refuse to register files of a disk, and then all goes through a buffer.
  TempDir dir_{std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path()};
  TestModel model_ = make_model(41);
  MiniAgent agent_{dir_.path()};
  std::unique_ptr<gpu::Device> device_;
};

TEST_F(WriterCudaTest, ASegmentsHalfIsRegisteredAndCopiedInto) {
  auto created = shm::testing::create({dir_.path(), "segment"});
  ASSERT_TRUE(created) << created.error().to_string();
  const std::shared_ptr<shm::Segment> segment = *std::move(created);
  const MutByteSpan half = segment->half(1);
  for (int round = 0; round < 2; ++round) {  // and given back
    const auto registered = device_->register_host(half.data(), half.size(), segment);
    ASSERT_TRUE(registered) << registered.error().to_string();
    Work work(*device_);
    std::vector<std::byte> bytes(half.size(), static_cast<std::byte>(round + 1));
    const std::byte* const on_device = work.up(bytes);
    work.finish();
    const auto stream = device_->make_stream();
    const auto event = device_->make_event();
    ASSERT_TRUE(stream && event);
    Work::check((*stream)->copy_out(half.data(), on_device, half.size()));
    Work::check((*stream)->record(**event));
    Work::check(gpu::wait(**event, soon(), "copying into the half"));
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), half.begin()));
  }
}

TEST_F(WriterCudaTest, SlicesOnTheDeviceMakeAVersionBitForBit) {
  Work work(*device_);
  auto writer = Writer::attach(model_.layout, Sidecar{}, writer_options(dir_.path()), soon());
  ASSERT_TRUE(writer) << writer.error().to_string();
  for (std::uint64_t number = 1; number <= 3; ++number) {
    mutate(model_.half, *model_.layout, 0.5, number);
    const std::byte* const on_device = work.up(model_.half);
    const std::byte* const transposed_there = work.up(transposed(*model_.layout, model_.half));
    work.finish();
    const Status begun = (*writer)->begin(version(7, number), soon());
    ASSERT_TRUE(begun) << begun.error().to_string();
    for (std::uint32_t part = 0; part < 3; ++part) {
      std::vector<SliceSource> batch;
      for (const TensorSlice& s : share(*model_.layout, part, 3)) {
        batch.push_back(part == 2 ? transposed_slice(transposed_there, s.tensor, s.rect)
                                  : slice(on_device, s.tensor, s.rect));
      }
      const auto ticket = (*writer)->write_device(batch, soon());
      ASSERT_TRUE(ticket) << ticket.error().to_string();
      if (part == 1) {
        const Status arrived = (*writer)->wait(*ticket, soon());
        ASSERT_TRUE(arrived) << arrived.error().to_string();
      }
    }
    const auto report = (*writer)->commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
    ASSERT_TRUE(eventually([&] { return agent_.served() == (VersionId{7, number}); })) << agent_.halves();
    EXPECT_TRUE(agent_.served_bytes() == model_.half);
  }
}

}  // namespace
}  // namespace deltasync::test
