// What src/gpu/nccl.cpp makes of NCCL and its faults: a library of its name is opened, whose work is done here, on the
// emulated devices. test_nccl.cpp runs over it, too.
#include <gmock/gmock-matchers.h>

#include <array>
#include <cstring>

#include "base/deadline.hpp"
#include "gpu/cuda_device.hpp"
#include "gpu/nccl.hpp"
#include "tests/gpu/emulator/runtime.hpp"
#include "tests/gpu/work.hpp"

namespace deltasync::emulator {
namespace {

constexpr int kSystemError = 2;  // ncclSystemError
constexpr int kInvalid = 4;      // ncclInvalidArgument

struct Comm {
  int device = 0;
  int rank = 0;
};

/// One thread uses it at a time.
struct FakeNccl {
  struct Part {
    const Comm* comm;
    std::byte* memory;
    std::size_t bytes;
    cudaStream_t stream;
  };
  std::string fails;   ///< the next call of this name
  bool hangs = false;  ///< the next group, until it is broken off
  int groups = 0;      ///< that are begun
  int comms = 0;       ///< that are there
  std::vector<Part> parts;
  std::shared_ptr<Mark> broken_off;

  int result(const std::string& call) {
    if (call != fails) return 0;
    fails.clear();
    return kSystemError;
  }
  static FakeNccl& get() {
    static FakeNccl made;
    return made;
  }
};

/// What the first has by then comes to the others, by way of the host.
void broadcast(const std::vector<FakeNccl::Part>& parts, const std::shared_ptr<Mark>& held) {
  const auto sent = std::make_shared<std::vector<std::byte>>(parts.front().bytes);
  const auto there = std::make_shared<Mark>();
  for (const FakeNccl::Part& part : parts) {
    const bool sends = part.comm->rank == 0;  // who breaks it off has no comm any more
    const auto error = runtime().submit(part.stream, [=, memory_of = part.memory, bytes = part.bytes] {
      if (held != nullptr) held->wait();
      if (!sends) there->wait();
      std::byte* const memory = runtime().memory().real(memory_of);
      std::memcpy(sends ? sent->data() : memory, sends ? memory : sent->data(), bytes);
      if (sends) there->reach();
    });
    EXPECT_EQ(error, cudaSuccess);
  }
}

}  // namespace
}  // namespace deltasync::emulator

#define DELTASYNC_EXPORTED extern "C" __attribute__((visibility("default")))
using deltasync::emulator::FakeNccl;

DELTASYNC_EXPORTED int fake_nccl_init_all(void** comms, int count, const int* devices) {
  if (const int failed = FakeNccl::get().result("ncclCommInitAll"); failed != 0) return failed;
  for (int i = 0; i < count; ++i) comms[i] = new deltasync::emulator::Comm{devices[i], i};
  FakeNccl::get().comms += count;
  return 0;
}
DELTASYNC_EXPORTED int fake_nccl_abort(void* comm) {
  FakeNccl& nccl = FakeNccl::get();
  if (nccl.broken_off != nullptr) nccl.broken_off->reach();
  delete static_cast<deltasync::emulator::Comm*>(comm);
  --nccl.comms;
  return 0;
}
DELTASYNC_EXPORTED int fake_nccl_group_start() {
  const int failed = FakeNccl::get().result("ncclGroupStart");
  if (failed == 0) ++FakeNccl::get().groups;
  return failed;
}
DELTASYNC_EXPORTED int fake_nccl_broadcast(const void* from, void* to, std::size_t bytes, int type, int root,
                                           void* comm, void* stream) {
  using namespace deltasync::emulator;
  FakeNccl& nccl = FakeNccl::get();
  const auto* const of = static_cast<const Comm*>(comm);
  if (nccl.parts.size() == 1) {  // the first has begun
    if (const int failed = nccl.result("ncclBroadcast"); failed != 0) return failed;
  }
  const auto range = runtime().memory().find(to);
  const bool is_there = range && range->device == of->device && range->has(reinterpret_cast<std::uintptr_t>(to), bytes);
  const bool is_its = runtime().find(static_cast<cudaStream_t>(stream))->device == of->device;
  if (nccl.groups == 0 || from != to || type != 1 || root != 0 || !is_there || !is_its) return kInvalid;
  nccl.parts.push_back({of, static_cast<std::byte*>(to), bytes, static_cast<cudaStream_t>(stream)});
  return 0;
}
DELTASYNC_EXPORTED int fake_nccl_group_end() {
  using namespace deltasync::emulator;
  FakeNccl& nccl = FakeNccl::get();
  --nccl.groups;
  const auto parts = std::exchange(nccl.parts, {});
  if (const int failed = nccl.result("ncclGroupEnd"); failed != 0) return failed;
  if (static_cast<int>(parts.size()) != nccl.comms) return 0;  // some were refused: nothing begins
  if (std::exchange(nccl.hangs, false)) nccl.broken_off = std::make_shared<Mark>();
  broadcast(parts, nccl.broken_off);
  return 0;
}

namespace deltasync::emulator {
namespace {

using testing::HasSubstr;

constexpr std::array<std::int32_t, 2> kDevices{0, 1};
constexpr std::size_t kWords = 1000;

class NcclFaults : public testing::Test {
 protected:
  NcclFaults() {
    for (std::size_t i = 0; i < 2; ++i) {
      devices_[i] = *gpu::open_cuda_device(kDevices[i], gpu::Use::copies);
      work_[i].emplace(*devices_[i]);
      memories_[i] = reinterpret_cast<std::byte*>(work_[i]->up(std::vector<std::uint64_t>(kWords, i + 5)));
      work_[i]->finish();
    }
  }
  Status run(gpu::Broadcast& broadcast) {
    const std::array<gpu::Stream*, 2> streams{&work_[0]->stream(), &work_[1]->stream()};
    return broadcast.run(memories_, kWords * 8, streams);
  }
  std::uint64_t last_of_second() {
    return work_[1]->down(reinterpret_cast<const std::uint64_t*>(memories_[1]), kWords).back();
  }

  std::array<std::unique_ptr<gpu::Device>, 2> devices_;
  std::array<std::optional<test::Work>, 2> work_;
  std::array<std::byte*, 2> memories_{};
  FakeNccl& nccl_ = FakeNccl::get();
};

TEST_F(NcclFaults, AreNamedAndOver) {
  nccl_.fails = "ncclCommInitAll";
  EXPECT_THAT(gpu::open_nccl_broadcast(kDevices).error().message(),
              HasSubstr("ncclCommInitAll: unhandled system error (2)"));
  {
    const auto broadcast = *gpu::open_nccl_broadcast(kDevices);
    for (const char* const call : {"ncclGroupStart", "ncclBroadcast", "ncclGroupEnd"}) {
      nccl_.fails = call;
      const Status failed = run(*broadcast);
      ASSERT_FALSE(failed.ok()) << call;
      EXPECT_EQ(failed.error().code(), Errc::io);
      EXPECT_THAT(failed.error().message(), HasSubstr(std::string(call) + ": unhandled system error (2)"));
      EXPECT_EQ(nccl_.groups, 0) << call << ": what was begun has ended";
      EXPECT_EQ(last_of_second(), 6u);
    }
    ASSERT_TRUE(run(*broadcast).ok());
    EXPECT_EQ(last_of_second(), 5u);
  }
  EXPECT_EQ(nccl_.comms, 0);
}

/// Who waited to his deadline ends it, without waiting again.
TEST_F(NcclFaults, WhatDoesNotEndIsBrokenOff) {
  auto broadcast = *gpu::open_nccl_broadcast(kDevices);
  nccl_.hangs = true;
  ASSERT_TRUE(run(*broadcast).ok());
  const auto event = *devices_[1]->make_event();
  ASSERT_TRUE(work_[1]->stream().record(*event).ok());
  EXPECT_EQ(gpu::wait(*event, Deadline::after(std::chrono::milliseconds(20)), "a broadcast").error().code(),
            Errc::timed_out);
  broadcast.reset();
  EXPECT_EQ(nccl_.comms, 0);
  EXPECT_TRUE(gpu::wait(*event, Deadline::after(std::chrono::minutes(1)), "what is left of it").ok());
  nccl_.broken_off.reset();
}

}  // namespace
}  // namespace deltasync::emulator
