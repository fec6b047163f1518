// Lanes, warps, blocks and memory: what threads do together, and what a launch must not leave to chance.
#include <gmock/gmock-matchers.h>

#include <functional>
#include <numeric>

#include "tests/gpu/emulator/machine.hpp"

namespace deltasync::emulator {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kSeeds = 20;

/// The thread's number of all, in %r12, and the address of its word in `out`, in %rd12.
constexpr const char* kPlace = R"(
	mov.u32 	%r13, %ntid.x;
	mad.lo.s32 	%r12, %r11, %r13, %r10;
	mul.wide.u32 	%rd12, %r12, 4;
	add.s64 	%rd12, %rd11, %rd12;
)";

/// What all threads leave in %r9.
std::vector<std::uint32_t> results(const std::string& lines, std::uint64_t seed = 1, std::uint32_t threads = 32,
                                   std::uint32_t blocks = 1) {
  Machine machine(kPlace + lines + "\tst.global.u32 \t[%rd12], %r9;\n", threads, blocks);
  const auto* const out = machine.up(std::vector<std::uint32_t>(threads * blocks));
  const auto fault = machine.run(out, out, seed);
  EXPECT_FALSE(fault.has_value()) << fault->text;
  return machine.down<std::uint32_t>(out, threads * blocks);
}

/// What a launch does wrong that has 64 words to read and 64 to write.
Fault fault_of(const std::string& lines, std::uint32_t threads = 32, std::uint32_t blocks = 1) {
  Machine machine(kPlace + lines, threads, blocks);
  const auto* const in = machine.up(std::vector<std::uint32_t>(64));
  const auto fault = machine.run(in, machine.up(std::vector<std::uint32_t>(64)));
  return fault ? *fault : Fault{Fault::Kind::other, "nothing is wrong"};
}

TEST(Warps, EveryThreadOfEveryBlockRuns) {
  const auto got = results("\tmov.u32 \t%r1, %nctaid.x;\n\tmad.lo.s32 \t%r9, %r12, 10, %r1;\n", 3, 70, 5);
  for (std::uint32_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i * 10 + 5);
  const auto lanes = results("\tmov.u32 \t%r9, %laneid;\n", 3, 70);
  for (std::uint32_t i = 0; i < lanes.size(); ++i) EXPECT_EQ(lanes[i], i % 32);
}

/// Loops of as many turns as the lane has, within which lanes part again: in any order the same.
TEST(Warps, LanesPartAndMeet) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const auto got = results(R"(
	mov.u32 	%r9, 0;
	mov.u32 	%r1, 0;
$again:
	setp.ge.u32 	%p1, %r1, %r12;
	@%p1 bra 	$end;
	and.b32 	%r2, %r1, 1;
	setp.eq.s32 	%p2, %r2, 0;
	@!%p2 bra 	$odd;
	add.s32 	%r9, %r9, %r1;
	bra.uni 	$next;
$odd:
	sub.s32 	%r9, %r9, 1;
$next:
	add.s32 	%r1, %r1, 1;
	bra.uni 	$again;
$end:
)",
                             seed, 64, 3);
    for (std::uint32_t i = 0; i < got.size(); ++i) {
      std::uint32_t expected = 0;
      for (std::uint32_t k = 0; k < i; ++k) expected += k % 2 == 0 ? k : ~0u;
      ASSERT_EQ(got[i], expected) << "thread " << i << " with seed " << seed;
    }
  }
}

/// As __shfl_up_sync and its siblings promise for groups of `width` lanes (CUDA C++ Programming Guide, "Warp Shuffle
/// Functions").
TEST(Warps, Shuffles) {
  struct Shuffle {
    const char* name;
    std::function<int(int lane, int by, int width)> source;  ///< itself if there is none
  };
  const std::vector<Shuffle> all{
      {"up", [](int lane, int by, int width) { return lane % width >= by ? lane - by : lane; }},
      {"down", [](int lane, int by, int width) { return lane % width + by < width ? lane + by : lane; }},
      {"bfly", [](int lane, int by, int width) { return (lane ^ by) / width <= lane / width ? lane ^ by : lane; }},
      {"idx", [](int lane, int by, int width) { return lane / width * width + by % width; }}};
  for (const Shuffle& shuffle : all) {
    for (const int width : {2, 8, 32}) {
      for (const int by : {0, 1, 2, 5, 16, 31}) {
        const int clamp = (32 - width) << 8 | (shuffle.name == std::string("up") ? 0 : 31);
        const auto got =
            results("\tadd.s32 \t%r1, %r12, 100;\n\tshfl.sync." + std::string(shuffle.name) + ".b32 \t%r9|%p1, %r1, " +
                    std::to_string(by) + ", " + std::to_string(clamp) + ", -1;\n\t@%p1 add.s32 \t%r9, %r9, 1000;\n");
        for (int lane = 0; lane < 32; ++lane) {
          const int source = shuffle.source(lane, by, width);
          const auto value = got[static_cast<std::size_t>(lane)];
          ASSERT_EQ(value % 1000, static_cast<std::uint32_t>(100 + source))
              << shuffle.name << " " << by << " of " << width;
          if (source != lane) {
            ASSERT_GT(value, 1000u);
          }
        }
      }
    }
  }
}

/// Lanes that come from different places in the code wait for each other.
TEST(Warps, ShufflesWaitForTheirLanes) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const auto got = results(R"(
	mov.u32 	%r1, %r10;
	setp.lt.u32 	%p1, %r10, 16;
	@%p1 bra 	$low;
	add.s32 	%r1, %r1, 100;
	shfl.sync.bfly.b32 	%r9, %r1, 16, 31, -1;
	bra.uni 	$end;
$low:
	shfl.sync.bfly.b32 	%r9, %r1, 16, 31, -1;
$end:
)",
                             seed);
    for (std::uint32_t i = 0; i < 32; ++i) ASSERT_EQ(got[i], i < 16 ? i + 116 : i - 16);
  }
}

TEST(Warps, Votes) {
  const auto got = results(R"(
	setp.lt.u32 	%p1, %r10, 5;
	setp.lt.u32 	%p2, %r10, 50;
	vote.sync.ballot.b32 	%r1, %p1, -1;
	vote.sync.any.pred 	%p3, %p1, -1;
	vote.sync.all.pred 	%p4, %p1, -1;
	vote.sync.all.pred 	%p5, %p2, -1;
	vote.sync.uni.pred 	%p6, %p1, -1;
	activemask.b32 	%r2;
	bar.warp.sync 	-1;
	mov.u32 	%r9, %r1;
	@%p3 add.s32 	%r9, %r9, 100;
	@%p4 add.s32 	%r9, %r9, 1000;
	@%p5 add.s32 	%r9, %r9, 10000;
	@%p6 add.s32 	%r9, %r9, 100000;
	setp.eq.s32 	%p7, %r2, -1;
	@%p7 add.s32 	%r9, %r9, 1000000;
)");
  for (const std::uint32_t value : got) EXPECT_EQ(value, 31u + 100 + 10000 + 1000000);
}

constexpr const char* kReverse = R"(
	.shared .align 4 .b8 	words[512];
	mov.u32 	%r1, words;
	mul.lo.s32 	%r2, %r10, 4;
	add.s32 	%r3, %r1, %r2;
	st.shared.u32 	[%r3], %r12;
	BARRIER
	sub.s32 	%r4, 508, %r2;
	add.s32 	%r4, %r1, %r4;
	ld.shared.u32 	%r9, [%r4];
)";
std::string reverse(const std::string& barrier) {
  std::string lines = kReverse;
  return lines.replace(lines.find("BARRIER"), 7, barrier);
}

TEST(Warps, ABarrierOrdersABlock) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const auto got = results(reverse("bar.sync \t0;"), seed, 128, 2);
    for (std::uint32_t i = 0; i < 256; ++i) ASSERT_EQ(got[i], i / 128 * 128 + 127 - i % 128);
  }
  EXPECT_THAT(fault_of(reverse(""), 128).text, HasSubstr("race: "));
}

TEST(Warps, ABarrierDoesNotWaitForThreadsThatHaveEnded) {
  const auto got = results(R"(
	mov.u32 	%r9, 7;
	setp.lt.u32 	%p1, %r10, 40;
	@%p1 bra 	$stay;
	st.global.u32 	[%rd12], %r9;
	ret;
$stay:
	bar.sync 	0;
)",
                           1, 96);
  EXPECT_EQ(got, std::vector<std::uint32_t>(96, 7));
}

TEST(Faults, AddressesAreAligned) {
  const Fault fault = fault_of("\tld.global.v2.u64 \t{%rd1, %rd2}, [%rd10+8];\n");
  EXPECT_EQ(fault.kind, Fault::Kind::misaligned);
  EXPECT_THAT(fault.text, HasSubstr("misaligned address: 16 bytes at 0x"));
  EXPECT_THAT(fault.text, HasSubstr("; block 0 thread 0 of test, PTX line "));
  EXPECT_THAT(fault.text, HasSubstr("ld.global.v2.u64"));
  EXPECT_EQ(fault_of("\tst.global.u16 \t[%rd11+1], %rs1;\n").kind, Fault::Kind::misaligned);
  EXPECT_EQ(fault_of("\tred.global.add.u64 \t[%rd11+4], 1;\n").kind, Fault::Kind::misaligned);
}

TEST(Faults, OutOfBounds) {
  for (const std::string line : {"ld.global.u32 \t%r1, [%rd10+256];", "ld.global.u32 \t%r1, [%rd10+-4];",
                                 "st.u8 \t[%rd10+256], %rs1;", "ld.global.v4.u32 \t{%r1, %r2, %r3, %r4}, [%rd10+256];",
                                 "ld.global.u32 \t%r1, [0];", "ld.shared.u32 \t%r1, [0];"}) {
    const Fault fault = fault_of("\t" + line + "\n");
    EXPECT_EQ(fault.kind, Fault::Kind::out_of_bounds) << line;
    EXPECT_THAT(fault.text, HasSubstr("out of bounds"));
    EXPECT_THAT(fault.text, HasSubstr(line));
  }
}

TEST(Faults, MemoryOfAnotherDeviceOrFreed) {
  Machine machine("\tld.global.u32 \t%r1, [%rd10];\n");
  std::byte* const own = machine.up(std::vector<int>{1});
  std::byte* const other = machine.up(std::vector<int>{1}, 1);
  EXPECT_FALSE(machine.run(own, nullptr).has_value());
  EXPECT_EQ(machine.run(other, nullptr)->kind, Fault::Kind::out_of_bounds);
  ASSERT_TRUE(machine.memory().free(own));
  EXPECT_FALSE(machine.memory().free(own));
  EXPECT_EQ(machine.run(own, nullptr)->kind, Fault::Kind::out_of_bounds);
  EXPECT_NE(machine.up(std::vector<int>{1}), own);
  alignas(16) std::uint32_t host[4] = {};
  const auto* const at = reinterpret_cast<std::byte*>(host);
  EXPECT_EQ(machine.run(at, nullptr)->kind, Fault::Kind::out_of_bounds);
  ASSERT_TRUE(machine.memory().add_host(host, sizeof host, false));
  EXPECT_FALSE(machine.memory().add_host(host + 1, 4, false));
  EXPECT_FALSE(machine.run(at, nullptr).has_value());
  ASSERT_FALSE(machine.memory().remove_host(host, true));
  ASSERT_TRUE(machine.memory().remove_host(host, false));
  EXPECT_EQ(machine.run(at, nullptr)->kind, Fault::Kind::out_of_bounds);
}

TEST(Faults, TheHostCannotTouchADevicesMemory) {
  Machine machine("");
  std::byte* const at = machine.up(std::vector<int>{1});
  EXPECT_DEATH(*static_cast<volatile std::byte*>(at) = std::byte{1}, "");
}

TEST(Faults, Races) {
  const auto race = [](const std::string& lines, std::uint32_t threads = 2, std::uint32_t blocks = 1) {
    return fault_of(lines, threads, blocks).text;
  };
  const std::string store = "\tst.global.u32 \t[%rd11], %r10;\n";
  EXPECT_THAT(race(store), HasSubstr("race: writes what another thread of this launch has written"));
  EXPECT_THAT(race(store, 1, 2), HasSubstr("race: writes what another thread of this launch has written"));
  EXPECT_EQ(race(store, 1), "nothing is wrong");
  // A thread adds to a word that others add to.
  const std::string add =
      "\tld.global.u32 \t%r1, [%rd11];\n\tadd.s32 \t%r1, %r1, 1;\n\tst.global.u32 \t[%rd11], %r1;\n";
  EXPECT_THAT(race(add), HasSubstr("race: "));
  EXPECT_THAT(race(add, 64), HasSubstr("race: writes what another thread of this launch has read"));
  EXPECT_EQ(race("\tred.global.add.u32 \t[%rd11], 1;\n", 64, 4), "nothing is wrong");
  EXPECT_THAT(race("\tred.global.add.u32 \t[%rd11], 1;\n\tld.global.u32 \t%r1, [%rd11];\n"), HasSubstr("race: "));
  EXPECT_EQ(race("\tld.global.u32 \t%r1, [%rd11];\n", 64, 4), "nothing is wrong");
  // Neighbours within a word.
  EXPECT_EQ(
      race("\tmul.wide.u32 \t%rd1, %r12, 1;\n\tadd.s64 \t%rd1, %rd1, %rd11;\n\tst.global.u8 \t[%rd1], %rs1;\n", 64),
      "nothing is wrong");
}

TEST(Faults, WhatIsReadAsConstantIsNotWritten) {
  const std::string read = "\tld.global.nc.u32 \t%r1, [%rd12];\n";
  const std::string write = "\tst.global.u32 \t[%rd12], %r1;\n";
  EXPECT_THAT(fault_of(read + write).text, HasSubstr("race: writes what ld.global.nc has read"));
  EXPECT_THAT(fault_of(write + read).text, HasSubstr("race: ld.global.nc reads what this launch has written"));
  EXPECT_EQ(fault_of(read).text, "nothing is wrong");
}

/// A load whose other bytes nobody looks at does not race for them.
TEST(Faults, BytesThatAreNotUsedDoNotRace) {
  const std::string lines = R"(
	setp.eq.s32 	%p1, %r10, 0;
	@%p1 st.global.u32 	[%rd11+4], %r10;
	@!%p1 PRAGMA ld.global.v2.u32 	{%r1, %r2}, [%rd11];
)";
  std::string used = lines;
  used.replace(used.find("\t@!%p1 PRAGMA"), 13, "\t.pragma \"used_bytes_mask 15\";\n\t@!%p1");
  std::string all = lines;
  all.replace(all.find(" PRAGMA"), 7, "");
  EXPECT_EQ(fault_of(used, 2).text, "nothing is wrong");
  EXPECT_THAT(fault_of(all, 2).text, HasSubstr("race: "));
}

TEST(Faults, LanesThatDoNotCome) {
  const std::string shfl = "\tshfl.sync.down.b32 \t%r1, %r2, 1, 31, -1;\n";
  EXPECT_THAT(fault_of("\tsetp.eq.s32 \t%p1, %r10, 3;\n\t@%p1 ret;\n" + shfl).text,
              HasSubstr("its mask names a lane that has ended"));
  EXPECT_THAT(fault_of(shfl, 20).text, HasSubstr("its mask names a lane that has ended"));
  EXPECT_THAT(fault_of("\tshfl.sync.down.b32 \t%r1, %r2, 1, 31, 14;\n").text, HasSubstr("is not in its own mask"));
  EXPECT_THAT(fault_of("\tsetp.eq.s32 \t%p1, %r10, 3;\n\t@!%p1 bra \t$on;\n\tbar.sync \t0;\n$on:\n" + shfl).text,
              HasSubstr("waits for lanes that do not come"));
  EXPECT_THAT(
      fault_of("\tsetp.lt.u32 \t%p1, %r10, 4;\n\t@!%p1 bra \t$on;\n\tshfl.sync.idx.b32 \t%r1, %r2, 9, 31, 15;\n$on:\n")
          .text,
      HasSubstr("reads from a lane that its mask does not name"));
  const std::string parted = "\tsetp.lt.u32 \t%p1, %r10, 4;\n\t@%p1 bra \t$on;\n\tbar.warp.sync \t-1;\n$on:\n" + shfl;
  EXPECT_THAT(fault_of(parted).text, HasSubstr("lanes meet at different instructions"));
}

TEST(Faults, NoEnd) {
  EXPECT_THAT(fault_of("$on:\n\tbra.uni \t$on;\n", 1).text, HasSubstr("does not end"));
  EXPECT_THAT(fault_of("\tdiv.u32 \t%r1, %r10, %r10;\n").text, HasSubstr("division by zero"));
}

}  // namespace
}  // namespace deltasync::emulator
