// Sources in device memory, on devices that refuse and hang: no half is handed on under a copy, and a version that
// fails takes nothing with it.
#include <gmock/gmock-matchers.h>
#include <unistd.h>

#include <future>

#include "tests/writer/device_fixture.hpp"

namespace deltasync::test {
namespace {

using gpu::FakeDevice;
using ::testing::HasSubstr;

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
  ASSERT_TRUE(writer->wait(1, soon()));
  const std::uint64_t arrived = agent_.progress();
  device.hang(true);
  device.fail(FakeDevice::Call::record, 2);  // the first is in the trainer's stream
  const SliceSource second = row(1);
  ASSERT_FALSE(writer->write_device(std::span(&second, 1), soon()));
  EXPECT_EQ(writer->wait(2, in_ms(10)).error().code(), Errc::aborted);
  EXPECT_EQ(agent_.progress(), arrived);
  EXPECT_FALSE(writer->commit(in_ms(10)));
  EXPECT_EQ(writer->begin(version(7, 2), in_ms(10)).error().code(), Errc::quarantined);
  EXPECT_TRUE(quarantined()) << agent_.halves();
  device.hang(false);
  expect_works(*writer, 2);
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
    for (std::uint64_t n = 1; failed || (call == Call::register_host && n <= 24); n = n < 12 ? n + 1 : n * 2) {
      ASSERT_LT(n, 1u << 20) << "there are not so many calls";
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

/// The worst that can happen: bytes of an aborted version land in a half that is being filled again.
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
  ASSERT_TRUE(second.wait(0, soon()));
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

}  // namespace
}  // namespace deltasync::test
