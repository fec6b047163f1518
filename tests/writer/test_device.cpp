// Sources in device memory, from the call to the served version, on devices that are late: what is counted as in place
// is in place.
#include <gmock/gmock-matchers.h>

#include <functional>
#include <future>

#include "tests/writer/device_fixture.hpp"

namespace deltasync::test {
namespace {

using gpu::FakeDevice;
using ::testing::HasSubstr;

#if defined(DELTASYNC_SANITIZED)
constexpr std::uint64_t kSeeds = 4;
#else
constexpr std::uint64_t kSeeds = 24;
#endif

/// All of the layout, each tensor cut at random, in random order.
std::vector<TensorSlice> random_slices(const Layout& layout, Random& random) {
  std::vector<TensorSlice> slices;
  for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
    const Rect all = whole(layout, i);
    const std::uint64_t row = random.below(all.rows + 1);
    const std::uint64_t col = random.below(all.cols + 1);
    for (const Rect& rect : {Rect{0, 0, row, col}, Rect{0, col, row, all.cols - col}, Rect{row, 0, all.rows - row, col},
                             Rect{row, col, all.rows - row, all.cols - col}}) {
      slices.push_back({i, rect});
    }
  }
  for (std::size_t i = slices.size(); i > 1; --i) std::swap(slices[i - 1], slices[random.below(i)]);
  return slices;
}

TEST_F(WriterDeviceTest, HostAndDeviceSlicesMakeOneVersionBitForBit) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    mutate(model_.half, layout(), 0.5, seed);
    FakeDevice first(seeded(seed, 0));
    FakeDevice second(seeded(seed + 100, 1));
    // Without registration, of the first half or of the second, copies go through the buffer.
    const std::uint64_t parts =
        (layout().half_bytes() + small_limits().register_bytes - 1) / small_limits().register_bytes;
    if (seed % 3 != 0) first.fail(FakeDevice::Call::register_host, seed % 3 == 1 ? 1 : parts + 2);
    const OnDevice a(first, 0, model_.half);
    const OnDevice b(second, 1, model_.half);
    const OnDevice transposed_b(second, 1, transposed(layout(), model_.half));
    auto attached = try_attach({{0, &first}, {1, &second}});
    ASSERT_TRUE(attached) << attached.error().to_string();
    Writer& writer = **attached;
    ASSERT_TRUE(writer.begin(version(7, seed), soon()));
    std::vector<SliceSource> batch;
    const auto flush = [&] {
      const auto ticket = writer.write_device(batch, soon());
      ASSERT_TRUE(ticket) << ticket.error().to_string();
      batch.clear();
      if (random.below(4) == 0) {
        ASSERT_TRUE(writer.wait(*ticket, soon()));
      }
    };
    for (const TensorSlice& s : random_slices(layout(), random)) {
      const auto where = random.below(4);
      if (where == 0) {
        const Status written = write_slice(writer, model_.half, s.tensor, s.rect);
        ASSERT_TRUE(written) << written.error().to_string();
        continue;
      }
      batch.push_back(where == 3 ? transposed_b.transposed_slice(layout(), s.tensor, s.rect)
                                 : (where == 1 ? a : b).slice(layout(), s.tensor, s.rect));
      if (random.below(3) == 0) flush();
    }
    flush();
    const auto report = writer.commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
    std::uint64_t bytes = 0;
    for (const Tensor& t : layout().tensors()) bytes += t.bytes;
    EXPECT_EQ(report->bytes, bytes);
    expect_served(seed);
    EXPECT_EQ(first.counts().registered_bytes, seed % 3 != 0 ? 0 : 2 * layout().half_bytes());
    EXPECT_EQ(first.counts().pinned_bytes, seed % 3 != 0 ? 3 * 30'000u : 0u);
  }
}

TEST_F(WriterDeviceTest, SeveralWritersFillOneVersion) {
  FakeDevice device(seeded(5));
  const OnDevice version_on_device(device, 0, model_.half);
  std::vector<std::unique_ptr<Writer>> writers;
  for (std::uint32_t i = 0; i < 3; ++i) writers.push_back(attach(device, i, 3));
  std::vector<std::future<Status>> done;
  for (std::uint32_t i = 0; i < 3; ++i) {
    done.push_back(std::async(std::launch::async, [&, i]() -> Status {
      Writer& writer = *writers[i];
      const auto plan = share(layout(), i, 3);
      DS_TRY(writer.register_plan(plan, soon()));
      DS_TRY(writer.begin(version(7, 1), soon()));
      for (const TensorSlice& s : plan) {
        const SliceSource item = version_on_device.slice(layout(), s.tensor, s.rect);
        DS_TRY(writer.write_device(std::span(&item, 1), soon()));
      }
      DS_TRY(writer.commit(soon()));
      return {};
    }));
  }
  for (auto& one : done) {
    const Status status = one.get();
    EXPECT_TRUE(status) << status.error().to_string();
  }
  expect_served(1);
}

TEST_F(WriterDeviceTest, NothingCountsBeforeItHasArrived) {
  for (const bool registered : {true, false}) {
    FakeDevice device(seeded(6));
    if (!registered) device.fail(FakeDevice::Call::register_host, 1);
    const OnDevice version_on_device(device, 0, model_.half);
    auto writer = attach(device);
    ASSERT_TRUE(writer->begin(version(7, registered ? 1 : 2), soon()));
    device.hang(true);
    const Rect some{0, 0, 1, 1};
    std::uint32_t tensor = 0;
    while (layout().tensors()[tensor].bytes == 0) ++tensor;
    const SliceSource item = version_on_device.slice(layout(), tensor, some);
    const auto ticket = writer->write_device(std::span(&item, 1), soon());
    ASSERT_TRUE(ticket) << ticket.error().to_string();
    EXPECT_EQ(agent_.progress(), 0u);
    const Status late = writer->wait(*ticket, in_ms(20));
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code(), Errc::timed_out);
    EXPECT_THAT(late.error().message(), HasSubstr(device.name()));
    EXPECT_EQ(agent_.progress(), 0u);
    device.hang(false);
    ASSERT_TRUE(writer->wait(*ticket, soon()));
    EXPECT_EQ(agent_.progress(), 1u);
    EXPECT_EQ(writer->wait(*ticket + 1, soon()).error().code(), Errc::invalid_argument);
    writer->abort();
  }
}

TEST_F(WriterDeviceTest, WriteReturnsWhenTheSourceMayBeReused) {
  FakeDevice device(seeded(7));
  const OnDevice version_on_device(device, 0, model_.half);
  ASSERT_TRUE(device.drain());
  auto writer = attach(device);
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  for (const SliceSource& item : version_on_device.all(layout())) {
    const Status written = writer->write(item.slice.tensor, item.source);
    ASSERT_TRUE(written) << written.error().to_string();
    const Tensor& t = layout().tensors()[item.slice.tensor];
    if (t.bytes == 0) continue;
    const std::vector<std::byte> other(t.bytes, std::byte{0x3A});
    device.poke(static_cast<std::byte*>(const_cast<void*>(item.source.data)), other.data(), other.size());
  }
  ASSERT_TRUE(writer->commit(soon()));
  expect_served(1);
}

TEST_F(WriterDeviceTest, HowMuchIsUnderWayIsBounded) {
  for (const bool registered : {true, false}) {
    FakeDevice device(seeded(13));
    if (!registered) device.fail(FakeDevice::Call::register_host, 2);
    const OnDevice version_on_device(device, 0, model_.half);
    auto writer = attach(device);
    ASSERT_TRUE(writer->begin(version(7, 1), soon()));
    device.hang(true);
    const auto late = writer->write_device(version_on_device.all(layout()), in_ms(30));
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code(), Errc::timed_out);
    EXPECT_THAT(late.error().message(), HasSubstr(device.name()));
    EXPECT_LE(device.counts().bytes_copied, registered ? 4 * 100'000u : 3 * 30'000u);
    EXPECT_EQ(agent_.progress(), 0u);
    device.hang(false);
    ASSERT_TRUE(device.drain());  // else the session may outlive its writer, and the slot is taken
    writer->abort();
  }
}

TEST_F(WriterDeviceTest, WhatCannotBeCopiedIsRefused) {
  FakeDevice device(seeded(14));
  FakeDevice other(seeded(15));
  const OnDevice version_on_device(device, 0, model_.half);
  auto writer = attach(device);
  std::uint32_t tensor = 0;
  const auto suits = [](const Tensor& t) { return t.rows >= 2 && t.cols >= 2 && t.element_bytes >= 2; };
  while (!suits(layout().tensors()[tensor])) ++tensor;
  const SliceSource good = version_on_device.slice(layout(), tensor, whole(layout(), tensor));
  const auto attempt = [&](const std::function<void(SliceSource&)>& spoil, Errc code) {
    SliceSource item = good;
    spoil(item);
    EXPECT_EQ(writer->write_device(std::span(&item, 1), soon()).error().code(), Errc::invalid_argument) << "no fill";
    ASSERT_TRUE(writer->begin(version(7, 1), soon()));
    const auto refused = writer->write_device(std::span(&item, 1), soon());
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), code) << refused.error().to_string();
    writer->abort();
  };
  attempt([](SliceSource& item) { item.source.device = {}; }, Errc::invalid_argument);
  attempt([](SliceSource& item) { item.source.device = {3}; }, Errc::unsupported);
  attempt([](SliceSource& item) { item.source.stream = nullptr; }, Errc::invalid_argument);
  attempt([&](SliceSource& item) { item.source.stream = other.engine_stream().raw; }, Errc::invalid_argument);
  const gpu::StreamHandle captured = device.engine_stream();
  device.capture(captured, true);
  attempt([&](SliceSource& item) { item.source.stream = captured.raw; }, Errc::unsupported);
  EXPECT_FALSE(device.capture_ended_by_others());
  attempt([](SliceSource& item) { item.source.data = nullptr; }, Errc::invalid_argument);
  attempt([&](SliceSource& item) { item.source.data = model_.half.data(); }, Errc::internal);
  attempt([](SliceSource& item) { item.source.row_stride_bytes = 1; }, Errc::invalid_argument);
  attempt([](SliceSource& item) { item.source.col_stride_bytes = 81; }, Errc::invalid_argument);  // not aligned
  attempt([](SliceSource& item) { item.slice.rect.rows += 1; }, Errc::out_of_range);
  expect_works(*writer, 1);
}

}  // namespace
}  // namespace deltasync::test
