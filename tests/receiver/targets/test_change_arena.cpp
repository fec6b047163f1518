#include "receiver/targets/device/change_arena.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "gpu/host_device.hpp"
#include "tests/support/model.hpp"

namespace deltasync::test {
namespace {

using Room = ChangeArena::Room;
constexpr std::uint64_t kPiece = sizeof(gpu::WordPiece);

/// Rooms come and go: none has a byte of another, of whichever kind, and none is outside of what was taken.
TEST(ChangeArena, RoomsAreDisjoint) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    gpu::HostDevice device;
    ChangeArena arena(device, 1 << 16);
    Random random(seed);
    struct Taken {
      Room room;
      std::uint64_t bytes;
      std::byte mark;
    };
    std::vector<Taken> held;
    std::size_t refused = 0;
    const auto check = [](const Taken& of) {
      const std::byte* const front = of.room.base() + of.room.at();
      const std::byte* const back = of.room.base() + of.room.pieces_at();
      const auto is_mine = [&](std::byte b) { return b == of.mark; };
      EXPECT_TRUE(std::all_of(front, front + of.bytes, is_mine));
      EXPECT_TRUE(std::all_of(back, back + of.room.pieces() * kPiece, is_mine));
    };
    for (int i = 0; i < 400; ++i) {
      if (random.below(3) == 0 && !held.empty()) {
        const auto at = static_cast<std::ptrdiff_t>(random.below(held.size()));
        check(held[static_cast<std::size_t>(at)]);
        std::vector<Taken> rest;
        for (std::ptrdiff_t k = 0; k < std::ssize(held); ++k) {
          if (k != at) rest.push_back(std::move(held[static_cast<std::size_t>(k)]));
        }
        held.swap(rest);
        continue;
      }
      const std::uint64_t bytes = 8 * random.below(300);
      auto room = arena.claim(bytes, 1 + random.below(20));
      if (!room) {
        ++refused;
        if (random.below(4) == 0) held.clear();
        continue;
      }
      EXPECT_EQ(room->at() % 8, 0u);
      EXPECT_EQ(room->at(), room->first_run() * sizeof(gpu::WordRun)) << "runs are counted from the block on";
      const auto mark = static_cast<std::byte>(i);
      std::fill_n(room->base() + room->at(), bytes, mark);
      std::fill_n(room->base() + room->pieces_at(), room->pieces() * kPiece, mark);
      held.push_back({*std::move(room), bytes, mark});
    }
    EXPECT_NE(refused, 0u);
    EXPECT_LE(arena.bytes(), 1u << 16);
    for (const Taken& of : held) check(of);
  }
}

/// So one launch does them all.
TEST(ChangeArena, PiecesOfRoomsFollowEachOther) {
  gpu::HostDevice device;
  ChangeArena arena(device, 1 << 16);
  const auto a = arena.claim(100, 3);
  const auto b = arena.claim(5, 2);
  ASSERT_TRUE(a && b);
  EXPECT_EQ(a->base(), b->base());
  EXPECT_EQ(b->pieces_at() + 2 * kPiece, a->pieces_at());
}

TEST(ChangeArena, ARoomThatIsTooLargeIsRefused) {
  gpu::HostDevice device;
  ChangeArena arena(device, 4096);
  EXPECT_FALSE(arena.claim(4096, 1));
  EXPECT_EQ(arena.bytes(), 0u);
  EXPECT_TRUE(arena.claim(3000, 1));
  EXPECT_LE(arena.bytes(), 4096u);
}

TEST(ChangeArena, IsTooLargeOnlyForUpdatesThatAreAllSmall) {
  gpu::HostDevice device;
  ChangeArena arena(device, 1 << 16);
  const auto update = [&](std::uint64_t bytes) {
    const bool too_large = arena.is_too_large();
    EXPECT_TRUE(bytes == 0 || arena.claim(bytes, 1));
    return too_large;
  };
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(update(i % 7 == 0 ? 8000 : 100)) << "a large one now and then";
  EXPECT_FALSE(update(8000));
  int small = 0;
  while (!update(100)) ++small;
  EXPECT_GE(small, 7);
  EXPECT_LE(small, 9);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(update(0)) << "pulls that bring nothing say nothing";
  {
    const auto room = arena.claim(100, 1);
    EXPECT_FALSE(arena.is_too_large()) << "it is in use";
    arena.give_up();
    EXPECT_NE(arena.bytes(), 0u);
  }
  arena.give_up();
  EXPECT_EQ(arena.bytes(), 0u);
  EXPECT_TRUE(arena.claim(100, 1));
}

}  // namespace
}  // namespace deltasync::test
