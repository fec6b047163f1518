// A writer with fake devices, and an agent's end that serves what it seals.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <utility>

#include "tests/shm/support.hpp"
#include "tests/writer/harness.hpp"
#include "tests/writer/on_device.hpp"

namespace deltasync::test {

class WriterDeviceTest : public ::testing::Test {
 protected:
  const Layout& layout() const { return *model_.layout; }
  static gpu::FakeDevice::Options seeded(std::uint64_t seed, std::int32_t ordinal = 0) {
    gpu::FakeDevice::Options options;
    options.seed = seed;
    options.ordinal = ordinal;
    return options;
  }
  static DeviceLimits small_limits() { return {100'000, 4, 30'000, 3, 64u << 10}; }
  Result<std::unique_ptr<Writer>> try_attach(std::map<std::int32_t, gpu::FakeDevice*> devices, std::uint32_t index = 0,
                                             std::uint32_t writers = 1) {
    return WriterSession::attach(model_.layout, Sidecar{}, writer_options(dir_.path(), index, writers),
                                 {std::make_unique<Lent>(std::move(devices)), small_limits()}, soon());
  }
  std::unique_ptr<Writer> attach(gpu::FakeDevice& device, std::uint32_t index = 0, std::uint32_t writers = 1) {
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

  shm::testing::TempDir dir_;
  TestModel model_ = make_model(31);
  MiniAgent agent_{dir_.path()};
};

}  // namespace deltasync::test
