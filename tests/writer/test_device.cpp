// Sources in device memory, from the call to the served version, on devices that are late, refuse and hang: what is
// counted as in place is in place, and no half is handed on under a copy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>

#include "gpu/fake_device.hpp"
#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"
#include "writer/session.hpp"

namespace deltasync::test {
namespace {

using gpu::FakeDevice;
using shm::testing::TempDir;
using ::testing::HasSubstr;

#if defined(DELTASYNC_SANITIZED)
constexpr std::uint64_t kSeeds = 4;
#else
constexpr std::uint64_t kSeeds = 24;
#endif

/// Lends the test's devices.
class Lent final : public DeviceFinder {
 public:
  explicit Lent(std::map<std::int32_t, FakeDevice*> devices) : devices_(std::move(devices)) {}
  Result<gpu::Device*> find(std::int32_t ordinal) override {
    const auto found = devices_.find(ordinal);
    if (found == devices_.end()) return Error(Errc::unsupported, "there is no device " + std::to_string(ordinal));
    return static_cast<gpu::Device*>(found->second);
  }

 private:
  const std::map<std::int32_t, FakeDevice*> devices_;
};

/// A version in a device's memory, laid out like a half. It gets there by work in the trainer's stream, late.
class OnDevice {
 public:
  OnDevice(FakeDevice& device, std::int32_t ordinal, const std::vector<std::byte>& half)
      : ordinal_(ordinal), memory_(*device.allocate(half.size())), stream_(device.engine_stream()) {
    set(device, half);
  }
  void set(FakeDevice& device, const std::vector<std::byte>& half) {
    device.engine_work(stream_, [data = memory_.data(), half] { std::memcpy(data, half.data(), half.size()); });
  }
  SliceSource slice(const Layout& layout, std::uint32_t tensor, const Rect& rect) const {
    const Tensor& t = layout.tensors()[tensor];
    SliceSource item{{tensor, rect}, {}};
    item.source.data = memory_.data() + t.offset + rect.row * t.row_bytes() + rect.col * t.element_bytes;
    item.source.row_stride_bytes = static_cast<std::size_t>(t.row_bytes());
    item.source.memory = Source::Memory::cuda;
    item.source.device = ordinal_;
    item.source.stream = stream_.raw;
    return item;
  }
  /// All tensors, those without a byte too.
  std::vector<SliceSource> all(const Layout& layout) const {
    std::vector<SliceSource> items;
    for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) items.push_back(slice(layout, i, whole(layout, i)));
    return items;
  }
  /// The same, the first being one that is neither empty nor too large to be under way at once.
  std::vector<SliceSource> all_after_one(const Layout& layout) const {
    auto items = all(layout);
    const auto fits = [&](const SliceSource& item) {
      const std::uint64_t bytes = layout.tensors()[item.slice.tensor].bytes;
      return bytes >= 1000 && bytes <= 90'000;
    };
    std::iter_swap(items.begin(), std::find_if(items.begin(), items.end(), fits));
    return items;
  }

 private:
  const std::int32_t ordinal_;
  const gpu::Memory memory_;
  const gpu::StreamHandle stream_;
};

class WriterDeviceTest : public ::testing::Test {
 protected:
  const Layout& layout() const { return *model_.layout; }
  static FakeDevice::Options seeded(std::uint64_t seed, std::int32_t ordinal = 0) {
    FakeDevice::Options options;
    options.seed = seed;
    options.ordinal = ordinal;
    return options;
  }
  static DeviceLimits small_limits() { return {100'000, 4, 30'000, 3}; }
  Result<std::unique_ptr<Writer>> try_attach(std::map<std::int32_t, FakeDevice*> devices, std::uint32_t index = 0,
                                             std::uint32_t writers = 1) {
    return WriterSession::attach(model_.layout, Sidecar{}, writer_options(dir_.path(), index, writers),
                                 {std::make_unique<Lent>(std::move(devices)), small_limits()}, soon());
  }
  std::unique_ptr<Writer> attach(FakeDevice& device, std::uint32_t index = 0, std::uint32_t writers = 1) {
    auto writer = try_attach({{0, &device}}, index, writers);
    EXPECT_TRUE(writer) << writer.error().to_string();
    return std::move(writer).value();
  }
  void expect_served(std::uint64_t number) {
    const VersionId id{7, number};
    EXPECT_TRUE(eventually([&] { return agent_.served() == id; })) << agent_.halves();
    EXPECT_TRUE(agent_.served_bytes() == model_.half);
  }
  /// From host memory, so that it proves the session and the half.
  void expect_works(Writer& writer, std::uint64_t number) {
    mutate(model_.half, layout(), 0.3, number);
    const Status begun = writer.begin(version(7, number), soon());
    ASSERT_TRUE(begun) << begun.error().to_string();
    ASSERT_TRUE(write_all(writer, model_.half));
    const auto report = writer.commit(soon());
    ASSERT_TRUE(report) << report.error().to_string();
    expect_served(number);
  }
  bool quarantined() const { return agent_.halves().find("QUARANTINED") != std::string::npos; }

  TempDir dir_;
  TestModel model_ = make_model(31);
  MiniAgent agent_{dir_.path()};
};

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
    if (seed % 3 != 0) first.fail(FakeDevice::Call::register_host, seed % 3);
    const OnDevice a(first, 0, model_.half);
    const OnDevice b(second, 1, model_.half);
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
      const auto where = random.below(3);
      if (where == 0) {
        const Status written = write_slice(writer, model_.half, s.tensor, s.rect);
        ASSERT_TRUE(written) << written.error().to_string();
        continue;
      }
      batch.push_back((where == 1 ? a : b).slice(layout(), s.tensor, s.rect));
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
    EXPECT_EQ(writer->wait({ticket->number + 1}, soon()).error().code(), Errc::invalid_argument);
    writer->abort();
  }
}

/// An event that could not be recorded says what it said before: that a flight of the past has arrived.
TEST_F(WriterDeviceTest, AFlightThatWasBrokenOffNeverArrives) {
  FakeDevice device(seeded(16));
  const OnDevice version_on_device(device, 0, model_.half);
  auto writer = attach(device);
  std::uint32_t tensor = 0;
  while (layout().tensors()[tensor].rows < 3 || layout().tensors()[tensor].cols == 0) ++tensor;
  const auto row = [&](std::uint64_t i) {
    return version_on_device.slice(layout(), tensor, Rect{i, 0, 1, layout().tensors()[tensor].cols});
  };
  ASSERT_TRUE(writer->begin(version(7, 1), soon()));
  const SliceSource first = row(0);
  ASSERT_TRUE(writer->write_device(std::span(&first, 1), soon()));
  ASSERT_TRUE(writer->wait({1}, soon()));
  const std::uint64_t arrived = agent_.progress();
  device.hang(true);
  device.fail(FakeDevice::Call::record, 2);  // the first is in the trainer's stream
  const SliceSource second = row(1);
  ASSERT_FALSE(writer->write_device(std::span(&second, 1), soon()));
  EXPECT_EQ(writer->wait({2}, in_ms(10)).error().code(), Errc::aborted);
  EXPECT_EQ(agent_.progress(), arrived);
  EXPECT_FALSE(writer->commit(in_ms(10)));
  EXPECT_EQ(writer->begin(version(7, 2), in_ms(10)).error().code(), Errc::quarantined);
  EXPECT_TRUE(quarantined()) << agent_.halves();
  device.hang(false);
  expect_works(*writer, 2);
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

TEST_F(WriterDeviceTest, AFaultAtAnyCallDropsTheVersionAndNothingElse) {
  using Call = FakeDevice::Call;
  std::uint64_t number = 1;
  {
    FakeDevice device(seeded(8));
    expect_works(*attach(device), number);
  }
  for (const Call call : {Call::register_host, Call::pin, Call::copy, Call::record, Call::wait_for, Call::done}) {
    bool failed = true;
    for (std::uint64_t n = 1; failed || (call == Call::register_host && n <= 2); n = n < 12 ? n + 1 : n * 2) {
      SCOPED_TRACE("call " + std::to_string(static_cast<int>(call)) + ", number " + std::to_string(n));
      FakeDevice device(seeded(100 + n));
      const auto before = model_.half;
      const OnDevice old_on_device(device, 0, before);
      auto writer = attach(device);
      mutate(model_.half, layout(), 0.3, ++number);
      const OnDevice version_on_device(device, 0, model_.half);
      ASSERT_TRUE(writer->begin(version(7, number), soon()));
      if (call == Call::pin) device.fail(Call::register_host, 1);
      device.fail(call, n);
      const auto attempt = [&]() -> Status {
        for (const SliceSource& item : version_on_device.all(layout())) {
          DS_TRY(writer->write_device(std::span(&item, 1), soon()));
        }
        DS_TRY(writer->commit(soon()));
        return {};
      };
      const Status status = attempt();
      failed = !status;
      if (failed) {
        EXPECT_THAT(status.error().message(), HasSubstr("a failure that a test asked for"));
        EXPECT_EQ(agent_.served(), (VersionId{7, number - 1}));
        EXPECT_TRUE(agent_.served_bytes() == before);
        writer->abort();
        expect_works(*writer, ++number);
      } else {
        expect_served(number);
      }
    }
  }
}

/// The worst that can happen: bytes of an aborted version land in a half that is being filled anew.
TEST_F(WriterDeviceTest, AHalfIsNotHandedOnUnderACopyThatHangs) {
  for (const bool explicit_abort : {false, true}) {
    FakeDevice device(seeded(9));
    auto writer = attach(device);
    const std::uint64_t base = explicit_abort ? 10 : 0;
    expect_works(*writer, base + 1);
    const auto served = model_.half;
    auto other = model_.half;
    for (std::byte& b : other) b = ~b;
    const OnDevice doomed(device, 0, other);
    ASSERT_TRUE(writer->begin(version(7, base + 2), soon()));
    const std::vector<SliceSource> items = doomed.all_after_one(layout());
    const auto early = writer->write_device(std::span(items).subspan(1), soon());
    ASSERT_TRUE(early) << early.error().to_string();
    ASSERT_TRUE(writer->wait(*early, soon()));
    device.hang(true);
    const auto queued = writer->write_device(std::span(items).first(1), soon());
    ASSERT_TRUE(queued) << queued.error().to_string();
    if (explicit_abort) {
      writer->abort();
    } else {
      const auto report = writer->commit(in_ms(50));
      ASSERT_FALSE(report);
      EXPECT_EQ(report.error().code(), Errc::timed_out);
      EXPECT_THAT(report.error().message(), HasSubstr(device.name()));
    }
    EXPECT_TRUE(quarantined()) << agent_.halves();
    for (int i = 0; i < 2; ++i) {
      const Status refused = writer->begin(version(7, base + 3), in_ms(50));
      ASSERT_FALSE(refused) << "a device may still write into the half";
      EXPECT_EQ(refused.error().code(), Errc::quarantined);
      EXPECT_THAT(refused.error().message(), HasSubstr(device.name()));
      EXPECT_THAT(refused.error().message(), HasSubstr("pid " + std::to_string(::getpid())));
    }
    EXPECT_TRUE(quarantined()) << agent_.halves();
    EXPECT_EQ(agent_.served(), (VersionId{7, base + 1}));
    EXPECT_TRUE(agent_.served_bytes() == served) << "the active version stays";

    device.hang(false);
    ASSERT_TRUE(writer->begin(version(7, base + 3), soon()));
    EXPECT_TRUE(device.drain());
    mutate(model_.half, layout(), 0.5, base + 3);
    const OnDevice next(device, 0, model_.half);
    ASSERT_TRUE(writer->write_device(next.all(layout()), soon()));
    ASSERT_TRUE(writer->commit(soon()));
    expect_served(base + 3);
  }
}

TEST_F(WriterDeviceTest, AnotherWritersAbortLeavesTheHalfToTheCopyThatHangs) {
  FakeDevice quick(seeded(10));
  FakeDevice stuck(seeded(11, 1));
  auto leader = attach(quick, 0, 2);
  auto attached = try_attach({{1, &stuck}}, 1, 2);
  ASSERT_TRUE(attached) << attached.error().to_string();
  Writer& second = **attached;
  auto plan = std::async(std::launch::async, [&] { return leader->register_plan(share(layout(), 0, 2), soon()); });
  ASSERT_TRUE(second.register_plan(share(layout(), 1, 2), soon()));
  ASSERT_TRUE(plan.get());
  const OnDevice on_stuck(stuck, 1, model_.half);
  ASSERT_TRUE(leader->begin(version(7, 1), soon()));
  ASSERT_TRUE(second.begin(version(7, 1), soon()));
  stuck.hang(true);
  const auto theirs = share(layout(), 1, 2);
  const TensorSlice first = *std::min_element(
      theirs.begin(), theirs.end(), [](const auto& a, const auto& b) { return a.rect.elements() < b.rect.elements(); });
  const SliceSource item = on_stuck.slice(layout(), first.tensor, first.rect);
  ASSERT_TRUE(second.write_device(std::span(&item, 1), soon()));
  leader->abort();
  EXPECT_TRUE(quarantined()) << agent_.halves();
  const TensorSlice next = first.tensor == theirs[0].tensor ? theirs[1] : theirs[0];
  EXPECT_EQ(write_slice(second, model_.half, next.tensor, next.rect).error().code(), Errc::aborted);
  second.abort();
  // The leader has the other half, and loses that too; then there is none until the device goes on.
  ASSERT_TRUE(leader->begin(version(7, 2), soon()));
  EXPECT_TRUE(quarantined()) << agent_.halves();
  EXPECT_EQ(second.begin(version(7, 2), in_ms(50)).error().code(), Errc::quarantined);
  leader->abort();
  stuck.hang(false);
  ASSERT_TRUE(second.wait({0}, soon()));
  EXPECT_TRUE(eventually([&] { return agent_.halves() == "FREE FREE"; })) << agent_.halves();
}

TEST_F(WriterDeviceTest, ASessionThatEndsUnderACopyKeepsHalfAndSlot) {
  FakeDevice device(seeded(12));
  const OnDevice doomed(device, 0, model_.half);
  {
    auto writer = attach(device);
    ASSERT_TRUE(writer->begin(version(7, 1), soon()));
    device.hang(true);
    const auto items = doomed.all_after_one(layout());
    ASSERT_TRUE(writer->write_device(std::span(items).first(1), soon()));
  }
  EXPECT_TRUE(quarantined()) << agent_.halves();
  EXPECT_EQ(device.counts().registered_bytes, 2 * layout().half_bytes());
  const auto refused = try_attach({{0, &device}});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), Errc::already_exists);
  EXPECT_TRUE(quarantined()) << agent_.halves();

  device.hang(false);
  EXPECT_TRUE(device.drain());
  auto writer = attach(device);
  EXPECT_EQ(device.counts().registered_bytes, 0u);
  expect_works(*writer, 2);
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
    writer->abort();
  }
}

TEST_F(WriterDeviceTest, WhatCannotBeCopiedIsRefused) {
  FakeDevice device(seeded(14));
  FakeDevice other(seeded(15));
  const OnDevice version_on_device(device, 0, model_.half);
  auto writer = attach(device);
  std::uint32_t tensor = 0;
  while (layout().tensors()[tensor].rows < 2 || layout().tensors()[tensor].cols < 2) ++tensor;
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
  attempt([](SliceSource& item) { item.source.memory = Source::Memory::host; }, Errc::invalid_argument);
  attempt([](SliceSource& item) { item.source.device = 3; }, Errc::unsupported);
  attempt([](SliceSource& item) { item.source.stream = nullptr; }, Errc::invalid_argument);
  attempt([&](SliceSource& item) { item.source.stream = other.engine_stream().raw; }, Errc::invalid_argument);
  attempt([](SliceSource& item) { item.source.data = nullptr; }, Errc::invalid_argument);
  attempt([&](SliceSource& item) { item.source.data = model_.half.data(); }, Errc::internal);
  attempt([](SliceSource& item) { item.source.row_stride_bytes = 1; }, Errc::invalid_argument);
  attempt([](SliceSource& item) { item.slice.rect.rows += 1; }, Errc::out_of_range);
  expect_works(*writer, 1);
}

}  // namespace
}  // namespace deltasync::test
