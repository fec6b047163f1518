// A segment's memory on machines of several nodes: which part is taken where, and by whom.
#include "shm/reserve.hpp"

#include <gmock/gmock-more-matchers.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <set>

#include "placement/regions.hpp"
#include "shm/support.hpp"
#include "tests/support/fake_numa.hpp"

namespace deltasync::shm::testing {
namespace {

using test::FakeNuma;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::uint64_t kStripe = NumaPlacement::kStripeBytes;

NumaPlacementPtr made(NumaSystem& system) {
  return NumaPlacement::make({}, system).value();
}

TEST(Reserve, PartsCoverTheFileAndBothHalvesAlike) {
  for (const unsigned nodes : {2U, 4U}) {
    FakeNuma system(nodes, 2);
    const auto numa_placement = made(system);
    for (const std::uint64_t half_bytes : {kStripe / 4, kStripe, 5 * kStripe, 7 * kStripe + 12'345}) {
      const auto plan = plan_segment(half_bytes, 1000, 10, 50).value();
      std::uint64_t at = 0;
      std::set<unsigned> used;
      for (const FilePart& part : parts_of(plan, *numa_placement)) {
        EXPECT_EQ(part.begin, at) << "nothing is left out, nothing taken twice";
        EXPECT_LT(part.begin, part.end);
        EXPECT_EQ(part.begin % kHalfAlignment, 0U) << "no huge page is of two parts";
        at = part.end;
        for (unsigned h = 0; h < kHalves; ++h) {
          const std::uint64_t first = plan.half_offset[h];
          if (part.begin < first || part.begin >= first + half_bytes) continue;
          EXPECT_EQ(part.node, numa_placement->node_of(part.begin - first));
          EXPECT_EQ(part.node, numa_placement->node_of(std::min(part.end, first + half_bytes) - 1 - first));
          used.insert(part.node);
        }
      }
      EXPECT_EQ(at, plan.segment_bytes);
      EXPECT_EQ(used.size(), std::min<std::uint64_t>(nodes, (half_bytes + kStripe - 1) / kStripe));
    }
  }
}

class Placed : public ::testing::Test {
 protected:
  Placed() = default;
  ~Placed() override { (void)Segment::unlink(path_); }
  Result<std::unique_ptr<Segment>> create_placed(const NumaPlacement* numa_placement) const {
    return Segment::create(path_, 1, {2 * kStripe + 5, kBatches, some_digest()}, {}, {}, numa_placement);
  }
  const SegmentPath path_{"/dev/shm", "deltasync-placed-" + std::to_string(::getpid())};
};

TEST_F(Placed, EachNodesMemoryIsTakenByAThreadOfItsOwn) {
  FakeNuma system(2, 2);
  const auto numa_placement = made(system);
  auto segment = create_placed(numa_placement.get());
  if (!segment && segment.error().code() == Errc::no_space) GTEST_SKIP() << segment.error().to_string();
  ASSERT_TRUE(segment) << segment.error().to_string();
  EXPECT_THAT(system.of_thread("reserve-0"), ElementsAre("run on 0-1", "prefer 0"));
  EXPECT_THAT(system.of_thread("reserve-1"), ElementsAre("run on 2-3", "prefer 1"));
  EXPECT_EQ(system.calls().size(), 4U) << "and the caller's thread is left alone";
  struct stat st {};
  ASSERT_EQ(::fstat((*segment)->file(), &st), 0);
  EXPECT_GE(static_cast<std::uint64_t>(st.st_blocks) * 512, static_cast<std::uint64_t>(st.st_size)) << "pages missing";
  fill_half(**segment, 1, 7);
  EXPECT_TRUE(half_is(**segment, 0, 0));
  EXPECT_TRUE(half_is(**segment, 1, 7));
}

TEST_F(Placed, WhereAllIsRefusedTheSegmentIsMadeAllTheSame) {
  FakeNuma system(2, 2);
  system.refuse_cpus = EPERM;
  system.refuse_memory = EPERM;
  const auto numa_placement = made(system);
  auto segment = create_placed(numa_placement.get());
  if (!segment && segment.error().code() == Errc::no_space) GTEST_SKIP() << segment.error().to_string();
  ASSERT_TRUE(segment) << segment.error().to_string();
  struct stat st {};
  ASSERT_EQ(::fstat((*segment)->file(), &st), 0);
  EXPECT_GE(static_cast<std::uint64_t>(st.st_blocks) * 512, static_cast<std::uint64_t>(st.st_size)) << "pages missing";
}

TEST_F(Placed, WithoutAPlacementNothingIsAsked) {
  FakeNuma system(1, 2);
  const auto numa_placement = made(system);
  EXPECT_EQ(numa_placement, nullptr);
  auto segment = create_placed(numa_placement.get());
  if (!segment && segment.error().code() == Errc::no_space) GTEST_SKIP() << segment.error().to_string();
  ASSERT_TRUE(segment) << segment.error().to_string();
  EXPECT_THAT(system.calls(), IsEmpty());
}

}  // namespace
}  // namespace deltasync::shm::testing
