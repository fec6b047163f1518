// The memory of a channel, by what both ends may rely on: one suite for every kind (there is one). And what is refused.
#include "bucket/memory.hpp"

#include <fcntl.h>
#include <gmock/gmock-matchers.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <functional>

#include "tests/support/temp_dir.hpp"

namespace deltasync::bucket {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kHalf = 64u << 10;

struct Kind {
  const char* name;
  std::function<Result<std::unique_ptr<BucketMemory>>(std::uint64_t)> make;
  std::function<Result<std::unique_ptr<BucketMemory>>(UniqueFd, std::uint64_t)> open;
};

class BucketMemoryTest : public ::testing::TestWithParam<Kind> {
 protected:
  static UniqueFd handed_over(const BucketMemory& memory) { return UniqueFd(::dup(memory.descriptor())); }
};

TEST_P(BucketMemoryTest, WhatOneWritesTheOtherReadsInTwoHalvesApart) {
  const auto trainer = GetParam().make(kHalf).value();
  const auto engine = GetParam().open(handed_over(*trainer), kHalf).value();
  for (unsigned half = 0; half < 2; ++half) {
    ASSERT_EQ(trainer->room(half).size(), kHalf);
    ASSERT_EQ(engine->half(half).size(), kHalf);
    std::memset(trainer->room(half).data(), static_cast<int>(half) + 5, kHalf);
  }
  for (unsigned half = 0; half < 2; ++half) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{kHalf - 1}}) {
      EXPECT_EQ(engine->half(half)[at], static_cast<std::byte>(half + 5));
    }
  }
  EXPECT_TRUE(engine->room(0).empty()) << "it only reads";
}

TEST_P(BucketMemoryTest, OutlivesTheOtherEnd) {
  auto trainer = GetParam().make(kHalf).value();
  const auto engine = GetParam().open(handed_over(*trainer), kHalf).value();
  trainer->room(1)[7] = std::byte{9};
  trainer.reset();
  EXPECT_EQ(engine->half(1)[7], std::byte{9});
}

TEST_P(BucketMemoryTest, AnotherSizeThanWasSaidIsRefused) {
  const auto trainer = GetParam().make(kHalf).value();
  for (const std::uint64_t said : {kHalf / 2, kHalf * 2}) {
    const auto engine = GetParam().open(handed_over(*trainer), said);
    ASSERT_FALSE(engine.ok()) << said;
    EXPECT_EQ(engine.error().code(), Errc::corrupt);
  }
  for (const std::uint64_t said : {std::uint64_t{0}, std::uint64_t{1} << 63, std::uint64_t{100}}) {
    EXPECT_EQ(GetParam().open(handed_over(*trainer), said).error().code(), Errc::invalid_argument) << said;
  }
}

TEST_P(BucketMemoryTest, WithoutADescriptorThereIsNone) {
  EXPECT_EQ(GetParam().open(UniqueFd(), kHalf).error().code(), Errc::corrupt);
}

TEST_P(BucketMemoryTest, MoreThanTheMachineHasIsNoSpace) {
  // It is known before anything is taken; who takes it nevertheless fails here, and not the machine.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1u << 30, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto memory = GetParam().make(std::uint64_t{1} << 40);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  ASSERT_FALSE(memory.ok());
  EXPECT_EQ(memory.error().code(), Errc::no_space);
}

INSTANTIATE_TEST_SUITE_P(Kinds, BucketMemoryTest, ::testing::Values(Kind{"host", make_host_buckets, open_host_buckets}),
                         [](const auto& kind) { return std::string(kind.param.name); });

TEST(HostBuckets, NobodyCanShrinkThem) {
  const auto memory = make_host_buckets(kHalf).value();
  EXPECT_NE(::ftruncate(memory->descriptor(), 0), 0);
  EXPECT_NE(::ftruncate(memory->descriptor(), 1 << 20), 0);
  EXPECT_NE(::fcntl(memory->descriptor(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), 0);
}

/// What reading would end this process for (SIGBUS), or read something else.
TEST(HostBuckets, DescriptorsOfOtherThingsAreRefused) {
  const test::TempDir dir;
  dir.write("file", std::string(2 * kHalf, 'x'));
  const auto why = [](UniqueFd file) {
    const auto opened = open_host_buckets(std::move(file), kHalf);
    return opened.ok() ? std::string("opened") : opened.error().to_string();
  };
  EXPECT_THAT(why(UniqueFd(::open((dir.path() / "file").c_str(), O_RDWR | O_CLOEXEC))),
              HasSubstr("corrupt: buckets: the descriptor is of no memory whose size is sealed"));
  UniqueFd open(::memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open.get(), 2 * kHalf), 0);
  EXPECT_THAT(why(UniqueFd(::dup(open.get()))), HasSubstr("no memory whose size is sealed"));
  ASSERT_EQ(::fcntl(open.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_THAT(why(std::move(open)), HasSubstr("pages of the descriptor's memory are not there"));
  UniqueFd small(::memfd_create("short", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::posix_fallocate(small.get(), 0, kHalf), 0);
  ASSERT_EQ(::fcntl(small.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  EXPECT_THAT(why(std::move(small)), HasSubstr("has 65536 bytes, not twice 65536"));
}

}  // namespace
}  // namespace deltasync::bucket
