// The memory of a version that arrives: what one side marks the other sees, and what is no such memory is refused.
#include "shm/arriving_memory.hpp"

#include <fcntl.h>
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <string>
#include <utility>

#include "tests/support/temp_dir.hpp"

namespace deltasync::shm {
namespace {

using testing::HasSubstr;

constexpr ArrivingShape kShape{1000, 5 << 20};

UniqueFd copy_of(int file) {
  return UniqueFd(::fcntl(file, F_DUPFD_CLOEXEC, 0));
}

std::unique_ptr<ArrivingMemory> make(const ArrivingShape& shape = kShape) {
  ThreadPool pool(2, "test");
  auto made = ArrivingMemory::make(shape, pool, CallContext(Deadline::after(std::chrono::minutes(1))));
  EXPECT_TRUE(made) << made.error().to_string();
  return made ? *std::move(made) : nullptr;
}

TEST(ArrivingMemory, TheShapeKeepsTheModelOnHugePages) {
  constexpr std::uint64_t kHuge = 2u << 20;
  for (const ArrivingShape& shape :
       {ArrivingShape{1, 1}, kShape, ArrivingShape{kHuge - 64, kHuge}, ArrivingShape{kHuge - 63, kHuge}}) {
    EXPECT_EQ(shape.model_offset() % kHuge, 0u);
    EXPECT_GE(shape.model_offset(), 64 + shape.tiles);
    EXPECT_GE(shape.bytes(), shape.model_offset() + shape.half_bytes);
    EXPECT_LT(shape.bytes(), 64 + shape.tiles + shape.half_bytes + 2 * kHuge);
  }
}

TEST(ArrivingMemory, WhatIsInPlaceIsSeenOnTheOtherSide) {
  const auto relay = make();
  ASSERT_NE(relay, nullptr);
  const auto opened = ArrivingMemory::open(copy_of(relay->file()), kShape);
  ASSERT_TRUE(opened) << opened.error().to_string();
  const ArrivingMemory& agent = **opened;
  ASSERT_EQ(agent.model().size(), kShape.half_bytes);
  EXPECT_EQ(agent.tiles_in_place(), 0u);
  for (const std::uint64_t tile : {0u, 999u, 999u}) {
    EXPECT_EQ(agent.in_place(tile), tile == 999 && agent.tiles_in_place() == 2);
    relay->room()[tile] = std::byte{7};
    relay->set_in_place(tile);
    EXPECT_TRUE(agent.in_place(tile));
    EXPECT_EQ(agent.model()[tile], std::byte{7});
  }
  EXPECT_EQ(agent.tiles_in_place(), 2u) << "each once";
  EXPECT_FALSE(agent.in_place(1));
  relay->room().back() = std::byte{9};
  EXPECT_EQ(agent.model().back(), std::byte{9});
}

TEST(ArrivingMemory, ItStaysWhileTheReaderHasIt) {
  auto relay = make();
  auto opened = ArrivingMemory::open(copy_of(relay->file()), kShape);
  ASSERT_TRUE(opened);
  std::fill(relay->room().begin(), relay->room().end(), std::byte{3});
  relay->set_in_place(5);
  relay.reset();
  EXPECT_TRUE((*opened)->in_place(5));
  EXPECT_EQ((*opened)->model().back(), std::byte{3});
}

TEST(ArrivingMemory, ALargeOneHasAllItsPages) {
  const ArrivingShape shape{2000, 150u << 20};
  const auto memory = make(shape);
  ASSERT_NE(memory, nullptr);
  EXPECT_TRUE(ArrivingMemory::open(copy_of(memory->file()), shape));
  EXPECT_TRUE(
      std::all_of(memory->model().begin(), memory->model().end(), [](std::byte b) { return b == std::byte{0}; }));
}

TEST(ArrivingMemory, NobodyCanShrinkIt) {
  const auto memory = make();
  EXPECT_NE(::ftruncate(memory->file(), 0), 0);
  EXPECT_NE(::ftruncate(memory->file(), 1 << 30), 0);
}

/// What reading would end this process for (SIGBUS), or read something else.
TEST(ArrivingMemory, DescriptorsOfOtherThingsAreRefused) {
  const auto why = [](UniqueFd file) {
    const auto opened = ArrivingMemory::open(std::move(file), kShape);
    return opened.ok() ? std::string("opened") : opened.error().to_string();
  };
  const auto bytes = static_cast<off_t>(kShape.bytes());
  EXPECT_THAT(why(UniqueFd()), HasSubstr("corrupt: memory of a version that arrives: no descriptor came along"));
  const test::TempDir dir;
  dir.write("file", std::string(kShape.bytes(), 'x'));
  EXPECT_THAT(why(UniqueFd(::open((dir.path() / "file").c_str(), O_RDWR | O_CLOEXEC))), HasSubstr("is not sealed"));
  EXPECT_THAT(why(UniqueFd(::open(dir.path().c_str(), O_RDONLY | O_CLOEXEC))), HasSubstr("is not sealed"));
  UniqueFd file(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(file.get(), bytes), 0);
  EXPECT_THAT(why(copy_of(file.get())), HasSubstr("is not sealed"));
  ASSERT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_GROW), 0);
  EXPECT_THAT(why(copy_of(file.get())), HasSubstr("is not sealed")) << "it may shrink";
  ASSERT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_THAT(why(copy_of(file.get())), HasSubstr("pages of it are not there"));
  const auto small = make({kShape.tiles, kShape.half_bytes - (2u << 20)});
  EXPECT_THAT(why(copy_of(small->file())), HasSubstr("bytes, not " + std::to_string(kShape.bytes())));
  const auto large = make({kShape.tiles, kShape.half_bytes + (2u << 20)});
  EXPECT_THAT(why(copy_of(large->file())), HasSubstr("bytes, not " + std::to_string(kShape.bytes())));
}

TEST(ArrivingMemory, TooLittleMemoryIsAnError) {
  ThreadPool pool(1, "test");
  const auto made =
      ArrivingMemory::make({1000, std::uint64_t{1} << 43}, pool, CallContext(Deadline::after(std::chrono::minutes(1))));
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::no_space) << made.error().to_string();
}

TEST(ArrivingMemory, AFileThatMayNotBeSoLargeIsAnError) {
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1 << 20, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  ThreadPool pool(1, "test");
  EXPECT_FALSE(ArrivingMemory::make(kShape, pool, CallContext(Deadline::after(std::chrono::minutes(1)))));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, ignored);
}

TEST(ArrivingMemory, ItsMakingEndsInTime) {
  ThreadPool pool(1, "test");
  const auto made = ArrivingMemory::make(kShape, pool, CallContext(Deadline::after(std::chrono::seconds(-1))));
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), Errc::timed_out);
}

}  // namespace
}  // namespace deltasync::shm
